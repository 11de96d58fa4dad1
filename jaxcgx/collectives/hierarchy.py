"""Sums over several axes, each with a codec of its own: little over the slow network, all of it over the fast one.

Shards: reduce-scatter over the inner axes, the exchange over the outermost one, of a shard on every inner rank, all-gather
back. Every inner rank talks to its peers on the other nodes, so every network card works.

Leader (CGX's intra-broadcast): sum over the inner axes, an exchange among the inner ranks 0 alone, and their bytes
to the others, who decode the same.
"""
import math

import jax.numpy as jnp
from jax import lax

from jaxcgx.collectives import schedules
from jaxcgx.transports.xla import Axes, Leaders


def allreduce(stages, leaves, ids, key, schedule, own, leader, divisor):
    """The leaves' sum over all stages ((axes, codec), ...), outermost first, divided by `divisor`."""
    how = _by_leaders if leader else _by_shards
    return how(stages, leaves, ids, key, schedule, own, divisor)


# Every leaf is cut into a share for each inner rank, a leaf of its own to the codecs: which bits come out does not depend
# on what else is in the message. Raw() stages send bytes too: leaves share a message, for which XLA has no reduce-scatter.
def _by_shards(stages, leaves, ids, key, schedule, own, divisor):
    inner = list(enumerate(stages))[1:]
    shards = [_cut(x, [Axes(names).size for _, (names, _) in reversed(inner)]) for x in leaves]
    for i, (names, codec) in reversed(inner):
        others = schedules.stage_key(key, i, stages[:i] + stages[i + 1 :])
        shards = schedules.reduce_scatter("one_shot", Axes(names), codec, shards, ids, others, own)
    (names, codec), others = stages[0], schedules.stage_key(key, 0, stages[1:])
    shards = _exchange(Axes(names), codec, shards, ids, others, schedule, own, divisor)
    shards = [x.astype(leaf.dtype) for x, leaf in zip(shards, leaves)]
    for i, (names, codec) in inner:
        further_in = schedules.stage_key(key, len(stages) + i, stages[i + 1 :])  # further out all have the same by now
        shards = schedules.all_gather(Axes(names), codec, shards, ids, further_in)
    return [x.reshape(-1)[: leaf.size].reshape(leaf.shape) for x, leaf in zip(shards, leaves)]


def _cut(x, sizes):
    """[*sizes, share], filled up with the last number, which changes neither a minimum nor a maximum."""
    share = -(-x.size // math.prod(sizes))
    flat = x.reshape(-1)
    if missing := math.prod(sizes) * share - x.size:
        flat = lax.pad(flat, flat[-1], [(0, missing, 0)])
    return flat.reshape(*sizes, share)


def _by_leaders(stages, leaves, ids, key, schedule, own, divisor):
    dtypes, leaves = [x.dtype for x in leaves], [x.astype(jnp.float32) for x in leaves]
    for i, (names, codec) in reversed(list(enumerate(stages))[1:]):
        others = stages[:i]  # the ranks further in have the same sum by now, and must get the same bits
        leaves = _exchange(Axes(names), codec, leaves, ids, schedules.stage_key(key, i, others), "two_shot", own, 1.0)
    (names, codec), inner = stages[0], sum((names for names, _ in stages[1:]), ())
    sums = _exchange(Leaders(names, inner), codec, leaves, ids, schedules.stage_key(key, 0, ()), schedule, own, divisor)
    return [x.astype(dtype) for x, dtype in zip(sums, dtypes)]


def _exchange(axes, codec, leaves, ids, key, schedule, own, divisor):
    """The sum over one stage of float32 leaves, divided."""
    if axes.size > 1 and not codec.raw:
        return schedules.allreduce(schedule, axes, codec, leaves, ids, key, own, divisor)
    return [x / divisor for x in lax.psum(leaves, axes.names)]
