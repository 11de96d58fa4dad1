"""Gradients of one rank, which JAX doesn't reduce, and their compressed mean during the backward pass."""

import contextlib
import functools
import math
from collections.abc import Callable, Generator, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from jaxcgx import _compat
from jaxcgx.checks import wrong
from jaxcgx.collectives.arguments import Options, check_order
from jaxcgx.collectives.calls import Call, Route
from jaxcgx.collectives.psum import Reduction
from jaxcgx.collectives.state import Kept, State
from jaxcgx.exchange.message import Message, carry
from jaxcgx.exchange.overlay import Overlay
from jaxcgx.plan import Plan
from jaxcgx.plan.by_axis import Codecs
from jaxcgx.transports.resolve import check_axes
from jaxcgx.typing import AxisName


def vary(x: Any, names: tuple[Any, ...]) -> Any:
    """Returns the tree, marked as varying over the axes `names` if JAX tracks this for them."""
    tracked = _compat.tracked_axes(names)
    return jax.tree_util.tree_map(lambda leaf: _compat.vary(leaf, tracked), x)


# JAX's errors for a sharding constraint over an axis of shard_map. The first three are for a constraint that is given
# as a spec, as a NamedSharding of the mesh, and as out_sharding. The last is raised without check_vma, at compile time.
_CONSTRAINED = (
    "can only refer to Auto axes",
    "should be of type `Manual`",
    "that are of type Auto or Manual",
    "contains a manual axes",
)


@contextlib.contextmanager
def without_constraints(function: str, argument: str, names: tuple[Any, ...]) -> Generator[None]:
    """Turns JAX's errors about sharding constraints over the ranks' axes into an error that says what to write."""
    try:
        yield
    except ValueError as error:
        if not any(words in str(error) for words in _CONSTRAINED):
            raise
        raise _constrained(function, argument, names, error) from error


def _constrained(function: str, argument: str, names: tuple[Any, ...], what: Any) -> Exception:
    return wrong(
        function,
        argument,
        f"no sharding constraint over {', '.join(map(repr, names))} inside the loss, which gets one rank's part of a "
        "batch",
        f"one: {what}",
        "take it out; for other axes of the mesh, pass a PartitionSpec without the mesh: "
        'jax.lax.with_sharding_constraint(x, P(None, "model"))',
    )


def check_constraints(function: str, argument: str, names: tuple[Any, ...], jaxpr: Any) -> None:
    """Refuses sharding constraints over the ranks' axes in a traced program.

    Without check_vma, JAX itself refuses them only at compile time.
    """
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        spec = getattr(eqn.params.get("sharding"), "spec", ())
        axes = {name for part in spec for name in (part if isinstance(part, tuple) else (part,))}
        if eqn.primitive.name == "sharding_constraint" and axes & set(names):
            raise _constrained(function, argument, names, spec)
        for param in eqn.params.values():
            for value in param if isinstance(param, tuple | list) else [param]:
                if hasattr(getattr(value, "jaxpr", value), "eqns"):
                    check_constraints(function, argument, names, value)


def _own(function: str, argument: str, names: tuple[Any, ...], loss: Any) -> Any:
    """Returns the loss. If it is differentiated, its type must vary over the ranks. A constant isn't checked."""
    return loss


def _own_jvp(
    function: str, argument: str, names: tuple[Any, ...], primals: tuple[Any, ...], tangents: tuple[Any, ...]
) -> tuple[Any, ...]:
    varying = frozenset[Any]().union(*map(_compat.varying_axes, jax.tree.leaves(primals)))
    if same := [name for name in names if name in _compat.tracked_axes(names) - varying]:
        raise wrong(
            function,
            argument,
            "this rank's own loss",
            f"one that is the same on every rank of {', '.join(map(repr, same))}",
            "take the pmean out of the loss",
        )
    return *primals, *tangents


own: Any = jax.custom_jvp(_own, nondiff_argnums=(0, 1, 2))
own.defjvp(_own_jvp)


def local_value_and_grad(
    fun: Callable[..., Any],
    axis_name: AxisName,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
    allow_int: bool = False,
) -> Callable[..., tuple[Any, Any]]:
    """Returns a function like `jax.value_and_grad(fun)` whose gradients are this rank's own, not summed over ranks.

    If a parameter is the same on every rank, JAX itself sums its gradient over all ranks, in full precision, under
    shard_map's check_vma. Here, parameters count as different on every rank, so JAX doesn't sum. Take the mean with
    `compressed_pmean(grads, axis_name, codec)`. The value and the auxiliary outputs are also this rank's own.

    `fun` must return this rank's loss. Averaging over ranks inside it divides the gradients by the number of ranks
    twice. Under check_vma this is an error, unless its gradients are zero. Without check_vma nothing detects it.

    Args:
      fun: the function to differentiate.
      axis_name: the axis, or a tuple of axes, over which gradients are not reduced.
      argnums: as in jax.value_and_grad.
      has_aux: as in jax.value_and_grad.
      holomorphic: as in jax.value_and_grad.
      allow_int: as in jax.value_and_grad.
    """
    if not callable(fun):
        raise wrong("local_value_and_grad", "fun", "a function", repr(fun), kind=TypeError)

    @functools.wraps(fun)
    def value_and_grad(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        names, given = check_axes("local_value_and_grad", axis_name).names, list(args)
        for i in argnums if isinstance(argnums, Sequence) else [argnums]:
            if -len(given) <= i < len(given):  # otherwise jax raises its own error
                given[i] = vary(given[i], names)

        check = functools.partial(own, "local_value_and_grad", "fun", names)

        def checked(*args: Any, **kwargs: Any) -> Any:
            match fun(*args, **kwargs):
                case (loss, aux) if has_aux:
                    return check(loss), aux
                case found:  # with has_aux this isn't a pair, and jax raises its own error
                    return found if has_aux else check(found)

        differentiated = jax.value_and_grad(
            checked, argnums=argnums, has_aux=has_aux, holomorphic=holomorphic, allow_int=allow_int
        )
        return differentiated(*given, **kwargs)

    return value_and_grad


def _weighted(op: str, names: tuple[Any, ...], cts: list[Any]) -> list[Any]:
    """Scales the cotangents so that their mean over the ranks is the gradient.

    If JAX differentiates shard_map from outside, a rank's cotangents already include its weight in the loss. Their sum
    is then the gradient, so they are multiplied by the number of ranks.
    """
    outside = _compat.transposed_axes().intersection(names)
    if not outside:
        return cts
    if not outside <= _compat.tracked_axes(names):
        raise wrong(
            op,
            "params",
            "a gradient that is taken inside shard_map, or shard_map's check_vma=True",
            "a gradient from outside with check_vma=False, where JAX adds a sum of its own in full precision",
        )
    ranks = math.prod(map(lax.axis_size, outside))
    return [ct * ranks for ct in cts]


def _check_own_residuals(call: Call, residuals: list[Any]) -> None:
    """Checks that residuals vary over the ranks and with their leaf, as the new residuals do."""
    tracked = _compat.tracked_axes(call.net.names)
    for path, array, leaf in zip(call.paths, residuals, call.leaves):
        if array is None:
            continue
        if same := sorted(map(str, (tracked | _compat.varying_axes(leaf)) - _compat.varying_axes(array))):
            got = f"one that is the same on every rank of {', '.join(map(repr, same))}"
            remedy = (
                "keep a row for each rank, and give shard_map a spec with the axis for them; for zeros that are made "
                "inside, jax.lax.pcast(zeros, axis_name, to='varying')"
            )
            raise wrong(call.op, "residuals", "this rank's own array", got, remedy, path=path)


def sync_in_backward(
    params: Any,
    axis_name: AxisName,
    codec: Codecs | Plan,
    *,
    key: jax.Array | None = None,
    residuals: Any = None,
    order: tuple[int, ...] | None = None,
    schedule: str | Overlay | dict[Any, Any] = "auto",
    own: Literal["raw", "encoded"] = "raw",
    leader: bool = False,
    strict: bool = False,
    fusion_mb: float | None = None,
) -> Any:
    """Returns `params` unchanged, and replaces their gradients by the compressed mean over the axis.

    The mean is taken in the backward pass. Every message is exchanged as soon as the gradients of its leaves are known,
    while the rest of the backward pass still runs. Call `sync_in_backward` on the parameters inside the function that
    is differentiated:

        def loss(params, batch):
            params = jaxcgx.sync_in_backward(params, "data", codec)
            ...

    The gradients have the same bits as with `compressed_pmean(grads, ...)` after the backward pass, with the same
    arguments. Smaller messages (`fusion_mb`) start earlier, but more messages add latency. Only reverse-mode
    differentiation works.

    If the gradient is taken inside `shard_map`, as above, the loss must be this rank's own: averaging over ranks inside
    it divides the gradients by the number of ranks twice. If the gradient is taken outside of `shard_map`, the loss
    itself sets the weight of each rank, by `lax.pmean` inside or by a mean of the ranks' losses outside. The gradients
    are then the same as in plain JAX. This needs shard_map's check_vma: without it, JAX adds its own sum in full
    precision. In the backward rule of a custom_vjp, don't take a whole gradient of such a loss while the shard_map
    around it is differentiated from outside: it would be too large by the number of ranks.

    With error feedback, the new residuals are the gradients of the old ones, so differentiate with respect to both:

        def loss(params, residuals, batch):
            params = jaxcgx.sync_in_backward(params, "data", codec, residuals=residuals)
            ...

        grads, residuals = jax.grad(loss, argnums=(0, 1))(params, residuals, batch)

    Args:
      params: a pytree of parameters.
      axis_name: one name, or a tuple of names, outermost first.
      codec: a codec, {axis name: codec} or a `Plan`.
      key: a random key, as in `compressed_psum`. The arguments without a description are also as in `compressed_psum`.
      residuals: the compression errors of earlier steps, a tree like `params` of this rank's float32 arrays, zeros at
        first. None in place of a leaf means no feedback for it. A loss may use them only once, because JAX adds up the
        gradients of all uses. If the loss depends on none of the leaves of a message, JAX skips its exchange, and the
        message's residuals become zeros.
      order: the order in which the gradients are ready, from `backward_order`. Messages are made and sent in this
        order. By default, the last leaves are sent first. Leaves that travel raw, each on its own, follow.
      schedule: how the bytes travel.
      own: how a rank adds its own part.
      leader: whether only one rank of each node takes part in the exchange between nodes.
      strict: whether a leaf that can't be compressed is an error.
      fusion_mb: the largest size of a message in MiB; by default the plan's, or 64.
    """
    op = "sync_in_backward"
    net = check_axes(op, axis_name)
    if order is not None:
        check_order(op, order, len(jax.tree_util.tree_leaves(params)))
    options = Options(
        key=key, schedule=schedule, own=own, leader=leader, strict=strict, fusion_mb=fusion_mb, order=order
    )
    reduction = Reduction(op, params, net=net, codec=codec, options=options, mean=True, gradients=True)
    kept = Kept(reduction.call, State(residuals=residuals))
    if residuals is not None:
        reduction.check_feedback()
        _check_own_residuals(reduction.call, kept.arrays["residuals"])

    def raw(message: Message) -> Message:
        (i,) = message.ids
        if message.residuals and not reduction.call.skipped[i]:
            leaves, lost = carry(message.leaves, message.residuals)
            message = message.replace(leaves=leaves, residuals=lost)
        return message.replace(leaves=[reduction.plain(message.leaves[0], i)])

    def plain(leaf: jax.Array, i: int) -> jax.Array:
        if not jnp.issubdtype(leaf.dtype, jnp.inexact):
            return leaf  # because it has no gradient
        residual = None if residuals is None else kept.arrays["residuals"][i]
        message = Message((i,), [leaf], residuals=None if residual is None else [residual])
        return _in_backward(message, reduction.call, raw)[0]

    def compressed(message: Message, route: Route) -> list[Any]:
        message = kept.attach(message, route.stages[0].codec)
        return _in_backward(message, reduction.call, lambda back: reduction.compressed(back, route))

    return reduction.call.run(plain, compressed)


def _in_backward(message: Message, call: Call, exchange: Callable[[Message], Message]) -> list[Any]:
    """Returns the leaves of a message. In the backward pass, `exchange` maps the message of cotangents to its sums.

    The gradients of the message's residuals are the new residuals.
    """
    varying = [_compat.varying_axes(x) for x in message.leaves]
    if message.residuals:  # of a leaf without feedback, they are zeros, which don't vary over the ranks yet
        ranks = _compat.tracked_axes(call.net.names)
        own = [_compat.vary(r, ranks | axes) for r, axes in zip(message.residuals, varying)]
        message = message.replace(residuals=own)

    @jax.custom_vjp
    def identity(message: Message) -> list[Any]:
        return vary(message.leaves, call.net.names)

    def forward(message: Message) -> tuple[list[Any], Message]:
        return identity(message), message.replace(leaves=[])

    def backward(state: Message, cts: list[Any]) -> tuple[Message]:
        done = exchange(state.replace(leaves=_weighted(call.op, call.net.names, cts)))
        return (done.replace(leaves=list(map(_compat.vary, done.leaves, varying)), key=None),)

    identity.defvjp(forward, backward)
    return identity(message)
