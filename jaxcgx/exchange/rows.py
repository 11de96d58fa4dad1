"""The primitives of rows, which are each other's transposes: all_gather, psum_scatter and all_to_all.

Leaves are [ranks, ...]: row r is for rank r, or came from it. `backward` is the codec of the transpose.
"""

import math

from jax import lax

from jaxcgx.codecs.base import Codec
from jaxcgx.exchange import primitive, schedules
from jaxcgx.exchange.keys import BACK, fold
from jaxcgx.exchange.message import Message, Stage


def all_gather(message: Message, stage: Stage, backward: Codec, to: str) -> list:
    """Every rank's leaves, as rows."""
    params = dict(net=stage.net, stage=stage, ranks=stage.net.size, backward=backward, to=to)
    return primitive.bind(all_gather_p, message, **params).leaves


def psum_scatter(message: Message, stage: Stage, backward: Codec, own: str) -> list:
    """The sum over ranks of this rank's row."""
    params = dict(net=stage.net, stage=stage, backward=backward, own=own)
    return primitive.bind(psum_scatter_p, message, **params).leaves


def all_to_all(message: Message, stage: Stage, backward: Codec) -> list:
    """The rows that the ranks have for this one."""
    return primitive.bind(all_to_all_p, message, net=stage.net, stage=stage, backward=backward).leaves


def _back(message, cts, stage, backward):
    """The message of cotangents, and the stage that it goes back by."""
    return Message(message.ids, cts, fold(message.key, BACK)), Stage(stage.net, backward)


# all_gather


def _all_gather(message, *, net, stage, ranks, backward, to):
    return message.replace(key=None, leaves=schedules.all_gather(stage, message))


# Rank r's leaf is in row r of every rank: its cotangent is the sum of theirs, psum_scatter. Where the result is typed
# as one value that all ranks share ("invarying"), so is its cotangent, and rank r takes row r of it. An axis of vmap
# has no such type: its cotangents are rows, most of them zero, that psum_scatter adds; ranks of a mesh among them would
# count double.
def _all_gather_transpose(message, cts, *, net, stage, ranks, backward, to, batch):
    mapped = math.prod(size for size, name in batch if name is not None)
    if to == "invarying":
        if mapped == 1:
            return [lax.dynamic_index_in_dim(ct, net.rank, len(batch), keepdims=False) for ct in cts]
        cts = [ct * (mapped / ranks) for ct in cts]
    back, by = _back(message, cts, stage, backward)
    params = dict(net=net, stage=by, backward=stage.codec, own="raw", batch=batch)
    return primitive.bind(psum_scatter_p, back, **params).leaves


all_gather_p = primitive.define(
    "all_gather",
    _all_gather,
    lambda shape, *, ranks, **params: (ranks, *shape),
    _all_gather_transpose,
    same=True,
    invarying=lambda to, **params: to == "invarying",
)


# psum_scatter


def _psum_scatter(message, *, net, stage, backward, own):
    sums = schedules.reduce_scatter(stage, message, own)
    return message.replace(key=None, leaves=[x.astype(leaf.dtype) for x, leaf in zip(sums, message.leaves)])


# Row r of every rank's leaf went into the sum of rank r: its cotangent, for every rank, is rank r's.
def _psum_scatter_transpose(message, cts, *, net, stage, backward, own, batch):
    ranks = message.leaves[0].shape[len(batch)]
    back, by = _back(message, cts, stage, backward)
    params = dict(net=net, stage=by, ranks=ranks, backward=stage.codec, to="varying", batch=batch)
    return primitive.bind(all_gather_p, back, **params).leaves


psum_scatter_p = primitive.define(
    "psum_scatter", _psum_scatter, lambda shape, **params: shape[1:], _psum_scatter_transpose, same=False
)


# all_to_all


def _all_to_all(message, *, net, stage, backward):
    return message.replace(key=None, leaves=schedules.all_to_all(stage, message))


# Row r went to rank r: its cotangent comes back from there, the way that row r of the result came.
def _all_to_all_transpose(message, cts, *, net, stage, backward, batch):
    back, by = _back(message, cts, stage, backward)
    return primitive.bind(all_to_all_p, back, net=net, stage=by, backward=stage.codec, batch=batch).leaves


all_to_all_p = primitive.define(
    "all_to_all", _all_to_all, lambda shape, **params: shape, _all_to_all_transpose, same=False
)
