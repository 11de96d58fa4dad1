"""How the bytes of one message travel among the ranks of a transport (transports/xla.py says what one is).

A reduction has two halves. In the first every rank ends up with the sum of its own part of the message; in the second
(psum only) the parts, encoded, go to everybody. What the parts are is said by `Chunks` (psum: cuts of the message,
whole
buckets, balanced in bytes) or `Slices` (psum_scatter: what the caller's scatter dimension says).

Sums are in float32 and in rank order. A rank's own part takes part in its sum as it is, not encoded, unless `own` is
"encoded". Every rank, the owner too, decodes the same bytes of a sum: replicas are identical to the bit.

A sparse codec may give sums a codec of their own, with room for all that ranks sent (`Codec.of_sum`). A rank's own part
then
takes part as the others see it: nothing of the sum is lost.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxcgx.exchange.scopes import Exchange, scope
from jaxcgx.native import ops
from jaxcgx.native.layout import Layout

# What a key is folded with, so that no two encodings of an element share their noise.
FIRST, SUM, BACK, HOP = 0, 1, 2, 3


def fold(key, *numbers):
    """Two words that depend on the key's two words and the numbers; None for None."""
    if key is None:
        return None
    key = jax.random.wrap_key_data(key, impl="threefry2x32")
    for n in numbers:
        key = jax.random.fold_in(key, n)
    return jax.random.key_data(key)


def stage_key(key, number, stages):
    """The key of an exchange of several: other noise for ranks that differ in the transports of `stages`."""
    rank = 0
    for net, _ in stages if key is not None else ():
        rank = rank * net.size + net.rank
    return fold(key, number, rank)


class Chunks:
    """Leaves as one message, cut into a chunk for each rank."""

    def __init__(self, codec, leaves, ids, size):
        self.layout, self.leaves = Layout.of(codec, leaves, size, ids), leaves

    def encode(self, key):
        return ops.encode(self.layout, self.leaves, key)

    def encode_fed(self, residuals, key):
        return ops.encode_fed(self.layout, self.leaves, residuals, key)

    def reduce(self, payloads, part, place, own, divisor, encoded, key):
        """The sum of the payloads of one part, in which this rank's own leaves stand at `place`, if `own`."""
        own = ops.Own(self.leaves, place) if own else None
        return ops.reduce_encoded(self.layout, payloads, chunk=part, own=own, divisor=divisor, key=key)

    def owned(self, rank):
        """Of each leaf, which elements lie in the part of a rank."""
        ends = np.zeros((len(self.leaves), self.layout.chunks + 1), np.int64)
        for c, pieces in enumerate(self.layout.pieces, 1):
            for p in pieces:
                ends[p.leaf, c:] += p.coded
        found = [
            (jnp.arange(x.size) >= jnp.asarray(end)[rank]) & (jnp.arange(x.size) < jnp.asarray(end)[rank + 1])
            for x, end in zip(self.leaves, ends)
        ]
        return [mine.reshape(x.shape) for mine, x in zip(found, self.leaves)]


class Slices:
    """Leaves [ranks, ...], of which row r is for rank r."""

    def __init__(self, codec, leaves, ids, size):
        self.layout = Layout(codec, tuple(x.shape[1:] for x in leaves), tuple(x.dtype for x in leaves), 1, ids)
        self.leaves, self.size = leaves, size

    def encode(self, key):
        """uint8[ranks, bytes]."""

        def one(leaves, row):
            return ops.encode(self.layout, leaves, fold(key, row))[0]

        return jax.vmap(one)(self.leaves, jnp.arange(self.size))

    def reduce(self, payloads, part, place, own, divisor, encoded, key):
        mine = None
        if own:
            mine = ops.Own([lax.dynamic_index_in_dim(x, part, keepdims=False) for x in self.leaves], place)
        if encoded:
            return ops.reduce_encoded(self.layout, payloads, own=mine, divisor=divisor, key=key)
        return ops.reduce(self.layout, payloads, own=mine, divisor=divisor)


@dataclasses.dataclass(frozen=True)
class Sent:
    """What of this rank's leaves was sent."""

    layout: Layout
    payload: jax.Array

    def clear(self, arrays):
        """Arrays of the leaves' shapes, 0 where an element was sent."""
        return ops.clear(dataclasses.replace(self.layout, dtypes=tuple(x.dtype for x in arrays)), self.payload, arrays)


def exchange(net, parts, key, own, divisor, encoded):
    """First half, at once: every part goes straight to its owner, who adds them up."""
    received = net.all_to_all(parts.encode(fold(key, FIRST, net.rank)))
    mine = own == "raw" and not parts.layout.codec.raw  # whose bytes are the part as it is
    return parts.reduce(received, net.rank, net.rank, mine, divisor, encoded, fold(key, SUM))


def ring(net, parts, key, own, divisor, encoded):
    """First half, from neighbour to neighbour: a part visits every rank and ends with its owner, encoded anew at
    each."""
    part = (net.rank - 1) % net.size
    # Nothing has come yet: this rank's own part is all of the first sum, and what stands in for it is not read.
    payloads = jnp.zeros((1, parts.layout.chunk_bytes), jnp.uint8)
    row = parts.reduce(payloads, part, 0, True, 1.0, True, fold(key, HOP, net.rank))
    for hop in range(1, net.size):
        row, part = net.shift(row), (part - 1) % net.size
        last = hop + 1 == net.size
        row = parts.reduce(
            jnp.stack([row, row]),
            part,
            1,
            True,
            divisor if last else 1.0,
            encoded or not last,
            fold(key, SUM) if last else fold(key, HOP + hop, net.rank),
        )
    return row


REDUCE = {"two_shot": exchange, "ring": ring}


def fed_exchange(net, parts, residuals, key, own, divisor):
    """`exchange` with feedback: (the encoded sum, new residuals, what was sent). What the first encoding of a rank's
    own part
    loses is not lost with `own` "raw": it joins the sum with the residual, which is then what the sum's encoding loses.
    Of that
    part the rank has sent what the sum has."""
    payload, lost = parts.encode_fed(residuals, fold(key, FIRST, net.rank))
    received = net.all_to_all(payload)
    if own == "encoded":
        return (
            parts.reduce(received, net.rank, 0, False, divisor, True, fold(key, SUM)),
            lost,
            Sent(parts.layout, payload),
        )
    row, lost = ops.reduce_fed(parts.layout, received, lost, chunk=net.rank, divisor=divisor, key=fold(key, SUM))
    return row, lost, Sent(parts.layout, payload.at[net.rank].set(row))


def one_shot(net, codec, leaves, residuals, ids, key, divisor):
    """Everybody gets everybody's message and adds them up: one exchange, one quantization, more bytes."""
    layout = Layout.of(codec, leaves, 1, ids)
    with scope(Exchange.of("one_shot", layout, 2 / net.size)):
        first, lost = fold(key, FIRST, net.rank), None
        if residuals is None:
            payload = ops.encode(layout, leaves, first)
        else:
            payload, lost = ops.encode_fed(layout, leaves, residuals, first)
        received = net.all_gather(payload[0])
        if codec.sparse and codec.of_sum(net.size) == codec:
            sums, lost = top(net, codec, ops.reduce(layout, received), lost, ids, fold(key, SUM))
            sums = [x / divisor for x in sums]
        else:
            sums = ops.reduce(layout, received, divisor=divisor)
        return sums, lost, Sent(layout, payload)


def top(net, codec, sums, lost, ids, key):
    """Of sums that every rank has, what their owners would send, and the rest in the residual of each."""
    parts = Chunks(codec, sums, ids, net.size)
    payload, rest = parts.encode_fed([jnp.zeros_like(x) for x in sums], key)
    if lost is not None:
        lost = [old + jnp.where(mine, x, 0) for old, mine, x in zip(lost, parts.owned(net.rank), rest)]
    return ops.decode(parts.layout, payload), lost


def allreduce(schedule, net, codec, leaves, residuals, ids, key, own, divisor):
    """The leaves' sum over all ranks divided by `divisor`, on every rank; and with feedback the new residuals and what
    was sent."""
    if net.allreduce and schedule != "ring" and codec.native is not None and not codec.sparse:
        layout = Layout.of(codec, leaves, net.size if schedule == "two_shot" else 1, ids)
        keys = fold(key, FIRST, net.rank), fold(key, SUM)
        with scope(Exchange.of(schedule, layout, 1.0 if schedule == "two_shot" else 2 / net.size)):
            sums, lost = net.allreduce(schedule, codec, leaves, residuals, ids, keys, own, divisor)
        return [x.astype(leaf.dtype) for x, leaf in zip(sums, leaves)], lost, None
    if schedule == "one_shot":
        sums, lost, sent = one_shot(net, codec, leaves, residuals, ids, key, divisor)
        return [x.astype(leaf.dtype) for x, leaf in zip(sums, leaves)], lost, sent
    parts, lost, sent = Chunks(codec, leaves, ids, net.size), None, None
    back = parts.layout.of_sum(net.size)
    if back != parts.layout:
        own = "encoded"
    with scope(Exchange.of(schedule, parts.layout)):
        if residuals is None:
            row = REDUCE[schedule](net, parts, key, own, divisor, True)
        else:
            row, lost, sent = fed_exchange(net, parts, residuals, key, own, divisor)
    with scope(Exchange.of(schedule, back)):
        return ops.decode(back, net.all_gather(row)), lost, sent


def reduce_scatter(schedule, net, codec, leaves, ids, key, own):
    """Of leaves [ranks, ...] the sum over ranks of the row of this rank, in float32."""
    if net.size == 1:
        return [x[0].astype(jnp.float32) for x in leaves]
    first, parts = {"one_shot": exchange, "ring": ring}[schedule], Slices(codec, leaves, ids, net.size)
    with scope(Exchange.of(schedule, parts.layout)):
        return first(net, parts, key, own, 1.0, False)


def _decode_rows(layout, payloads):
    """The leaves of a payload from every rank, [ranks, ...]."""
    return jax.vmap(lambda payload: ops.decode(layout, payload[None]))(payloads)


def all_gather(net, codec, leaves, ids, key):
    """Every rank's leaves, [ranks, ...], as everybody decodes them, their owner too."""
    if net.size == 1:
        return [x[None] for x in leaves]
    layout = Layout.of(codec, leaves, 1, ids)
    with scope(Exchange.of("one_shot", layout)):
        row = ops.encode(layout, leaves, fold(key, FIRST, net.rank))[0]
        return _decode_rows(layout, net.all_gather(row))


def all_to_all(net, codec, leaves, ids, key):
    """Of leaves [ranks, ...] row r to rank r; row r of the result came from rank r."""
    if net.size == 1:
        return list(leaves)
    parts = Slices(codec, leaves, ids, net.size)
    with scope(Exchange.of("one_shot", parts.layout)):
        return _decode_rows(parts.layout, net.all_to_all(parts.encode(fold(key, FIRST, net.rank))))
