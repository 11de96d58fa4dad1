"""The primitive of sums to all ranks, and the choice of its schedules."""

import dataclasses
import math
from typing import Any

from jaxcgx.exchange import costs, hierarchy, low_rank, primitive, schedules
from jaxcgx.exchange.keys import BACK, fold
from jaxcgx.exchange.message import Message, Stage, Sum
from jaxcgx.exchange.overlay import Overlay
from jaxcgx.transports.base import Transport
from jaxcgx.transports.network import Network


def choose(
    stages: tuple[Stage, ...], leaves: list[Any], leader: bool, prefer: str, network: Network | None
) -> tuple[Stage, ...]:
    """The stages, with a schedule in place of "auto".

    The outermost stage gets the cheapest schedule in "time" or "bytes", the same one for all messages of these leaves.

    Args:
      stages: outermost first.
      leaves: those of all messages.
      leader: whether one rank of each node takes part in the outermost exchange.
      prefer: "time" or "bytes".
      network: the plan's; None: the default one.
    """
    outer, inner = stages[0], stages[1:]
    net, codec = outer.net, outer.codec
    if codec.low_rank:
        outer = outer._replace(schedule="psum")
    elif outer.schedule == "tree":
        outer = outer._replace(schedule=Overlay.tree(net.size))
    elif outer.schedule == "auto":
        share = 1 if leader else math.prod(stage.net.size for stage in inner)  # every inner rank takes a share
        if max(x.size for x in leaves) // share > codec.most:
            schedule = "two_shot"  # one_shot cuts no leaf
        else:
            sent, back = (
                sum(each.wire_bytes((x.size // share,), x.dtype) for x in leaves)
                for each in (codec, codec.of_sum(net.size))
            )
            load = costs.Load(
                ranks=net.size,
                raw=sum(4 * x.size for x in leaves) // share,
                wire=sent,
                back=back,
                sparse=codec.sparse,
                whole=codec.whole,
            )
            known = network or Network()
            known = dataclasses.replace(known, mover=known.mover or net.mover)
            schedule = costs.choose(load, known, prefer=prefer)
        outer = outer._replace(schedule=schedule)
    return (outer, *(s._replace(schedule="two_shot") if s.schedule == "auto" else s for s in inner))


def psum(message: Message, *, net: Transport, stages: tuple[Stage, ...], how: Sum, tracked: bool) -> Message:
    """The sum of a message over the ranks of `net`, which are those of all stages together.

    Args:
      message: its state is updated where it has some.
      net: the transport over all ranks.
      stages: the exchanges, outermost first.
      how: how the sum is formed.
      tracked: whether JAX tracks over which axes values vary (check_vma).
    """
    return primitive.bind(psum_p, message, net=net, stages=stages, how=how, tracked=tracked)


def _run(message: Message, *, net: Transport, stages: tuple[Stage, ...], how: Sum, tracked: bool) -> Message:
    outermost = stages[0]
    if outermost.codec.low_rank:
        return low_rank.allreduce(stages, message, how)
    if len(stages) > 1:
        return hierarchy.allreduce(net, stages, message=message, how=how)
    summed = schedules.allreduce(outermost, message, how)
    momentum = None if message.momentum is None else summed.sent.clear(message.momentum)
    return Message(message.ids, summed.leaves, residuals=summed.residuals, momentum=momentum)


# Where JAX tracks which axes values vary over (check_vma), the cotangent of a sum is the same on every rank. The
# transpose of the sum then gives each rank a copy of it (pcast), and sends no byte. Where JAX doesn't track that, a
# cotangent may differ from rank to rank, and the transpose of psum is psum.
def _transpose(
    message: Message, cts: list[Any], *, net: Transport, how: Sum, tracked: bool, **params: Any
) -> list[Any]:
    if tracked:
        return [ct / how.divisor for ct in cts]
    back = Message(message.ids, cts, fold(message.key, BACK))
    return primitive.bind(psum_p, back, net=net, how=how, tracked=tracked, **params).leaves


psum_p: Any = primitive.define(
    "jaxcgx_psum",
    _run,
    shape=lambda shape, i, **params: shape,
    transpose=_transpose,
    same=True,
    invarying=lambda **params: True,
)
