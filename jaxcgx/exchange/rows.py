"""The primitives of rows: all_gather and psum_scatter, which are each other's transposes, and all_to_all, its own.

Leaves are [ranks, ...]: row r is for rank r, or came from it.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxcgx.exchange import primitive, schedules
from jaxcgx.exchange.keys import BACK, fold
from jaxcgx.exchange.message import Message, Stage
from jaxcgx.transports.base import Transport, join_rows, split_rows


class Join(NamedTuple):
    """How the last of several gathers joins what all have gathered, [ranks of the last, ..., ranks of the first, ...].

    It is part of that gather: jax.checkpoint's policies see operations, and would keep whole weights as the results of
    a reshape.
    """

    axis: int  # as in lax
    tiled: bool
    sizes: tuple[int, ...]  # the ranks of each gather, outermost first

    def shape(self, gathered: tuple[int, ...]) -> tuple[int, ...]:
        shape, n = list(gathered[len(self.sizes) :]), math.prod(self.sizes)
        d = self._dimension(len(shape))
        return (*shape[:d], n * shape[d], *shape[d + 1 :]) if self.tiled else (*shape[:d], n, *shape[d:])

    def join(self, x: jax.Array) -> jax.Array:
        n = len(self.sizes)
        outermost_first = jnp.transpose(x, (*reversed(range(n)), *range(n, x.ndim)))
        shape = x.shape[n:]
        return join_rows(
            outermost_first.reshape(math.prod(self.sizes), *shape), self._dimension(len(shape)), self.tiled
        )

    def split(self, x: jax.Array) -> jax.Array:
        """The inverse of `join`."""
        d, n = self._dimension(x.ndim - (0 if self.tiled else 1)), len(self.sizes)
        rows = split_rows(x, d, size=math.prod(self.sizes), tiled=self.tiled)
        apart = rows.reshape(*self.sizes, *rows.shape[1:])
        return jnp.transpose(apart, (*reversed(range(n)), *range(n, apart.ndim)))

    def _dimension(self, ndim: int) -> int:
        """The dimension, counted from the front, of leaves of `ndim` dimensions."""
        return self.axis % (ndim if self.tiled else ndim + 1)


def all_gather(message: Message, stage: Stage, to: str, join: Join | None = None) -> list[Any]:
    """Every rank's leaves, as rows, or joined."""
    params = dict(net=stage.net, stage=stage, ranks=stage.net.size, to=to, join=join)
    return primitive.bind(all_gather_p, message, **params).leaves


def psum_scatter(message: Message, stage: Stage, own: str) -> list[Any]:
    """The sum over ranks of this rank's row."""
    return primitive.bind(psum_scatter_p, message, net=stage.net, stage=stage, own=own).leaves


def all_to_all(message: Message, stage: Stage) -> list[Any]:
    """The rows that the ranks have for this one."""
    return primitive.bind(all_to_all_p, message, net=stage.net, stage=stage).leaves


def _back(message: Message, cts: list[Any]) -> Message:
    """The message of cotangents."""
    return Message(message.ids, cts, fold(message.key, BACK))


# all_gather


def _all_gather(message: Message, *, net: Transport, stage: Stage, ranks: int, to: str, join: Join | None) -> Message:
    gathered = schedules.all_gather(stage, message)
    return message.replace(key=None, leaves=gathered if join is None else [join.join(x) for x in gathered])


# Its name is that of lax's operation, so that policies of jax.checkpoint which don't save that don't save this.
# Row r of every rank's result is rank r's leaf, so the leaf's cotangent is the sum of the cotangents of these rows:
# psum_scatter. Where the type of the result says that all ranks share one value ("invarying"), all ranks have the same
# cotangent, and rank r takes row r of it. An axis of vmap has no such type: each of its ranks has a cotangent of its
# own, most of whose rows are zero, and psum_scatter adds them. Ranks of a mesh beside it share a cotangent, which would
# then count several times: hence the factor.
def _all_gather_transpose(
    message: Message, cts: list[Any], *, stage: Stage, to: str, join: Join | None, batch: tuple[Any, ...], **params: Any
) -> list[Any]:
    net, ranks = params["net"], params["ranks"]
    if join is not None:
        split = join.split
        for _ in batch:
            split = jax.vmap(split)
        cts = [split(ct) for ct in cts]
    mapped = math.prod(size for size, name in batch if name is not None)
    if to == "invarying":
        if mapped == 1:
            return [lax.dynamic_index_in_dim(ct, net.rank, len(batch), keepdims=False) for ct in cts]
        cts = [ct * (mapped / ranks) for ct in cts]
    back = dict(net=net, stage=stage.transposed(), own="raw", batch=batch)
    return primitive.bind(psum_scatter_p, _back(message, cts), **back).leaves


def _gathered_shape(shape: tuple[int, ...], *, ranks: int, join: Join | None = None, **params: Any) -> tuple[int, ...]:
    rows = (ranks, *shape)
    return rows if join is None else join.shape(rows)


all_gather_p: Any = primitive.define(
    "all_gather",
    _all_gather,
    shape=_gathered_shape,
    transpose=_all_gather_transpose,
    same=True,
    invarying=lambda to, **params: to == "invarying",
)


# psum_scatter


def _psum_scatter(message: Message, *, net: Transport, stage: Stage, own: str) -> Message:
    sums = schedules.reduce_scatter(stage, message, own)
    return message.replace(key=None, leaves=[x.astype(leaf.dtype) for x, leaf in zip(sums, message.leaves)])


# Row r of every rank's leaf went into the sum of rank r, so its cotangent on every rank is that of rank r's sum.
def _psum_scatter_transpose(
    message: Message, cts: list[Any], *, net: Transport, stage: Stage, own: str, batch: tuple[Any, ...]
) -> list[Any]:
    ranks = message.leaves[0].shape[len(batch)]
    params = dict(net=net, stage=stage.transposed(), ranks=ranks, to="varying", join=None, batch=batch)
    return primitive.bind(all_gather_p, _back(message, cts), **params).leaves


psum_scatter_p: Any = primitive.define(
    "jaxcgx_psum_scatter",
    _psum_scatter,
    shape=lambda shape, **params: shape[1:],
    transpose=_psum_scatter_transpose,
    same=False,
)


# all_to_all


def _all_to_all(message: Message, *, net: Transport, stage: Stage) -> Message:
    return message.replace(key=None, leaves=schedules.all_to_all(stage, message))


# Row r went to rank r, so its cotangent comes back from rank r by the same exchange.
def _all_to_all_transpose(
    message: Message, cts: list[Any], *, net: Transport, stage: Stage, batch: tuple[Any, ...]
) -> list[Any]:
    params = dict(net=net, stage=stage.transposed(), batch=batch)
    return primitive.bind(all_to_all_p, _back(message, cts), **params).leaves


all_to_all_p: Any = primitive.define(
    "jaxcgx_all_to_all", _all_to_all, shape=lambda shape, **params: shape, transpose=_all_to_all_transpose, same=False
)
