"""The primitives of rows: all_gather and psum_scatter, which are each other's transposes, and all_to_all, its own.

Leaves are [ranks, ...]: row r is for rank r, or came from it.
"""

import math
from typing import Any

from jax import lax

from jaxcgx.exchange import primitive, schedules
from jaxcgx.exchange.keys import BACK, fold
from jaxcgx.exchange.message import Message, Stage
from jaxcgx.transports.base import Transport


def all_gather(message: Message, stage: Stage, to: str) -> list[Any]:
    """Every rank's leaves, as rows."""
    params = dict(net=stage.net, stage=stage, ranks=stage.net.size, to=to)
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


def _all_gather(message: Message, *, net: Transport, stage: Stage, ranks: int, to: str) -> Message:
    return message.replace(key=None, leaves=schedules.all_gather(stage, message))


# Row r of every rank's result is rank r's leaf, so the leaf's cotangent is the sum of the cotangents of these rows:
# psum_scatter. Where the type of the result says that all ranks share one value ("invarying"), all ranks have the same
# cotangent, and rank r takes row r of it. An axis of vmap has no such type: each of its ranks has a cotangent of its
# own, most of whose rows are zero, and psum_scatter adds them. Ranks of a mesh beside it share a cotangent, which would
# then count several times: hence the factor.
def _all_gather_transpose(
    message: Message, cts: list[Any], *, net: Transport, stage: Stage, ranks: int, to: str, batch: tuple[Any, ...]
) -> list[Any]:
    mapped = math.prod(size for size, name in batch if name is not None)
    if to == "invarying":
        if mapped == 1:
            return [lax.dynamic_index_in_dim(ct, net.rank, len(batch), keepdims=False) for ct in cts]
        cts = [ct * (mapped / ranks) for ct in cts]
    params = dict(net=net, stage=stage.transposed(), own="raw", batch=batch)
    return primitive.bind(psum_scatter_p, _back(message, cts), **params).leaves


all_gather_p: Any = primitive.define(
    "all_gather",
    _all_gather,
    lambda shape, *, ranks, **params: (ranks, *shape),
    _all_gather_transpose,
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
    params = dict(net=net, stage=stage.transposed(), ranks=ranks, to="varying", batch=batch)
    return primitive.bind(all_gather_p, _back(message, cts), **params).leaves


psum_scatter_p: Any = primitive.define(
    "psum_scatter", _psum_scatter, lambda shape, **params: shape[1:], _psum_scatter_transpose, same=False
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
    "all_to_all", _all_to_all, lambda shape, **params: shape, _all_to_all_transpose, same=False
)
