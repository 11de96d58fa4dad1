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
    if leader:
        return _by_leaders(stages, leaves, ids, key, schedule, own, divisor)
    results = [None] * len(leaves)
    for group in _groups(stages, leaves):
        flat = _by_shards(stages, _join([leaves[i] for i in group], stages), ids[group[0]], key, schedule, own, divisor)
        at = 0
        for i in group:
            results[i] = flat[at : at + leaves[i].size].reshape(leaves[i].shape)
            at += _padded(leaves[i].size, stages)
    return results


def _groups(stages, leaves):
    """Indices of the leaves that make one vector: those of a dtype; or each alone, for codecs with one bucket a leaf."""
    if any(codec.meta and not codec.bucket_size for _, codec in stages):
        return [[i] for i in range(len(leaves))]
    return [[i for i, x in enumerate(leaves) if x.dtype == dtype] for dtype in dict.fromkeys(x.dtype for x in leaves)]


def _padded(size, stages):
    """A leaf's size in the vector: leaves start on a bucket of every codec."""
    unit = math.lcm(*(codec.bucket_size or 1 for _, codec in stages))
    return -(-size // unit) * unit


def _join(leaves, stages):
    """The leaves in one vector that splits into whole buckets for all inner ranks. A bucket is filled up with its last
    number, which changes neither its minimum nor its maximum."""
    parts = [lax.pad(x.reshape(-1), x.reshape(-1)[-1], [(0, _padded(x.size, stages) - x.size, 0)]) for x in leaves]
    unit = _padded(1, stages) * math.prod(Axes(names).size for names, _ in stages[1:])
    total = sum(x.size for x in parts)
    return jnp.concatenate([*parts, jnp.zeros(-total % unit, parts[0].dtype)])


def _by_shards(stages, shard, leaf, key, schedule, own, divisor):
    inner = list(enumerate(stages))[1:]
    for i, (names, codec) in reversed(inner):
        axes, others = Axes(names), stages[:i] + stages[i + 1 :]
        rows = shard.reshape(axes.size, -1)
        if codec.raw:
            shard = lax.psum_scatter(rows, names)
        else:
            (shard,) = schedules.reduce_scatter("one_shot", axes, codec, [rows], (leaf,), schedules.stage_key(key, i, others), own)
    (shard,) = _exchange(Axes(stages[0][0]), stages[0], [shard], (leaf,), schedules.stage_key(key, 0, stages[1:]), schedule, own, divisor)
    for i, (names, codec) in inner:
        if codec.raw:
            rows = lax.all_gather(shard, names)
        else:
            (rows,) = schedules.all_gather(Axes(names), codec, [shard], (leaf,), schedules.stage_key(key, len(stages) + i, stages[i + 1 :]))
        shard = rows.reshape(-1)
    return shard


def _by_leaders(stages, leaves, ids, key, schedule, own, divisor):
    for i, stage in reversed(list(enumerate(stages))[1:]):
        others = stages[:i]  # the ranks further in have the same sum by now, and must get the same bits
        leaves = _exchange(Axes(stage[0]), stage, leaves, ids, schedules.stage_key(key, i, others), "two_shot", own, 1.0)
    leaders = Leaders(stages[0][0], sum((names for names, _ in stages[1:]), ()))
    return _exchange(leaders, stages[0], leaves, ids, schedules.stage_key(key, 0, ()), schedule, own, divisor)


def _exchange(axes, stage, leaves, ids, key, schedule, own, divisor):
    """The sum over one stage, divided."""
    names, codec = stage
    if axes.size > 1 and not codec.raw:
        return schedules.allreduce(schedule, axes, codec, leaves, ids, key, own, divisor)
    sums = lax.psum(leaves, names)
    return [(x.astype(jnp.float32) / divisor).astype(x.dtype) for x in sums] if divisor != 1.0 else sums
