"""The primitives of rows, which are each other's transposes: all_gather, psum_scatter and all_to_all.

Leaves are [ranks, ...]: row r is for rank r, or came from it.
"""

import math

from jax import lax

from jaxcgx.exchange import primitive, schedules
from jaxcgx.exchange.keys import BACK, fold
from jaxcgx.exchange.message import Message, Stage


def all_gather(message: Message, stage: Stage, to: str) -> list:
    """Every rank's leaves, as rows."""
    params = dict(net=stage.net, stage=stage, ranks=stage.net.size, to=to)
    return primitive.bind(all_gather_p, message, **params).leaves


def psum_scatter(message: Message, stage: Stage, own: str) -> list:
    """The sum over ranks of this rank's row."""
    return primitive.bind(psum_scatter_p, message, net=stage.net, stage=stage, own=own).leaves


def all_to_all(message: Message, stage: Stage) -> list:
    """The rows that the ranks have for this one."""
    return primitive.bind(all_to_all_p, message, net=stage.net, stage=stage).leaves


def _back(message, cts):
    """The message of cotangents."""
    return Message(message.ids, cts, fold(message.key, BACK))


# all_gather


def _all_gather(message, *, net, stage, ranks, to):
    return message.replace(key=None, leaves=schedules.all_gather(stage, message))


# Rank r's leaf is in row r of every rank: its cotangent is the sum of theirs, psum_scatter. Where the result is typed
# as one value that all ranks share ("invarying"), so is its cotangent, and rank r takes row r of it. An axis of vmap
# has no such type: its cotangents are rows, most of them zero, that psum_scatter adds; ranks of a mesh among them would
# count double.
def _all_gather_transpose(message, cts, *, net, stage, ranks, to, batch):
    mapped = math.prod(size for size, name in batch if name is not None)
    if to == "invarying":
        if mapped == 1:
            return [lax.dynamic_index_in_dim(ct, net.rank, len(batch), keepdims=False) for ct in cts]
        cts = [ct * (mapped / ranks) for ct in cts]
    params = dict(net=net, stage=stage.transposed(), own="raw", batch=batch)
    return primitive.bind(psum_scatter_p, _back(message, cts), **params).leaves


all_gather_p = primitive.define(
    "all_gather",
    _all_gather,
    lambda shape, *, ranks, **params: (ranks, *shape),
    _all_gather_transpose,
    same=True,
    invarying=lambda to, **params: to == "invarying",
)


# psum_scatter


def _psum_scatter(message, *, net, stage, own):
    sums = schedules.reduce_scatter(stage, message, own)
    return message.replace(key=None, leaves=[x.astype(leaf.dtype) for x, leaf in zip(sums, message.leaves)])


# Row r of every rank's leaf went into the sum of rank r: its cotangent, for every rank, is rank r's.
def _psum_scatter_transpose(message, cts, *, net, stage, own, batch):
    ranks = message.leaves[0].shape[len(batch)]
    params = dict(net=net, stage=stage.transposed(), ranks=ranks, to="varying", batch=batch)
    return primitive.bind(all_gather_p, _back(message, cts), **params).leaves


psum_scatter_p = primitive.define(
    "psum_scatter", _psum_scatter, lambda shape, **params: shape[1:], _psum_scatter_transpose, same=False
)


# all_to_all


def _all_to_all(message, *, net, stage):
    return message.replace(key=None, leaves=schedules.all_to_all(stage, message))


# Row r went to rank r: its cotangent comes back from there, the way that row r of the result came.
def _all_to_all_transpose(message, cts, *, net, stage, batch):
    params = dict(net=net, stage=stage.transposed(), batch=batch)
    return primitive.bind(all_to_all_p, _back(message, cts), **params).leaves


all_to_all_p = primitive.define(
    "all_to_all", _all_to_all, lambda shape, **params: shape, _all_to_all_transpose, same=False
)
