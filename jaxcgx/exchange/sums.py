"""The primitive of sums to all ranks, and the choice of its schedules."""

import contextlib
import contextvars
import dataclasses
import math
from collections.abc import Generator
from typing import Any

import jax

from jaxcgx import _compat
from jaxcgx._compat import batching, mlir
from jaxcgx.exchange import costs, hierarchy, keys, low_rank, primitive, schedules
from jaxcgx.exchange.message import Message, Stage, Sum
from jaxcgx.native.rules import define_impl
from jaxcgx.plan.overlay import Overlay
from jaxcgx.transports.base import Transport
from jaxcgx.transports.network import Network

_OPEN = contextvars.ContextVar("_OPEN", default=False)


def choose(
    stages: tuple[Stage, ...], leaves: list[Any], leader: bool, prefer: str, network: Network | None
) -> tuple[Stage, ...]:
    """Returns the stages, with a schedule in place of "auto".

    The outermost stage gets the schedule that takes the least time or sends the fewest bytes. It is the same for all
    messages.

    Args:
      stages: outermost first.
      leaves: the leaves of all messages.
      leader: whether one rank of each node takes part in the outermost exchange.
      prefer: "time" or "bytes", the quantity to minimize.
      network: the plan's network. None: the default network.
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
            schedule = "two_shot"  # one_shot doesn't cut leaves, and this one is too long for the codec
        else:
            known = network or Network()
            known = dataclasses.replace(known, mover=known.mover or net.mover)
            parts = [jax.ShapeDtypeStruct((x.size // share,), x.dtype) for x in leaves]
            raw = sum(4 * x.size for x in leaves) // share
            load = costs.Load.of(codec, parts, raw, ranks=net.size, mover=known.mover)
            schedule = costs.choose(load, known, prefer=prefer)
        outer = outer._replace(schedule=schedule)
    return (outer, *(s._replace(schedule="two_shot") if s.schedule == "auto" else s for s in inner))


@contextlib.contextmanager
def opened() -> Generator[None]:
    """Returns a context in which sums are traced as operations of the caller's program, without derivatives."""
    token = _OPEN.set(True)
    try:
        yield
    finally:
        _OPEN.reset(token)


def psum(message: Message, *, net: Transport, stages: tuple[Stage, ...], how: Sum, tracked: bool) -> Message:
    """Returns the sum of a message over all ranks, with its new state if it has state.

    Args:
      message: the message.
      net: the transport over the ranks of all stages.
      stages: the exchanges, outermost first.
      how: how the sum is formed.
      tracked: whether JAX tracks over which axes values vary (check_vma).
    """
    if _OPEN.get():
        found = run(primitive.match_varying(message, net), net=net, stages=stages, how=how, tracked=tracked)
        return found.replace(leaves=[same(x, net.names) for x in found.leaves])
    return primitive.bind(psum_p, message, net=net, stages=stages, how=how, tracked=tracked)


def run(message: Message, *, net: Transport, stages: tuple[Stage, ...], how: Sum, tracked: bool) -> Message:
    """Computes `psum` as plain operations, without a derivative."""
    outermost = stages[0]
    if outermost.codec.low_rank:
        return low_rank.allreduce(stages, message, how)
    if len(stages) > 1:
        return hierarchy.allreduce(net, stages, message=message, how=how)
    summed = schedules.allreduce(outermost, message, how)
    momentum = None if message.momentum is None else summed.sent.clear(message.momentum)
    return Message(message.ids, summed.leaves, residuals=summed.residuals, momentum=momentum)


def begin(message: Message, stages: tuple[Stage, ...], how: Sum) -> Any:
    """Begins the sum of a message, which a later program may end. Returns None if only the same program can end it.

    The result is a pytree. Its new residuals become final when `end` ends the sum.
    """
    stage, *inner = stages
    if inner or stage.codec.low_rank or not schedules.is_piecewise(stage):
        return None
    with schedules.piecewise_scope(stage, message):
        return schedules.begin(stage, message, how)


def end(begun: Any, later: bool) -> tuple[list[Any], Any]:
    """Ends a sum. Returns (leaves, new residuals): the residuals are a list with an array per leaf, or None.

    `later` is that of `Way`.
    """
    leaves, residuals = begun.net.end_sum(begun, later)
    return [x.astype(dtype) for x, dtype in zip(leaves, begun.layout.dtypes)], residuals


# If JAX tracks over which axes values vary (check_vma), the cotangent of a sum is the same on every rank. The transpose
# of the sum then gives each rank a copy of the cotangent (pcast), and sends no bytes. If JAX doesn't track this, a
# cotangent may differ from rank to rank, and the transpose of psum is psum.
def _transpose(
    message: Message, cts: list[Any], *, net: Transport, how: Sum, tracked: bool, batch: primitive.Batch, **params: Any
) -> list[Any]:
    if tracked:
        return [ct / how.divisor for ct in cts]
    back = Message(message.ids, cts, keys.back(message.key, len(batch)))
    return primitive.bind(psum_p, back, net=net, how=how, tracked=tracked, batch=batch, **params).leaves


psum_p: Any = primitive.define(
    "jaxcgx_psum",
    run,
    shape=lambda shape, i, **params: shape,
    transpose=_transpose,
    same=True,
    invarying=lambda **params: True,
)

same_p: Any = _compat.Primitive("jaxcgx_same")


def same(x: jax.Array, names: tuple[Any, ...]) -> jax.Array:
    """Returns x, marked as the same on every rank if JAX tracks that."""
    return same_p.bind(x, names=names) if _compat.tracked_axes(names) else x


define_impl(same_p)
same_p.def_abstract_eval(lambda x, names: _compat.result_aval([x], x.shape, x.dtype, rows=x.ndim, invarying=names))
batching.primitive_batchers[same_p] = lambda xs, dims, names: (same_p.bind(*xs, names=names), *dims)
mlir.register_lowering(same_p, lambda ctx, x, names: [x])
