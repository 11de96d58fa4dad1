"""Sums over several transports, each with a codec of its own: little over the slow network, all of it over the fast
one.

Shards: reduce-scatter over the inner ranks, the exchange over the outermost ones, of a shard on every inner rank,
all-gather
back. Every inner rank talks to its peers on the other nodes, so every network card works.

Leader (CGX's intra-broadcast): sum over the inner ranks, an exchange among the inner ranks 0 alone, and their bytes
to the others, who decode the same.

Feedback is of what the outermost exchange loses. Residuals are added before the innermost sum, so that it doesn't
matter
which of the ranks holds one.
"""

import math

import jax
import jax.numpy as jnp
from jax import lax

from jaxcgx.exchange import feedback, schedules


def allreduce(net, stages, leaves, residuals, momentum, ids, key, schedule, own, leader, divisor):
    """The leaves' sum over all stages ((transport, codec), ...), outermost first, divided by `divisor`; new residuals,
    if there were
    any; momentum, if there was any, without what the outermost exchange sent."""
    fed = residuals is not None
    if fed:
        leaves, lost = feedback.carry(leaves, residuals)
    if leader:
        sums, more, momentum = _by_leaders(
            net.leaders(), stages, leaves, fed, momentum, ids, key, schedule, own, divisor
        )
    else:
        sums, more, momentum = _by_shards(stages, leaves, fed, momentum, ids, key, schedule, own, divisor)
    if not fed:
        return sums, None, None
    return (
        sums,
        [jnp.where(jnp.isfinite(total), a + b, r) for total, a, b, r in zip(sums, lost, more, residuals)],
        momentum,
    )


# Every leaf is cut into a share for each inner rank, a leaf of its own to the codecs: which bits come out does not
# depend
# on what else is in the message. Raw() stages send bytes too: leaves share a message, for which XLA has no
# reduce-scatter.
def _by_shards(stages, leaves, fed, momentum, ids, key, schedule, own, divisor):
    inner = list(enumerate(stages))[1:]
    sizes = [net.size for _, (net, _) in reversed(inner)]
    shards = [_cut(x, sizes, stages[0][1].sparse) for x in leaves]
    for i, (net, codec) in reversed(inner):
        others = schedules.stage_key(key, i, stages[:i] + stages[i + 1 :])
        half = "ring" if schedule[i] == "ring" else "one_shot"
        shards = schedules.reduce_scatter(half, net, codec, shards, ids, others, own)
    (net, codec), others = stages[0], schedules.stage_key(key, 0, stages[1:])
    shards, lost, sent = _exchange(net, codec, shards, fed, ids, others, schedule[0], own, divisor)
    shards = [x.astype(leaf.dtype) for x, leaf in zip(shards, leaves)]
    for i, (net, codec) in inner:
        further_in = schedules.stage_key(key, len(stages) + i, stages[i + 1 :])  # further out all have the same by now
        shards = schedules.all_gather(net, codec, shards, ids, further_in)
    if fed:
        ranks = [net.rank for _, (net, _) in reversed(inner)]
        lost = _join([_place(x, ranks, sizes) for x in lost], leaves)
    if momentum is not None:  # what a node sent each of its ranks has sent
        payload = sent.payload
        for _, (net, _) in inner:
            payload = net.all_gather(payload)
        clear = lambda payload, arrays: schedules.Sent(sent.layout, payload).clear(arrays)
        for _ in sizes:
            clear = jax.vmap(clear)
        momentum = _join(clear(payload, [_cut(x, sizes) for x in momentum]), leaves)
    return _join(shards, leaves), lost, momentum


def _cut(x, sizes, sparse=False):
    """[*sizes, share], filled up with the last number, which changes neither a minimum nor a maximum; for a sparse
    codec, which might
    send it, with 0."""
    share = -(-x.size // math.prod(sizes))
    flat = x.reshape(-1)
    if missing := math.prod(sizes) * share - x.size:
        flat = lax.pad(flat, jnp.zeros_like(flat[-1]) if sparse else flat[-1], [(0, missing, 0)])
    return flat.reshape(*sizes, share)


def _join(shares, leaves):
    """The way back from `_cut`."""
    return [x.reshape(-1)[: leaf.size].reshape(leaf.shape) for x, leaf in zip(shares, leaves)]


def _place(share, ranks, sizes):
    """[*sizes, share], zero but for the share of one rank."""
    return jnp.zeros((*sizes, share.size), share.dtype).at[tuple(ranks)].set(share)


def _by_leaders(leaders, stages, leaves, fed, momentum, ids, key, schedule, own, divisor):
    dtypes = [x.dtype for x in leaves]
    leaves = sum_inside(stages, [x.astype(jnp.float32) for x in leaves], ids, key, schedule, own)
    sums, lost, sent = _exchange(
        leaders, stages[0][1], leaves, fed, ids, schedules.stage_key(key, 0, ()), schedule[0], own, divisor
    )
    if fed:
        lost = [jnp.where(leaders.speaks, x, 0) for x in lost]
    if momentum is not None:
        payload = jnp.where(leaders.speaks, sent.payload, 0)
        for net, _ in stages[1:]:
            payload = net.plain_psum(payload)
        momentum = schedules.Sent(sent.layout, payload).clear(momentum)
    return [x.astype(dtype) for x, dtype in zip(sums, dtypes)], lost, momentum


def sum_inside(stages, leaves, ids, key, schedule, own):
    """The sums of float32 leaves over all stages but the outermost, whole, on every rank."""
    for i, (net, codec) in reversed(list(enumerate(stages))[1:]):
        others = stages[:i]  # the ranks further in have the same sum by now, and must get the same bits
        leaves, _, _ = _exchange(
            net, codec, leaves, False, ids, schedules.stage_key(key, i, others), schedule[i], own, 1.0
        )
    return leaves


def _exchange(net, codec, leaves, fed, ids, key, schedule, own, divisor):
    """The sum over one stage of float32 leaves, divided; and with `fed` what it lost and what was sent."""
    zeros = [jnp.zeros_like(x, jnp.float32) for x in leaves] if fed else None
    if net.size > 1 and not codec.raw:
        return schedules.allreduce(schedule, net, codec, leaves, zeros, ids, key, own, divisor)
    return [x / divisor for x in map(net.plain_psum, leaves)], zeros, None
