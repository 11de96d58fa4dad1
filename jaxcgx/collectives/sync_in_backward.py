"""sync_in_backward: the compressed mean of gradients, during the backward pass."""

import functools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from jaxcgx import _compat
from jaxcgx.checks import check_varying, wrong
from jaxcgx.collectives.arguments import Call
from jaxcgx.exchange.message import Carry, Message
from jaxcgx.exchange.primitives import psum
from jaxcgx.exchange.reduce import plain_sum, travel_with
from jaxcgx.exchange.routes import Kept, Plain, Travel, Way, as_order
from jaxcgx.plan import Plan
from jaxcgx.plan.leaves import Codecs
from jaxcgx.typing import AxisName, Key, PyTree

OP = "sync_in_backward"
OWN = (
    "keep a row for each rank, and give shard_map a spec with the axis for them; for zeros that are made inside, "
    "jax.lax.pcast(zeros, axis_name, to='varying')"
)


def sync_in_backward(
    params: PyTree,
    axis_name: AxisName,
    plan: Codecs | Plan,
    *,
    key: Key | None = None,
    carry: Carry | None = None,
    order: Sequence[int] | None = None,
) -> PyTree:
    """Returns `params` unchanged, and replaces their gradients by the compressed mean over the axis.

    The mean is taken in the backward pass. Every message is exchanged as soon as the gradients of its leaves are known,
    while the rest of the backward pass still runs. Call `sync_in_backward` on the parameters inside the function that
    is differentiated:

        def loss(params, batch):
            params = jaxcgx.sync_in_backward(params, "data", plan)
            ...

    The gradients have the same bits as with `compressed_pmean(grads, ...)` after the backward pass, with the same
    arguments. Smaller messages (`fusion_mb`) start earlier, but more messages add latency. Only reverse-mode
    differentiation works.

    If the gradient is taken inside `shard_map`, as above, the loss must be this rank's own: averaging over ranks inside
    it divides the gradients by the number of ranks twice. If the gradient is taken outside of `shard_map`, the loss
    itself sets the weight of each rank, by `jax.lax.pmean` inside or by a mean of the ranks' losses outside. The
    gradients are then the same as in plain JAX. This needs shard_map's check_vma: without it, JAX adds its own sum in
    full precision. In the backward rule of a custom_vjp, don't take a whole gradient of such a loss while the shard_map
    around it is differentiated from outside: it would be too large by the number of ranks.

    With error feedback, the new carry is the gradient of the old one, so differentiate with respect to both:

        def loss(params, carry, batch):
            params = jaxcgx.sync_in_backward(params, "data", plan, carry=carry)
            ...

        grads, carry = jax.grad(loss, argnums=(0, 1))(params, carry, batch)

    Args:
      params: a pytree of parameters.
      axis_name: one name, or a tuple of names, outermost first.
      plan: a codec, {axis name: codec} or a `Plan`.
      key: a random key, as in `compressed_psum`.
      carry: a `Carry` with residuals, the compression errors of earlier steps: a tree like `params` of this rank's
        float32 arrays. None in place of a leaf means no feedback for it. A loss may use it only once, because JAX adds
        up the gradients of all uses. If the loss depends on none of the leaves of a message, JAX skips its exchange,
        and the message's residuals become zeros.
      order: the order in which the gradients are ready, from `backward_order`. Messages are made and sent in this
        order. By default, the last leaves are sent first. Leaves that travel raw, each on its own, follow.
    """
    call, given = Call.of(OP, params, axis_name, plan, key=key), carry or Carry()
    if given.momentum is not None or given.factors is not None:
        raise wrong(OP, "carry", "residuals alone", "momentum or factors", "pass jaxcgx.Carry(residuals=...)")
    way = Way(order=as_order(OP, order, len(call.routes.leaves)))
    travel = travel_with(given, call.routes, call.net, way, argument="params")
    leaves, residuals = call.routes.each(call.x), call.routes.each(given.residuals)
    fed = [(route.path, r) for route, r in zip(call.routes.leaves, residuals) if r is not None]
    paths, arrays = [path for path, _ in fed], [r for _, r in fed]
    check_varying(OP, call.net.names, paths, arrays, argument="carry.residuals", remedy=OWN)
    found, kept = dict(enumerate(leaves)), Kept(given, call.routes)
    for plain in travel.plain:
        for i, why in zip(plain.ids, plain.why):
            if jnp.issubdtype(leaves[i].dtype, jnp.inexact):  # others have no gradient
                send = functools.partial(_send_plain, travel, Plain((i,), plain.nets, (why,)))
                own = None if residuals[i] is None else [residuals[i]]
                with travel.leaf_scope(i, why):
                    (found[i],) = _in_backward(Message((i,), [leaves[i]], residuals=own), travel, send)
    # The backward pass runs in the opposite order.
    for envelope in travel.envelopes if order is None else reversed(travel.envelopes):
        ids, words = envelope.ids, call.key if envelope.stochastic else None
        message = Message(ids, [leaves[i] for i in ids], words).replace(**kept.state(envelope))
        with travel.scope(ids):
            send = functools.partial(psum, net=travel.net, stages=envelope.stages, how=travel.how)
            found |= zip(ids, _in_backward(message, travel, send))
    return call.routes.tree.unflatten([found[i] for i in range(len(leaves))])


def _send_plain(travel: Travel, plain: Plain, message: Message) -> Message:
    if not travel.routes.leaves[plain.ids[0]].skipped:
        message = message.carried()
    return message.replace(leaves=[plain_sum(travel, plain, message.leaves[0])])


def _in_backward(message: Message, travel: Travel, exchange: Callable[[Message], Message]) -> list[jax.Array]:
    """Returns the leaves of a message. In the backward pass, `exchange` gives their gradients, and new residuals."""
    names, varying = travel.net.names, [_compat.varying_axes(x) for x in message.leaves]
    if message.residuals:  # of a leaf without feedback, they are zeros, which don't vary over the ranks yet
        ranks = _compat.tracked_axes(names)
        own = [_compat.vary(r, ranks | axes) for r, axes in zip(message.residuals, varying)]
        message = message.replace(residuals=own)

    @jax.custom_vjp
    def identity(message: Message) -> list[jax.Array]:
        return _compat.vary_over(message.leaves, names)

    def forward(message: Message) -> tuple[list[jax.Array], Message]:
        return identity(message), message.replace(leaves=[])

    def backward(state: Message, cts: list[jax.Array]) -> tuple[Message]:
        done = exchange(state.replace(leaves=_weighted(names, cts)))
        return (done.replace(leaves=list(map(_compat.vary, done.leaves, varying)), key=None),)

    identity.defvjp(forward, backward)
    return identity(message)


def _weighted(names: tuple[PyTree, ...], cts: list[jax.Array]) -> list[jax.Array]:
    """Scales the cotangents so that their mean over the ranks is the gradient.

    If JAX differentiates shard_map from outside, a rank's cotangents already include its weight in the loss. Their sum
    is then the gradient, so they are multiplied by the number of ranks.
    """
    outside = _compat.transposed_axes().intersection(names)
    if not outside:
        return cts
    if not outside <= _compat.tracked_axes(names):
        expected = "a gradient that is taken inside shard_map, or shard_map's check_vma=True"
        got = "a gradient from outside with check_vma=False, where JAX adds a sum of its own in full precision"
        raise wrong(OP, "params", expected, got)
    ranks = math.prod(map(jax.lax.axis_size, outside))
    return [ct * ranks for ct in cts]
