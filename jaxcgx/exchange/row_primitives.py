"""The primitives of exchanges of rows: all_gather, its transpose psum_scatter, and all_to_all, its own transpose.

Leaves are [ranks, ...]: row r is for rank r, or came from rank r.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxcgx.exchange import keys, primitive, schedules
from jaxcgx.exchange.message import Message, Stage, Sum
from jaxcgx.transports.base import Transport, join_rows, split_rows


class Join(NamedTuple):
    """Joins the result of several gathers, [ranks of the last gather, ..., ranks of the first gather, ...].

    The join is part of the last gather's primitive. Otherwise, policies of jax.checkpoint would see a separate reshape,
    and save its result, the whole weights.
    """

    dimensions: tuple[int, ...]  # for each leaf: the dimension to join along, counted from the front
    tiled: bool  # as in lax
    sizes: tuple[int, ...]  # the number of ranks of each gather, outermost first

    def shape(self, gathered: tuple[int, ...], i: int) -> tuple[int, ...]:
        """Returns the shape of joined leaf i, from the shape of the gathered leaf."""
        shape, n, d = list(gathered[len(self.sizes) :]), math.prod(self.sizes), self.dimensions[i]
        return (*shape[:d], n * shape[d], *shape[d + 1 :]) if self.tiled else (*shape[:d], n, *shape[d:])

    def join(self, leaves: list[Any]) -> list[jax.Array]:
        n = len(self.sizes)
        joined: list[jax.Array] = []
        for x, d in zip(leaves, self.dimensions):
            outermost_first = jnp.transpose(x, (*reversed(range(n)), *range(n, x.ndim)))
            joined.append(join_rows(outermost_first.reshape(math.prod(self.sizes), *x.shape[n:]), d, self.tiled))
        return joined

    def split(self, leaves: list[Any]) -> list[jax.Array]:
        """The inverse of `join`."""
        n = len(self.sizes)
        split: list[jax.Array] = []
        for x, d in zip(leaves, self.dimensions):
            rows = split_rows(x, d, size=math.prod(self.sizes), tiled=self.tiled)
            apart = rows.reshape(*self.sizes, *rows.shape[1:])
            split.append(jnp.transpose(apart, (*reversed(range(n)), *range(n, apart.ndim))))
        return split


def all_gather(message: Message, stage: Stage, to: str, join: Join | None = None) -> list[Any]:
    """Returns every rank's leaves, as rows or joined."""
    params = dict(net=stage.net, stage=stage, ranks=stage.net.size, to=to, join=join)
    return primitive.bind(all_gather_p, message, **params).leaves


def psum_scatter(message: Message, stage: Stage, how: Sum) -> Message:
    """Returns the divided sum over ranks of this rank's row, and the new residuals if the message has residuals."""
    return primitive.bind(psum_scatter_p, message, net=stage.net, stage=stage, how=how)


def all_to_all(message: Message, stage: Stage) -> list[Any]:
    """Returns the rows that all ranks have for this rank."""
    return primitive.bind(all_to_all_p, message, net=stage.net, stage=stage).leaves


def _back(message: Message, cts: list[Any], batch: primitive.Batch) -> Message:
    """Returns the message of cotangents."""
    return Message(message.ids, cts, keys.back(message.key, len(batch)) if message.back is None else message.back)


# all_gather


def _all_gather(message: Message, *, net: Transport, stage: Stage, ranks: int, to: str, join: Join | None) -> Message:
    gathered = schedules.all_gather(stage, message)
    return message.replace(key=None, back=None, leaves=gathered if join is None else join.join(gathered))


# The primitive has the name of lax's primitive. So policies of jax.checkpoint treat the results of both alike.
# Row r of every rank's result is rank r's leaf, so the leaf's cotangent is the sum of the cotangents of these rows:
# psum_scatter. If the type of the result says that all ranks share one value ("invarying"), all ranks have the same
# cotangent, and rank r takes row r of it. An axis of vmap has no such type: each of its ranks has its own cotangent,
# with mostly zero rows, and psum_scatter adds them. If ranks share a cotangent along another mesh axis,
# psum_scatter counts it several times. The factor corrects this.
def _all_gather_transpose(
    message: Message, cts: list[Any], *, stage: Stage, to: str, join: Join | None, batch: primitive.Batch, **params: Any
) -> list[Any]:
    net, ranks = params["net"], params["ranks"]
    if join is not None:
        split = join.split
        for _ in batch:
            split = jax.vmap(split)
        cts = split(cts)
    mapped = math.prod(size for size, name in batch if name is not None)
    if to == "invarying":
        if mapped == 1:
            return [lax.dynamic_index_in_dim(ct, net.rank, len(batch), keepdims=False) for ct in cts]
        cts = [ct * (mapped / ranks) for ct in cts]
    back = dict(net=net, stage=stage.transposed(), how=Sum(), batch=batch)
    return primitive.bind(psum_scatter_p, _back(message, cts, batch), **back).leaves


def _gathered_shape(
    shape: tuple[int, ...], i: int, *, ranks: int, join: Join | None = None, **params: Any
) -> tuple[int, ...]:
    rows = (ranks, *shape)
    return rows if join is None else join.shape(rows, i)


all_gather_p: Any = primitive.define(
    "all_gather",
    _all_gather,
    shape=_gathered_shape,
    transpose=_all_gather_transpose,
    same=True,
    invarying=lambda to, **params: to == "invarying",
)


# psum_scatter


def _psum_scatter(message: Message, *, net: Transport, stage: Stage, how: Sum) -> Message:
    summed = schedules.reduce_scatter(stage, message, how)
    leaves = [x.astype(leaf.dtype) for x, leaf in zip(summed.leaves, message.leaves)]
    return message.replace(key=None, back=None, leaves=leaves, residuals=summed.residuals)


# Row r of every rank's leaf was added to the sum of rank r, so on every rank its cotangent is the cotangent of rank r's
# sum.
def _psum_scatter_transpose(
    message: Message, cts: list[Any], *, net: Transport, stage: Stage, how: Sum, batch: primitive.Batch
) -> list[Any]:
    ranks, cts = message.leaves[0].shape[len(batch)], [ct / how.divisor for ct in cts]
    params = dict(net=net, stage=stage.transposed(), ranks=ranks, to="varying", join=None, batch=batch)
    return primitive.bind(all_gather_p, _back(message, cts, batch), **params).leaves


psum_scatter_p: Any = primitive.define(
    "jaxcgx_psum_scatter",
    _psum_scatter,
    shape=lambda shape, i, **params: shape[1:],
    transpose=_psum_scatter_transpose,
    same=False,
)


# all_to_all


def _all_to_all(message: Message, *, net: Transport, stage: Stage) -> Message:
    return message.replace(key=None, back=None, leaves=schedules.all_to_all(stage, message))


# Row r went to rank r, so its cotangent comes back from rank r by the same exchange.
def _all_to_all_transpose(
    message: Message, cts: list[Any], *, net: Transport, stage: Stage, batch: primitive.Batch
) -> list[Any]:
    params = dict(net=net, stage=stage.transposed(), batch=batch)
    return primitive.bind(all_to_all_p, _back(message, cts, batch), **params).leaves


all_to_all_p: Any = primitive.define(
    "jaxcgx_all_to_all",
    _all_to_all,
    shape=lambda shape, i, **params: shape,
    transpose=_all_to_all_transpose,
    same=False,
)
