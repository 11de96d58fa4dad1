"""Schedules: how the bytes of one message travel among the ranks of one transport (transports/base.py).

The schedules of overlays are in trees.py.

A reduction has two halves. After the first half, every rank has the sum of its own part of the message. In the second
half, which only psum needs, every rank gets the encoded sums of all parts. `Chunks` are the parts of psum: the message
is cut between buckets into parts of similar bytes. `Slices` are the parts of psum_scatter: the message is cut along the
caller's scatter dimension.

Sums are added in float32 and in rank order. A rank adds its own part without encoding it, unless `own` is "encoded".
All ranks, including the owner, decode the same bytes of a sum, so replicas are identical bit for bit.

A sparse codec may encode sums with another codec, which has room for every element that the ranks sent
(`Codec.of_sum`). A rank's own part is then encoded, too, so the encoding of the sum loses nothing.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxcgx.codecs.base import Codec
from jaxcgx.exchange import trees
from jaxcgx.exchange.message import HOP, SUM, Message, Sent, Stage, Sum, Summed, carry_over, first, fold
from jaxcgx.exchange.scopes import ExchangeScope, scope
from jaxcgx.native import ops
from jaxcgx.native.layout import Layout
from jaxcgx.native.ops import Own
from jaxcgx.plan.overlay import Overlay
from jaxcgx.transports.base import PiecewiseSum, Transport


class Chunks:
    """The leaves as one message, cut into a chunk for each rank."""

    layout: Layout
    leaves: list[Any]

    def __init__(self, codec: Codec, message: Message, size: int) -> None:
        self.layout, self.leaves = message.layout(codec, size), message.leaves

    def encode(self, key: Any) -> jax.Array:
        """Returns the encoded chunks, uint8[ranks, bytes]."""
        return ops.encode(self.layout, self.leaves, key)

    def own(self, part: Any, place: Any) -> Own:
        """Returns this rank's leaves, which replace payload `place` of a part."""
        return Own(self.leaves, place)

    def partial(self, payloads: Any, part: Any, own: Own | None, key: Any, divisor: float = 1.0) -> jax.Array:
        """Returns the sum of a part's payloads, encoded."""
        return ops.reduce_encoded(self.layout, payloads, chunk=part, own=own, divisor=divisor, key=key)

    total = partial  # the sum stays encoded, because the other ranks get it

    def owned(self, rank: Any) -> list[Any]:
        """Returns a mask per leaf, True for the elements in a rank's part."""
        ends = np.zeros((len(self.leaves), self.layout.chunks + 1), np.int64)
        for c, pieces in enumerate(self.layout.pieces, 1):
            for p in pieces:
                ends[p.leaf, c:] += p.coded
        masks: list[jax.Array] = []
        for x, end in zip(self.leaves, jnp.asarray(ends)):
            index = jnp.arange(x.size)
            masks.append(((index >= end[rank]) & (index < end[rank + 1])).reshape(x.shape))
        return masks


class Slices:
    """Leaves [ranks, ...]. Row r is for rank r."""

    layout: Layout
    leaves: list[Any]
    size: int  # the number of ranks

    def __init__(self, codec: Codec, message: Message, size: int) -> None:
        shapes, dtypes = tuple(x.shape[1:] for x in message.leaves), tuple(x.dtype for x in message.leaves)
        self.layout = Layout(codec, shapes, dtypes=dtypes, chunks=1, ids=message.ids)
        self.leaves, self.size = message.leaves, size

    def encode(self, key: Any) -> jax.Array:
        """Returns the encoded rows, uint8[ranks, bytes]."""

        def one(leaves: list[Any], row: Any) -> jax.Array:
            return ops.encode(self.layout, leaves, fold(key, row))[0]

        return jax.vmap(one)(self.leaves, jnp.arange(self.size))

    def encode_fed(self, residuals: list[Any], key: Any) -> tuple[jax.Array, list[Any]]:
        """Encodes the rows with feedback. Returns (payloads, new residuals)."""

        def one(leaves: list[Any], residuals: list[Any], row: Any) -> tuple[jax.Array, list[Any]]:
            payload, lost = ops.encode_fed(self.layout, leaves, residuals=residuals, key=fold(key, row))
            return payload[0], lost

        return jax.vmap(one)(self.leaves, residuals, jnp.arange(self.size))

    def own(self, part: Any, place: Any) -> Own:
        """Returns this rank's leaves of a part, which replace payload `place` of the part."""
        return Own(_rows(self.leaves, part), place)

    def partial(self, payloads: Any, part: Any, own: Own | None, key: Any) -> jax.Array:
        """Returns the sum of a part's payloads, encoded."""
        return ops.reduce_encoded(self.layout, payloads, own=own, key=key)

    def total(self, payloads: Any, part: Any, own: Own | None, key: Any, divisor: float) -> list[Any]:
        """Returns the sum of a part's payloads, as float32 leaves."""
        return ops.reduce(self.layout, payloads, own=own, divisor=divisor)


def _rows(arrays: list[Any], r: Any) -> list[jax.Array]:
    """Returns row r of each array."""
    return [lax.dynamic_index_in_dim(x, r, keepdims=False) for x in arrays]


def exchange(net: Transport, parts: Any, key: Any, how: Sum) -> Any:
    """Runs the first half in one step: every part goes straight to its owner, which sums it."""
    received = net.all_to_all(parts.encode(first(key, parts.layout.codec, net)))
    own = parts.own(net.rank, net.rank) if how.replaces_own(parts.layout.codec) else None
    return parts.total(received, net.rank, own=own, key=fold(key, SUM), divisor=how.divisor)


def ring(net: Transport, parts: Any, key: Any, how: Sum) -> Any:
    """Runs the first half from neighbour to neighbour: a part visits every rank, and ends at its owner.

    Every rank on the way adds its own part and encodes the sum again.
    """
    part = (net.rank - 1) % net.size
    # Nothing has arrived yet, so the first sum is this rank's own part. It replaces the zeros, which are not read.
    nothing = jnp.zeros((1, parts.layout.chunk_bytes), jnp.uint8)
    row = parts.partial(nothing, part, own=parts.own(part, 0), key=fold(key, HOP, net.rank))
    for hop in range(1, net.size - 1):
        row, part = net.shift(row), (part - 1) % net.size
        row = parts.partial(jnp.stack([row, row]), part, own=parts.own(part, 1), key=fold(key, HOP + hop, net.rank))
    row, part = net.shift(row), (part - 1) % net.size
    return parts.total(jnp.stack([row, row]), part, own=parts.own(part, 1), key=fold(key, SUM), divisor=how.divisor)


FIRST_HALF = {"two_shot": exchange, "one_shot": exchange, "ring": ring}


def _fed_exchange(
    net: Transport, parts: Chunks, residuals: list[Any], key: Any, how: Sum
) -> tuple[jax.Array, list[Any], Sent]:
    """Runs `exchange` with feedback. Returns (the encoded sum, the new residuals, the payload that was sent).

    With `own` "raw", the loss of the first encoding of a rank's own part is added back to the sum. Only the loss of
    encoding that sum remains as the residual of that part. The elements of the encoded sum count as sent by this rank.
    """
    payload, lost = ops.encode_fed(
        parts.layout, parts.leaves, residuals=residuals, key=first(key, parts.layout.codec, net)
    )
    received, of_sum = net.all_to_all(payload), fold(key, SUM)
    if how.own == "encoded":
        row = parts.partial(received, net.rank, own=None, key=of_sum, divisor=how.divisor)
        return row, lost, Sent(parts.layout, payload)
    row, lost = ops.reduce_fed(parts.layout, received, lost, chunk=net.rank, divisor=how.divisor, key=of_sum)
    return row, lost, Sent(parts.layout, payload.at[net.rank].set(row))


def _one_shot(stage: Stage, message: Message, how: Sum) -> Summed:
    """Sums in one exchange: every rank gets all messages, and adds them up. It rounds once, but sends more bytes."""
    net, codec, layout = stage.net, stage.codec, message.layout(stage.codec)
    with scope(ExchangeScope.of("one_shot", layout, 2 / net.size)):
        key, lost = first(message.key, codec, net), None
        if message.residuals is None:
            payload = ops.encode(layout, message.leaves, key)
        else:
            payload, lost = ops.encode_fed(layout, message.leaves, residuals=message.residuals, key=key)
        received = net.all_gather(payload[0])
        if codec.trims_sums:
            sums, lost = _top(stage, message.replace(leaves=ops.reduce(layout, received)), lost)
            sums = [x / how.divisor for x in sums]
        else:
            sums = ops.reduce(layout, received, divisor=how.divisor)
        return Summed(sums, lost, Sent(layout, payload))


def _top(stage: Stage, sums: Message, lost: list[Any] | None) -> tuple[list[Any], list[Any] | None]:
    """Drops the elements of sums that the owners would not send. Returns (sums, lost).

    `lost` has what the owners lose by it, added to the argument `lost`. All ranks have the sums, so they compute this
    without an exchange.
    """
    parts = Chunks(stage.codec, sums, stage.net.size)
    zeros = [jnp.zeros_like(x) for x in sums.leaves]
    payload, rest = ops.encode_fed(parts.layout, sums.leaves, residuals=zeros, key=fold(sums.key, SUM))
    if lost is not None:
        lost = [old + jnp.where(mine, x, 0) for old, mine, x in zip(lost, parts.owned(stage.net.rank), rest)]
    return ops.decode(parts.layout, payload), lost


def _two_halves(stage: Stage, message: Message, how: Sum) -> Summed:
    """Sums in two halves: each owner sums its part, encodes the sum, and sends it to all ranks."""
    net, parts, lost, sent = stage.net, Chunks(stage.codec, message, stage.net.size), None, None
    back = parts.layout.of_sum(net.size)
    with scope(ExchangeScope.of(stage.schedule, parts.layout)):
        if message.residuals is None:
            row = FIRST_HALF[str(stage.schedule)](net, parts, message.key, how)
        else:
            row, lost, sent = _fed_exchange(net, parts, residuals=message.residuals, key=message.key, how=how)
    with scope(ExchangeScope.of(stage.schedule, back)):
        return Summed(ops.decode(back, net.all_gather(row)), lost, sent)


def is_piecewise(stage: Stage) -> bool:
    """Returns whether the transport computes the sum itself, and overlaps the kernels with the exchange."""
    kernels = stage.codec.native is not None and not stage.codec.sparse
    return bool(stage.net.begin_sum) and stage.schedule != "ring" and kernels


def can_begin(stages: Sequence[Stage]) -> bool:
    """Returns whether a later program can end a sum over these stages. Otherwise the same program must."""
    return len(stages) == 1 and not stages[0].codec.low_rank and is_piecewise(stages[0])


def begin(stage: Stage, message: Message, how: Sum) -> Any:
    """Begins a piecewise sum, which has the same bits as its schedule, and returns a pytree.

    `end_sum` of the transport in it ends the sum, and makes its new residuals final.
    """
    with _piecewise_scope(stage, message):
        return _begin(stage, message, how)


def _begin(stage: Stage, message: Message, how: Sum) -> Any:
    stage = stage.compared(message, how)
    asked = PiecewiseSum(
        layout=_layout(stage, message),
        leaves=message.leaves,
        residuals=message.residuals,
        first_key=first(message.key, stage.codec, stage.net),
        sum_key=fold(message.key, SUM),
        hop_key=fold(message.key, HOP, stage.net.rank),
        parents=() if stage.schedule == "one_shot" else _trees(stage).parents,
        own=how.own,
        divisor=how.divisor,
    )
    return stage.net.begin_sum(asked)


def _trees(stage: Stage) -> Overlay:
    """Returns the trees of a piecewise sum whose schedule isn't one_shot."""
    return stage.schedule if isinstance(stage.schedule, Overlay) else Overlay.owners(stage.net.size)


def _layout(stage: Stage, message: Message) -> Layout:
    if isinstance(stage.schedule, Overlay):
        return message.layout(stage.codec, len(stage.schedule.trees), stage.schedule.shares)
    return message.layout(stage.codec, stage.net.size if stage.schedule == "two_shot" else 1)


def _piecewise_scope(stage: Stage, message: Message) -> AbstractContextManager[Any]:
    layout, ranks = _layout(stage, message), stage.net.size
    part = 2 / ranks
    if stage.schedule != "one_shot":  # for the rank that sends most
        part = 2 * (ranks - 1) / ranks * sum(layout.ends) / max(*_trees(stage).sent(layout.ends, layout.ends), 1)
    return scope(ExchangeScope.of(stage.schedule, layout, part, sent=sum(layout.ends)))


def allreduce(stage: Stage, message: Message, how: Sum) -> Summed:
    """Returns the divided sum of the leaves over all ranks of a stage. Every rank gets it."""
    if is_piecewise(stage):
        with _piecewise_scope(stage, message):
            summed = Summed(*stage.net.end_sum(_begin(stage, message, how)))
    else:
        stage, how = stage.compared(message, how), how.with_codec(stage.codec)
        if isinstance(stage.schedule, Overlay):
            summed = trees.allreduce(stage, stage.schedule, message, how)
        elif stage.schedule == "one_shot":
            summed = _one_shot(stage, message, how)
        else:
            return _two_halves(stage, message, how)
    return summed._replace(leaves=[x.astype(leaf.dtype) for x, leaf in zip(summed.leaves, message.leaves)])


def reduce_scatter(stage: Stage, message: Message, how: Sum) -> Summed:
    """Returns the divided sum over ranks of this rank's row of the leaves [ranks, ...], in float32."""
    net = stage.compared(message, how.own).net
    if net.size == 1:
        return Summed([x[0].astype(jnp.float32) / how.divisor for x in message.leaves], message.residuals)
    parts = Slices(stage.codec, message, net.size)
    with scope(ExchangeScope.of(stage.schedule, parts.layout)):
        if message.residuals is None:
            return Summed(FIRST_HALF[str(stage.schedule)](net, parts, message.key, how))
        return _fed_slices(net, parts, residuals=message.residuals, key=message.key, how=how)


def _fed_slices(net: Transport, parts: Slices, residuals: list[Any], key: Any, how: Sum) -> Summed:
    """Runs `exchange` of slices with feedback. With `own` "raw", a rank's own slice is only rounded to its dtype."""
    payload, lost = parts.encode_fed(residuals, first(key, parts.layout.codec, net))
    received, own = net.all_to_all(payload), None
    if how.own == "raw":
        leaves, rest = carry_over(_rows(parts.leaves, net.rank), _rows(residuals, net.rank))
        own = Own(leaves, net.rank)
        lost = [lax.dynamic_update_index_in_dim(x, r, net.rank, 0) for x, r in zip(lost, rest)]
    return Summed(parts.total(received, net.rank, own=own, key=fold(key, SUM), divisor=how.divisor), lost)


def _decode_rows(layout: Layout, payloads: jax.Array) -> list[Any]:
    """Returns the decoded leaves of every rank's payload, [ranks, ...]."""
    return jax.vmap(lambda payload: ops.decode(layout, payload[None]))(payloads)


def all_gather(stage: Stage, message: Message) -> list[Any]:
    """Returns every rank's leaves, [ranks, ...]. All ranks, including the owner, decode the same bytes."""
    net = stage.compared(message, "all_gather").net
    if net.size == 1:
        return [x[None] for x in message.leaves]
    layout = message.layout(stage.codec)
    with scope(ExchangeScope.of("one_shot", layout)):
        row = ops.encode(layout, message.leaves, first(message.key, stage.codec, net))[0]
        return _decode_rows(layout, net.all_gather(row))


def all_to_all(stage: Stage, message: Message) -> list[Any]:
    """Sends row r of the leaves [ranks, ...] to rank r. Row r of the result came from rank r."""
    net = stage.compared(message, "all_to_all").net
    if net.size == 1:
        return list(message.leaves)
    parts = Slices(stage.codec, message, net.size)
    with scope(ExchangeScope.of("one_shot", parts.layout)):
        return _decode_rows(parts.layout, net.all_to_all(parts.encode(first(message.key, stage.codec, net))))
