"""Sums over several transports, each with its own codec: few bytes over the slow network, more over the fast one.

By shards: a reduce-scatter over the inner ranks, an exchange of each shard with the peers on other nodes, and an
all-gather over the inner ranks. By leaders (CGX's intra-broadcast): a sum over the inner ranks, an exchange among the
inner ranks 0 of all nodes, which then pass the received bytes on. docs/hierarchies.md compares them.

Feedback covers the losses of the outermost exchange. Residuals are added before the innermost sum, so it doesn't matter
which rank of a node holds one.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxcgx.codecs.raw import Raw
from jaxcgx.exchange import low_rank, schedules, scopes
from jaxcgx.exchange.message import BegunMessage, Message, Sent, Stage, Sum, Summed, fold_stage
from jaxcgx.exchange.schedules import cut, join, place
from jaxcgx.native import tcp
from jaxcgx.plan.overlay import Overlay
from jaxcgx.transports.base import Transport, countable
from jaxcgx.transports.xla import Axes

Stages = tuple[Stage, ...]


def allreduce(net: Transport, stages: Stages, message: Message, how: Sum) -> Message:
    """Returns the divided sum of the leaves over all stages, which are ordered outermost first.

    The result has the new residuals and factors, and the momentum with 0 where the outermost exchange sent an element.
    `net` is the transport over the ranks of all stages.
    """
    if stages[0].codec.low_rank or can_begin(stages, how):
        begun, message = begin(stages, message, how)
        if begun.more:
            begun, message = advance(begun, stages, message, how)
        return end(begun, stages, message, how)
    if not stages[1:]:
        return _flat(message, schedules.allreduce(stages[0], message, how))
    carried = message.carried()
    if how.leader:
        done = _by_leaders(net, stages, carried, how)
    else:
        done = _outwards(stages, carried, _exchange(stages[0], _inwards(stages, carried, how), how))
    return _with_losses(done, carried.residuals, message.residuals)


def can_begin(stages: Stages, how: Sum) -> bool:
    """Returns whether the exchange of a message goes on by itself, so that a later program may end it."""
    outer = stages[0]
    if outer.codec.low_rank:
        return low_rank.can_begin(outer)
    alone = how.leader and bool(stages[1:])  # leaders exchange for their nodes
    in_rounds = not outer.codec.raw and outer.schedule in ("one_shot", "two_shot")
    return not alone and outer.net.begin_sum is not None and (in_rounds or schedules.is_piecewise(outer))


def begin(stages: Stages, message: Message, how: Sum) -> tuple[BegunMessage, Message]:
    """Exchanges a message over the inner stages, and begins its exchange over the outermost one.

    It has the same bits as `allreduce`. Returns (what has begun, the message with the residuals for later).
    """
    outer = stages[0]
    if outer.codec.low_rank:
        whole = message if _inner(stages) == 1 else _whole(stages, message, how)
        return low_rank.begin(outer, whole), message
    if not stages[1:]:
        begun = schedules.begin(outer, message, how)
        return begun.replace(residuals=None), message.replace(residuals=begun.residuals)
    carried = message.carried()
    inside = InnerStage.of(stages, carried, how) if schedules.is_piecewise(outer) else None
    if inside is None:
        begun = schedules.begin(outer, _inwards(stages, carried, how), how)
    else:
        begun = schedules.begin(outer, _share(stages, carried), how, inside=inside, whole=carried.leaves)
    return begun.replace(before=message.residuals), carried


def advance(
    begun: BegunMessage, stages: Stages, message: Message, how: Sum, later: bool = False
) -> tuple[BegunMessage, Message]:
    """Begins the second round of an exchange. Arguments and results are as for `end` and `begin`."""
    outer = stages[0]
    if outer.codec.low_rank:
        return low_rank.advance(outer, begun, message, inner=_inner(stages), later=later), message
    if stages[1:]:
        return schedules.advance(outer, begun, _share(stages, message), how, later=later), message
    begun = schedules.advance(outer, begun.replace(residuals=message.residuals), message, how, later=later)
    return begun.replace(residuals=None), message.replace(residuals=begun.residuals)


def end(begun: BegunMessage, stages: Stages, message: Message, how: Sum, later: bool = False) -> Message:
    """Returns the sums and new state. `message` has the state from before, and the types of the leaves."""
    outer = stages[0]
    if outer.codec.low_rank:
        return low_rank.end(outer, begun, message, how, inner=_inner(stages), later=later)
    if stages[1:]:
        summed = schedules.end(outer, begun, _share(stages, message), how, later=later)
        whole = isinstance(begun.outer, tcp.Begun) and begun.outer.inside is not None
        return _with_losses(_outwards(stages, message, summed, whole=whole), message.residuals, begun.before)
    return _flat(message, schedules.end(outer, begun.replace(residuals=message.residuals), message, how, later=later))


def _flat(message: Message, summed: Summed) -> Message:
    """Returns the sums and new state of a message, from the sums of its whole leaves."""
    momentum = None if message.momentum is None else summed.sent.clear(message.momentum)
    leaves = [x.astype(leaf.dtype) for x, leaf in zip(summed.leaves, message.leaves)]
    return Message(message.ids, leaves, residuals=summed.residuals, momentum=momentum)


def _inner(stages: Stages) -> int:
    return math.prod(stage.net.size for stage in stages[1:])


def _with_losses(done: Message, lost: list[Any] | None, before: list[Any] | None) -> Message:
    """Returns the sums with both losses as residuals. Where a sum is not finite, the residual is that from before."""
    if lost is None or before is None:
        return done
    each: Any = zip(done.leaves, lost, done.residuals or (), before)
    return done.replace(residuals=[jnp.where(jnp.isfinite(total), a + b, r) for total, a, b, r in each])


def plain_psum(nets: Sequence[Transport], x: jax.Array, tracked: bool) -> jax.Array:
    """Returns the uncompressed sum over transports, outermost first. `tracked`: whether JAX tracks what varies."""
    outer, *inner = nets
    whole = countable(x)
    share = cut(whole, [net.size for net in reversed(inner)], zeros=True)
    with jax.named_scope(scopes.INNER):
        for net in reversed(inner):
            share = net.plain_psum_scatter(share, 0, tiled=False)
    share = outer.plain_psum(share)
    with jax.named_scope(scopes.INNER):
        for net in inner:
            share = net.plain_all_gather(share, 0, tiled=False, to="invarying" if tracked else "varying")
    return join([share], [whole])[0]


# Every leaf is cut into a share for each inner rank. A codec encodes each share as a separate leaf, so the bits of a
# share don't depend on the rest of the message. Stages with Raw() send messages of bytes, too, because XLA has no
# reduce-scatter of several arrays.
def _inwards(stages: Stages, message: Message, how: Sum) -> Message:
    """Returns this rank's shard of the sums over the inner stages."""
    sizes = [stage.net.size for stage in reversed(stages[1:])]
    leaves = [cut(x, sizes, zeros=stages[0].codec.sparse) for x in message.leaves]
    shards = message.replace(leaves=leaves, residuals=None, momentum=None)
    for i, stage in reversed(list(enumerate(stages))[1:]):
        shards = shards.replace(key=fold_stage(message.key, i, stages[:i] + stages[i + 1 :]))
        half = stage._replace(codec=Raw()) if stage.schedule == "gather" else stage
        half = half if half.schedule == "ring" else half._replace(schedule="one_shot")
        shards = shards.replace(leaves=schedules.reduce_scatter(half, shards, Sum(how.own)).leaves)
    return _of_shares(stages, message, shards.leaves)


@dataclasses.dataclass(frozen=True)
class InnerStage:
    """The inner, raw one of two stages. A transport may sum in memory. `leaves` are the types of leaves `ids`."""

    stages: Stages
    how: Sum
    ids: tuple[int, ...]
    leaves: tuple[jax.ShapeDtypeStruct, ...]

    @staticmethod
    def of(stages: Stages, message: Message, how: Sum) -> "InnerStage | None":
        """Returns the inner stage, if a transport may compute it: a raw one that adds in rank order, over a mesh."""
        inner = stages[-1]
        exact = len(stages) == 2 and inner.codec.raw and inner.schedule != "ring"
        if not (exact and isinstance(inner.net, Axes) and inner.net.on_mesh):
            return None
        leaves = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in message.leaves)
        return InnerStage(stages, how, message.ids, leaves)

    @property
    def net(self) -> Any:
        return self.stages[1].net

    def inwards(self, leaves: list[Any]) -> list[Any]:
        return _inwards(self.stages, Message(self.ids, leaves), self.how).leaves

    def outwards(self, shares: list[Any]) -> list[Any]:
        return _gather(self.stages, Message(self.ids, list(self.leaves)), shards=shares)


def _share(stages: Stages, message: Message) -> Message:
    """Returns the message of this rank's shares of the leaves, with types in place of leaves."""
    shares = [jax.ShapeDtypeStruct((-(-x.size // _inner(stages)),), jnp.float32) for x in message.leaves]
    return _of_shares(stages, message, shares)


def _of_shares(stages: Stages, message: Message, shares: list[Any]) -> Message:
    """Returns the message of this rank's shares over the outermost stage."""
    key = fold_stage(message.key, 0, stages[1:])
    return _with_zero_residuals(message.replace(leaves=shares, key=key, residuals=None, momentum=None), message)


def _outwards(stages: Stages, message: Message, summed: Summed, whole: bool = False) -> Message:
    """Returns the whole sums of a message, of which `summed` has this rank's shard, or `whole` leaves."""
    inwards = [stage.net for stage in reversed(stages[1:])]
    sizes = [net.size for net in inwards]
    leaves = summed.leaves if whole else _gather(stages, message, shards=summed.leaves)
    residuals, momentum = summed.residuals, message.momentum
    if residuals is not None:
        at = [net.rank for net in inwards]
        residuals = join([place(x, at, sizes) for x in residuals], message.leaves)
    if momentum is not None:
        momentum = join(_clear_shards(summed.sent, stages[1:], momentum=momentum, sizes=sizes), message.leaves)
    return Message(message.ids, leaves, residuals=residuals, momentum=momentum)


def _gather(stages: Stages, message: Message, shards: list[Any]) -> list[Any]:
    """Returns the whole leaves, rounded to the dtypes of the message's leaves, of which each inner rank has a shard."""
    mine = message.replace(leaves=[x.astype(leaf.dtype) for x, leaf in zip(shards, message.leaves)])
    for i, stage in list(enumerate(stages))[1:]:  # by now, ranks along the outer stages have the same numbers
        mine = mine.replace(key=fold_stage(message.key, len(stages) + i, stages[i + 1 :]))
        mine = mine.replace(leaves=schedules.all_gather(stage, mine))
    return join(mine.leaves, message.leaves)


def _clear_shards(sent: Sent, inner: Stages, momentum: list[Any], sizes: Sequence[int]) -> list[Any]:
    """Returns the momentum, cut like the leaves, with 0 for every element that any rank of the node sent."""
    payload = sent.payload
    for stage in inner:
        payload = stage.net.all_gather(payload)
    clear: Callable[..., list[Any]] = lambda payload, arrays: Sent(sent.layout, payload).clear(arrays)
    for _ in sizes:
        clear = jax.vmap(clear)
    return clear(payload, [cut(x, sizes) for x in momentum])


def _by_leaders(net: Transport, stages: Stages, message: Message, how: Sum) -> Message:
    leaders = net.leaders()
    sums = _sum_inside(stages, message.replace(leaves=[x.astype(jnp.float32) for x in message.leaves]), how.own)
    outer = Message(message.ids, sums, fold_stage(message.key, 0, ()))
    summed = _exchange(stages[0]._replace(net=leaders), _with_zero_residuals(outer, message), how)
    if summed.residuals is not None:
        summed = summed._replace(residuals=[jnp.where(leaders.speaks, x, 0) for x in summed.residuals])
    if message.momentum is not None:
        payload = jnp.where(leaders.speaks, summed.sent.payload, 0)
        for stage in stages[1:]:
            payload = stage.net.plain_psum(payload)
        summed = summed._replace(sent=Sent(summed.sent.layout, payload))
    return _flat(message, summed)


def _whole(stages: Stages, message: Message, how: Sum) -> Message:
    """Returns the message of the sums of whole float32 leaves and residuals over the inner stages."""
    terms = [[x.astype(jnp.float32) for x in message.leaves]]
    if message.residuals is not None:
        terms.append(message.residuals)
    whole = message.replace(leaves=[sum(each) for each in zip(*terms)])
    return message.replace(leaves=_sum_inside(stages, whole, how.own), residuals=None)


def _sum_inside(stages: Stages, message: Message, own: str) -> list[Any]:
    """Returns the sums of whole float32 leaves over all stages except the outermost. Every rank gets all of them."""
    message = message.replace(residuals=None, momentum=None, factors=None)
    key = message.key
    for i, stage in reversed(list(enumerate(stages))[1:]):
        # By now, ranks along the inner stages have the same sum. They must get the same bits, so they use one key.
        message = message.replace(key=fold_stage(key, i, stages[:i]))
        message = message.replace(leaves=_exchange(stage, message, Sum(own)).leaves)
    return message.leaves


def _with_zero_residuals(message: Message, like: Message) -> Message:
    """Returns the message, with residuals of zeros if `like` has residuals. They collect the losses of the exchange."""
    if like.residuals is None:
        return message
    return message.replace(residuals=[jnp.zeros_like(x, jnp.float32) for x in message.leaves])


def _exchange(stage: Stage, message: Message, how: Sum) -> Summed:
    """Returns the divided sum of float32 leaves over one stage."""
    compresses = not stage.codec.raw or isinstance(stage.schedule, Overlay)
    if stage.net.size > 1 and (compresses or schedules.is_piecewise(stage)):
        return schedules.allreduce(stage, message, how)
    return Summed([x / how.divisor for x in map(stage.net.plain_psum, message.leaves)], message.residuals)
