"""Schedules: how the bytes of one message travel among the ranks of one transport. Those of overlays are in trees.py.

A reduction has two halves. After the first half, every rank has the sum of its own part of the message. In the second
half, which only psum needs, every rank gets the encoded sums of all parts. The parts of psum are chunks: the message is
cut between buckets into parts of similar bytes. Those of psum_scatter are slices along the caller's dimension. Those of
the schedule "gather", whose first half is not compressed, are equal shares of each leaf.

Sums are added in float32 and in rank order. A rank adds its own part without encoding it, unless `own` is "encoded" or
sums have another codec than leaves, with room for every element that the ranks sent (`Codec.of_sum`). All ranks,
including the owner, decode the same bytes of a sum, so replicas are identical bit for bit.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxcgx.codecs import quantized
from jaxcgx.codecs.base import Codec
from jaxcgx.codecs.raw import Raw
from jaxcgx.exchange import trees
from jaxcgx.exchange.message import HOP, SUM, BegunMessage, Message, Sent, Stage, Sum, Summed, carry_over, first, fold
from jaxcgx.exchange.scopes import ExchangeScope, scope
from jaxcgx.native import ops
from jaxcgx.native.layout import Layout
from jaxcgx.native.rules import add
from jaxcgx.native.tcp import Inside
from jaxcgx.plan.overlay import Overlay
from jaxcgx.transports.base import Pairs, PiecewiseSum, Transport
from jaxcgx.typing import Key


def _ring(
    net: Transport, layout: Layout, key: Key | None, add: Callable[..., jax.Array], total: Callable[..., Any]
) -> Any:
    """Runs the first half from neighbour to neighbour: a part visits every rank, and ends at its owner.

    Every rank on the way adds its own part and encodes the sum again: add(payloads, the part, the place of its own
    payload, key), and at the owner total(payloads, the part).
    """
    part = (net.rank - 1) % net.size
    # Nothing has arrived yet, so the first sum is this rank's own part. It replaces the zeros, which are not read.
    row = add(jnp.zeros((1, layout.chunk_bytes), jnp.uint8), part, 0, fold(key, HOP, net.rank))
    for hop in range(1, net.size - 1):
        row, part = net.shift(row), (part - 1) % net.size
        row = add(jnp.stack([row, row]), part, 1, fold(key, HOP + hop, net.rank))
    row, part = net.shift(row), (part - 1) % net.size
    return total(jnp.stack([row, row]), part)


def _top(stage: Stage, sums: Message, lost: list[Any] | None) -> tuple[list[Any], list[Any] | None]:
    """Drops the elements of sums that the owners would not send. Returns (sums, lost).

    `lost` has what the owners lose by it, added to the argument `lost`. All ranks have the sums, so they compute this
    without an exchange.
    """
    layout = sums.layout(stage.codec, stage.net.size)
    zeros = [jnp.zeros_like(x) for x in sums.leaves]
    payload, rest = ops.encode_fed(layout, sums.leaves, residuals=zeros, key=fold(sums.key, SUM))
    if lost is not None:
        owned = _owned(layout, sums.leaves, stage.net.rank)
        lost = [old + jnp.where(mine, x, 0) for old, mine, x in zip(lost, owned, rest)]
    return ops.decode(layout, payload), lost


def _owned(layout: Layout, leaves: list[Any], rank: jax.Array | int) -> list[jax.Array]:
    """Returns a mask per leaf, True for the elements in a rank's chunk."""
    ends = np.zeros((len(leaves), layout.chunks + 1), np.int64)
    for c, pieces in enumerate(layout.pieces, 1):
        for p in pieces:
            ends[p.leaf, c:] += p.coded
    masks: list[jax.Array] = []
    for x, end in zip(leaves, jnp.asarray(ends)):
        index = jnp.arange(x.size)
        masks.append(((index >= end[rank]) & (index < end[rank + 1])).reshape(x.shape))
    return masks


def is_piecewise(stage: Stage) -> bool:
    """Returns whether the transport computes the sum itself, and overlaps the kernels with the exchange."""
    kernels = stage.codec.native is not None and not stage.codec.sparse
    return bool(stage.net.begin_sum) and stage.schedule not in ("ring", "gather") and kernels


def begin(
    stage: Stage,
    message: Message,
    how: Sum,
    inside: Inside | None = None,
    whole: Sequence[jax.Array] = (),
    named: ExchangeScope | None = None,
) -> BegunMessage:
    """Begins a sum. If another round follows, `advance` begins it, and `end` ends the sum.

    With a stage `inside`, the leaves of the message are only the types of this rank's shares of the leaves in `whole`.
    The residuals of the result are those of the first encoding. `named`: the scope, if it isn't that of the stage.
    """
    stage, how = stage.compared(message, how), _own_part(stage, how)
    with scope(named or scope_of(stage, message)):
        if is_piecewise(stage):  # with the bits of its schedule
            asked = PiecewiseSum(
                layout=_layout(stage, message),
                leaves=message.leaves if inside is None else list(whole),
                residuals=message.residuals,
                first_key=first(message.key, stage.codec, stage.net),
                sum_key=fold(message.key, SUM),
                hop_key=fold(message.key, HOP, stage.net.rank),
                parents=() if stage.schedule == "one_shot" else _trees(stage).parents,
                own=how.own,
                divisor=how.divisor,
                inside=inside,
            )
            outer = stage.net.begin_sum(asked)
            return BegunMessage(dataclasses.replace(outer, residuals=None), residuals=outer.residuals)
        return _begin_rounds(stage, message, how)


def _begin_rounds(stage: Stage, message: Message, how: Sum) -> BegunMessage:
    """Begins a sum in rounds, between which the codec encodes and decodes.

    one_shot: every rank gets all messages, and adds them up. It rounds once, but sends more bytes. two_shot: each owner
    gets its part of all messages. In the second round, it sends the encoded sum to all ranks. A ring does this after
    its hops.
    """
    net, codec, layout = stage.net, stage.codec, _layout(stage, message)
    if stage.schedule == "ring":
        return BegunMessage(net.begin_exchange("all_gather", _sum_by_ring(stage, message, how)))
    payload, lost = message.encode(layout, first(message.key, codec, net))
    sent = payload if codec.sparse and lost is not None else None
    if stage.schedule == "one_shot":
        return BegunMessage(net.begin_exchange("all_gather", payload[0]), residuals=lost, payload=sent)
    leaves = message.leaves if lost is None and how.replaces_own(codec) else None
    outer = net.begin_exchange("all_to_all", payload)
    return BegunMessage(outer, more=True, residuals=lost, payload=sent, leaves=leaves)


def _sum_by_ring(stage: Stage, message: Message, how: Sum) -> jax.Array:
    layout = _layout(stage, message)

    def add(payloads: jax.Array, part: jax.Array, place: int, key: Key | None, divisor: float = 1.0) -> jax.Array:
        own = ops.Own(message.leaves, place)
        return ops.reduce_encoded(layout, payloads, chunk=part, own=own, divisor=divisor, key=key)

    total = lambda rows, part: add(rows, part, place=1, key=fold(message.key, SUM), divisor=how.divisor)
    return _ring(stage.net, layout, message.key, add=add, total=total)


def advance(stage: Stage, begun: BegunMessage, message: Message, how: Sum, later: bool = False) -> BegunMessage:
    """Ends the first round of two, and begins the second. Arguments are as for `end`."""
    stage, how = stage.compared(message, how), _own_part(stage, how)
    net, layout = stage.net, _layout(stage, message)
    received = net.end_exchange(begun.outer, (net.size, layout.chunk_bytes), later)
    message, key = message.replace(leaves=begun.leaves), fold(message.key, SUM)
    row, lost = message.add(layout, received, begun.residuals, how, chunk=net.rank, place=net.rank, key=key)
    payload = begun.payload
    if payload is not None and how.own != "encoded":  # the elements of the encoded sum count as sent by this rank
        payload = payload.at[net.rank].set(row)
    with scope(ExchangeScope.of(stage.schedule, layout.of_sum(net.size))):
        outer = net.begin_exchange("all_gather", row)
    return BegunMessage(outer, residuals=lost, before=begun.before, payload=payload)


def end(stage: Stage, begun: BegunMessage, message: Message, how: Sum, later: bool = False) -> Summed:
    """Ends a sum whose last round has begun, maybe in a `later` program. The leaves of the message are types."""
    net, lost = stage.net, begun.residuals
    if is_piecewise(stage):
        return Summed(*net.end_sum(dataclasses.replace(begun.outer, residuals=lost), later))
    layout = _layout(stage, message)
    sent = None if begun.payload is None else Sent(layout, begun.payload)
    if stage.schedule != "one_shot":
        back = layout.of_sum(net.size)
        return Summed(ops.decode(back, net.end_exchange(begun.outer, (net.size, back.chunk_bytes), later)), lost, sent)
    received = net.end_exchange(begun.outer, (net.size, layout.chunk_bytes), later)
    if not stage.codec.trims_sums:
        return Summed(ops.reduce(layout, received, divisor=how.divisor), lost, sent)
    sums, lost = _top(stage, message.replace(leaves=ops.reduce(layout, received)), lost)
    return Summed([x / how.divisor for x in sums], lost, sent)


def _own_part(stage: Stage, how: Sum) -> Sum:
    """Returns the settings of a sum. If its codec has room for all elements, a rank's own part is encoded, too."""
    return how._replace(own="encoded") if stage.codec.sums_grow else how


def _trees(stage: Stage) -> Overlay:
    """Returns the trees of a piecewise sum whose schedule isn't one_shot."""
    return stage.schedule if isinstance(stage.schedule, Overlay) else Overlay.owners(stage.net.size)


def _layout(stage: Stage, message: Message) -> Layout:
    if isinstance(stage.schedule, Overlay):
        return message.layout(stage.codec, len(stage.schedule.trees), stage.schedule.shares)
    return message.layout(stage.codec, 1 if stage.schedule == "one_shot" else stage.net.size)


def scope_of(stage: Stage, message: Message) -> ExchangeScope:
    """Returns the scope of a sum or, if it has two rounds, of its first round."""
    layout, ranks = _layout(stage, message), stage.net.size
    if stage.schedule == "one_shot":
        return ExchangeScope.of(stage.schedule, layout, 2 / ranks, sent=sum(layout.ends))
    if not is_piecewise(stage):
        return ExchangeScope.of(stage.schedule, layout)
    # for the rank that sends most
    part = 2 * (ranks - 1) / ranks * sum(layout.ends) / max(*_trees(stage).sent(layout.ends, layout.ends), 1)
    return ExchangeScope.of(stage.schedule, layout, part, sent=sum(layout.ends))


def allreduce(stage: Stage, message: Message, how: Sum) -> Summed:
    """Returns the divided sum of the leaves over all ranks of a stage, in float32 or rounded. Every rank gets it."""
    if isinstance(stage.schedule, Overlay) and not is_piecewise(stage):
        return trees.allreduce(stage.compared(message, how), stage.schedule, message, _own_part(stage, how))
    if stage.schedule == "gather":
        return _gather_sums(stage.compared(message, how), message, how)
    begun = begin(stage, message, how)
    begun = advance(stage, begun, message, how) if begun.more else begun
    return end(stage, begun, message, how)


def _gather_sums(stage: Stage, message: Message, how: Sum) -> Summed:
    """Adds shares that are not compressed, and gathers encoded sums. A residual is the loss of a rank's own sum."""
    net, codec, before = stage.net, stage.codec, message.residuals
    whole = [x.astype(jnp.float32) for x in message.leaves]
    whole = whole if before is None else [x + r for x, r in zip(whole, before)]
    rows = [cut(x, [net.size]) for x in whole]
    together = jnp.concatenate(rows, 1)
    with scope(ExchangeScope.of(stage.schedule, message.layout(Raw()), sent=together.nbytes)):
        # XLA's own reduce-scatter, except over connections of jaxcgx
        own = add(net.all_to_all(together)) if net.begin_sum else net.plain_psum_scatter(together, 0, tiled=False)
    sums = jnp.split(own / how.divisor, np.cumsum([row.shape[1] for row in rows])[:-1])
    mine = message.replace(leaves=sums, residuals=None if before is None else [jnp.zeros_like(x) for x in sums])
    layout = mine.layout(codec)
    with scope(ExchangeScope.of(stage.schedule, message.layout(codec), sent=net.size * layout.chunk_bytes)):
        payload, lost = mine.encode(layout, fold(message.key, SUM, net.rank))
        leaves = join(_decode_rows(layout, net.all_gather(payload[0])), whole)
    if lost is None or before is None:
        return Summed(leaves)
    placed = join([place(how.divisor * x, [net.rank], [net.size]) for x in lost], whole)
    return Summed(leaves, [jnp.where(jnp.isfinite(x), new, old) for x, new, old in zip(leaves, placed, before)])


def cut(x: jax.Array, sizes: Sequence[int], zeros: bool = False) -> jax.Array:
    """Returns x cut into equal shares, [*sizes, share].

    x is padded with its last number, which changes neither the minimum nor the maximum. A sparse codec might send the
    padding, so its shares are padded with zeros (`zeros`).
    """
    share = -(-x.size // math.prod(sizes))
    flat = x.reshape(-1)
    if missing := math.prod(sizes) * share - x.size:
        flat = jax.lax.pad(flat, jnp.zeros_like(flat[-1]) if zeros else flat[-1], [(0, missing, 0)])
    return flat.reshape(*sizes, share)


def join(shares: list[Any], leaves: list[Any]) -> list[Any]:
    """The inverse of `cut`."""
    return [x.reshape(-1)[: leaf.size].reshape(leaf.shape) for x, leaf in zip(shares, leaves)]


def place(share: jax.Array, at: Sequence[Any], sizes: Sequence[int]) -> jax.Array:
    """Returns [*sizes, share], which is zero except for the share at `at`."""
    return jnp.zeros((*sizes, share.size), share.dtype).at[tuple(at)].set(share)


def _of_rows(codec: Codec, message: Message) -> Layout:
    return Layout.of(codec, [jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in message.leaves], ids=message.ids)


def _encode_rows(layout: Layout, message: Message, key: Key | None) -> tuple[jax.Array, list[Any] | None]:
    """Returns (the encoded rows of the leaves [ranks, ...], the new residuals or None)."""

    def one(leaves: list[Any], residuals: list[Any] | None, row: jax.Array) -> tuple[jax.Array, list[Any] | None]:
        payload, lost = message.replace(leaves=leaves, residuals=residuals).encode(layout, fold(key, row))
        return payload[0], lost

    return jax.vmap(one)(message.leaves, message.residuals, jnp.arange(len(message.leaves[0])))


def _row(arrays: list[Any], r: jax.Array | int) -> list[jax.Array]:
    return [jax.lax.dynamic_index_in_dim(x, r, keepdims=False) for x in arrays]


def reduce_scatter(stage: Stage, message: Message, how: Sum) -> Summed:
    """Returns the divided float32 sum over ranks of this rank's row of the leaves [ranks, ...]."""
    net, key = stage.compared(message, how.own).net, message.key
    if net.size == 1:
        return Summed([x[0].astype(jnp.float32) / how.divisor for x in message.leaves], message.residuals)
    layout = _of_rows(stage.codec, message)
    with scope(ExchangeScope.of(stage.schedule, layout)):
        if stage.schedule == "ring":
            own = lambda part, place: ops.Own(_row(message.leaves, part), place)
            add = lambda rows, part, place, key: ops.reduce_encoded(layout, rows, own=own(part, place), key=key)
            total = lambda rows, part: ops.reduce(layout, rows, own=own(part, 1), divisor=how.divisor)
            return Summed(_ring(net, layout, key, add=add, total=total))
        payloads, lost = _encode_rows(layout, message, first(key, stage.codec, net))
        received, own = net.all_to_all(payloads), None
        if lost is not None and how.own == "raw":
            leaves, rest = carry_over(_row(message.leaves, net.rank), _row(message.residuals or [], net.rank))
            lost = [jax.lax.dynamic_update_index_in_dim(x, r, net.rank, 0) for x, r in zip(lost, rest)]
            own = ops.Own(leaves, net.rank)
        elif how.replaces_own(stage.codec):
            own = ops.Own(_row(message.leaves, net.rank), net.rank)
        return Summed(ops.reduce(layout, received, own=own, divisor=how.divisor), lost)


def _decode_rows(layout: Layout, payloads: jax.Array) -> list[Any]:
    return jax.vmap(lambda payload: ops.decode(layout, payload[None]))(payloads)


def quantized_rows(layout: Layout, payloads: jax.Array) -> list[quantized.Quantized]:
    """Returns the leaves of every rank's payload, [ranks, ...], as they were sent."""
    return jax.vmap(lambda payload: quantized.read(layout, payload))(payloads)


def all_gather(stage: Stage, message: Message, read: Callable[..., list[Any]] = _decode_rows) -> list[Any]:
    """Returns every rank's leaves, [ranks, ...]. All ranks, including the owner, `read` the same bytes."""
    net = stage.compared(message, "all_gather").net
    if net.size == 1:
        return [x[None] for x in message.leaves]
    layout = message.layout(stage.codec)
    with scope(ExchangeScope.of("one_shot", layout)):
        row = ops.encode(layout, message.leaves, first(message.key, stage.codec, net))[0]
        return read(layout, net.all_gather(row))


def pbroadcast(stage: Stage, message: Message, source: int) -> list[Any]:
    """Returns the leaves of rank `source`. All ranks, including the source, decode the same bytes."""
    net, layout = stage.compared(message, ("pbroadcast", source)).net, message.layout(stage.codec)
    with scope(ExchangeScope.of("two_shot", layout)):
        row = ops.encode(layout, message.leaves, first(message.key, stage.codec, net))[0]
        return ops.decode(layout, net.broadcast(row, source)[None])


def sum_to(stage: Stage, message: Message, target: int) -> list[Any]:
    """Returns the sum of the leaves over all ranks on rank `target`, and zeros on all others."""
    sums = allreduce(stage._replace(schedule="two_shot"), message, Sum()).leaves  # decoded, so of the leaves' dtypes
    return [jnp.where(stage.net.rank == target, x, jnp.zeros_like(x)) for x in sums]


def ppermute(stage: Stage, message: Message, pairs: Pairs) -> Message:
    """Returns the leaves of the rank that sends to this rank; zeros on a rank to which no rank sends.

    With state, only the difference to what was last sent travels. The sender decodes it, too, and so knows what the
    receiver has.
    """
    sent, received, leaves = message.sent, message.received, message.leaves
    if sent is not None:
        leaves = [x.astype(jnp.float32) - s for x, s in zip(leaves, sent)]
    net = stage.compared(message, ("ppermute", pairs, sent is not None)).net
    layout = message.replace(leaves=leaves).layout(stage.codec)
    with scope(ExchangeScope.of("one_shot", message.layout(stage.codec), sent=layout.chunk_bytes)):
        row = ops.encode(layout, leaves, first(message.key, stage.codec, net))[0]
        arrived = ops.decode(layout, net.permute(row, pairs)[None])
        if sent is None or received is None:
            return Message(message.ids, [net.where_received(x, pairs) for x in arrived])
        back = [(receiver, sender) for sender, receiver in pairs]
        here = [r + net.where_received(x, pairs) for r, x in zip(received, arrived)]
        there = [s + net.where_received(x, back) for s, x in zip(sent, ops.decode(layout, row[None]))]
        finite = lambda new, old: [jnp.where(jnp.isfinite(n), n, o) for n, o in zip(new, old)]
        results = [net.where_received(x, pairs).astype(leaf.dtype) for x, leaf in zip(here, message.leaves)]
        return Message(message.ids, results, sent=finite(there, sent), received=finite(here, received))


def all_to_all(stage: Stage, message: Message, read: Callable[..., list[Any]] = _decode_rows) -> list[Any]:
    """Sends row r of the leaves [ranks, ...] to rank r. Row r of the result came from rank r."""
    net = stage.compared(message, "all_to_all").net
    if net.size == 1:
        return list(message.leaves)
    layout = _of_rows(stage.codec, message)
    with scope(ExchangeScope.of("one_shot", layout)):
        payloads, _ = _encode_rows(layout, message, first(message.key, stage.codec, net))
        return read(layout, net.all_to_all(payloads))
