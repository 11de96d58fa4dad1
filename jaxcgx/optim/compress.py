"""compress_gradients: an optax transformation from every rank's gradients to their mean, in a fraction of the bytes."""

import dataclasses
import functools
import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from jaxcgx import _compat
from jaxcgx.checks import wrong
from jaxcgx.codecs.base import Codec
from jaxcgx.collectives.finite import count_nonfinite
from jaxcgx.exchange.keys import fold
from jaxcgx.exchange.overlay import Overlay
from jaxcgx.optim.exchange import Kept, exchange
from jaxcgx.optim.feedback import damp, forget
from jaxcgx.optim.halves import after
from jaxcgx.optim.initial import init_state
from jaxcgx.optim.leaves import check_arrays, flatten
from jaxcgx.optim.momentum import accelerate, accelerate_mean, decayed, hold
from jaxcgx.optim.nonfinite import unless
from jaxcgx.optim.phases import switch
from jaxcgx.optim.require import import_optax
from jaxcgx.optim.settings import Settings
from jaxcgx.optim.state import CompressState, check_state, describe_state
from jaxcgx.plan import Plan
from jaxcgx.typing import AxisName

if TYPE_CHECKING:
    import optax


def compress_gradients(
    axis_name: AxisName,
    plan: Codec | Plan | dict[Any, Any],
    *,
    feedback: bool = True,
    beta: float | jax.Array | None = None,
    reset_every: int | jax.Array | None = None,
    momentum: float | jax.Array | None = None,
    nesterov: bool = False,
    momentum_masking: bool = False,
    weight_decay: float | jax.Array | None = None,
    weight_decay_mask: Any = None,
    skip_nonfinite: bool = False,
    telemetry: bool = False,
    seed: int | jax.Array = 0,
    axis_size: int | None = None,
    schedule: str | Overlay | dict[Any, Any] = "auto",
    own: str = "raw",
    leader: bool = False,
    strict: bool = False,
    fusion_mb: float | None = None,
    order: Sequence[int] | None = None,
    slice_elements: int | None = None,
) -> "optax.GradientTransformation":
    """Makes an optax.GradientTransformation that replaces the gradients of each rank's own batch by their mean.

    The mean is the same on all ranks. The errors of compression are kept in the state, as residuals, and sent later
    (error feedback). Leaves that travel raw under every plan have no residual.

    beta, momentum, weight_decay, reset_every and seed may be arrays, so optax.inject_hyperparams can set them. Name the
    other numbers in its static_args.

    Args:
      axis_name: the axis of the ranks, or a tuple of axes; or an MPI communicator, or `jaxcgx.mpi.hierarchy()`.
      plan: a codec, {axis: codec} or a Plan; or a schedule of these. {0: plan, 1000: other} uses `other` from step 1000
        on, counted from 0. A schedule is one compiled program, which chooses the plan by the step.
      feedback: whether the errors of compression are kept and sent later.
      beta: the new residual is (1 - beta) * the old residual + beta * the error of the step (LoCo). None: the new
        residual is the error of the step.
      reset_every: the number of steps after which residuals are set to zero again (LoCo). None: never.
      momentum: every rank sends u = momentum * u + gradient instead of its gradient (DGC's momentum correction), so
        that elements that are sent late have momentum, too. The optimizer after this transformation should have no
        momentum. Leaves that always travel raw get their momentum after the reduction. Where the mean or the new u is
        not finite, u keeps its old value.
      nesterov: whether to use Nesterov's momentum: u = momentum * (u + gradient), and u + gradient is sent.
      momentum_masking: whether u becomes 0 where TopK sent an element (DGC), so that stale momentum isn't used again.
      weight_decay: weight_decay * parameters is added to the mean. It has its own momentum, with the same factor, as
        weight decay has in an optimizer with momentum.
      weight_decay_mask: the parameters that have weight decay: a tree of bools like the parameters, a prefix of such a
        tree, or a function from the parameters to one. None: all.
      skip_nonfinite: whether residuals, momentum and factors keep their values in a step whose mean is not finite
        everywhere. This is for optimizers that skip such steps (optax.apply_if_finite, loss scaling). Residuals are
        then not updated in place. Without check_vma, every device looks only at its own shards.
      telemetry: whether to report the error of each step in `state.telemetry`. Without check_vma, the report covers
        only a device's own shards.
      seed: the seed of the noise of codecs that round stochastically.
      axis_size: the number of ranks. It is needed if `init` is called outside shard_map and without a mesh in context
        (jax.set_mesh). For jax.pmap, pass 1 and replicate the state. Every device then has its own state.
      schedule: how the bytes travel, as in `compressed_pmean`.
      own: how a rank adds its own part, as in `compressed_pmean`.
      leader: whether only one rank of each node takes part in the exchange between nodes.
      strict: whether a leaf that can't be compressed is an error.
      fusion_mb: the largest size of a message in MiB; by default the plan's, or 64.
      order: the numbers of the leaves, in the order in which their gradients are ready in the backward pass
        (`backward_order`). Messages are made and sent in this order. Over `Tcp`, the backward pass continues during the
        exchange, if there are several messages (`fusion_mb`).
      slice_elements: the number of elements in a slice. Over `Tcp`, messages travel in slices, and slices of later
        messages overtake slices of earlier ones. Leaves are then grouped into messages in the order of the tree, so the
        bits don't depend on `order`. Leaves that travel raw are sent in messages, too.
    """
    settings = Settings(
        function="compress_gradients",
        axis_name=axis_name,
        plan=plan,
        feedback=feedback,
        beta=beta,
        reset_every=reset_every,
        momentum=momentum,
        nesterov=nesterov,
        momentum_masking=momentum_masking,
        weight_decay=weight_decay,
        weight_decay_mask=weight_decay_mask,
        skip_nonfinite=skip_nonfinite,
        telemetry=telemetry,
        seed=seed,
        axis_size=axis_size,
        schedule=schedule,
        own=own,
        leader=leader,
        strict=strict,
        fusion_mb=fusion_mb,
        order=order,
        slice_elements=slice_elements,
    )
    return _transformation(settings)


def compress_with(
    function: str, axis_name: AxisName, plan: Codec | Plan | dict[Any, Any], *, maker: Any = None, **options: Any
) -> "optax.GradientTransformationExtraArgs":
    """Makes a `compress_gradients` for the public function `function`. `check_settings` explains the arguments."""
    return _transformation(check_settings(function, axis_name, plan, options, maker=maker))


def scatter_with(
    axis_name: AxisName, plan: Any, options: dict[str, Any], *, dimensions: tuple[int | None, ...], keyed: bool
) -> "optax.GradientTransformation":
    """Makes a `compress_gradients` that returns only this rank's slice of the mean for some leaves.

    `Settings` explains `dimensions` (its field `scattered`) and `keyed`.
    """
    settings = check_settings("compress_gradients", axis_name, plan, options)
    return _transformation(dataclasses.replace(settings, scattered=dimensions, keyed=keyed))


def check_settings(
    function: str, axis_name: AxisName, plan: Any, options: dict[str, Any], *, maker: Any = None
) -> Settings:
    """Returns the checked arguments of `compress_gradients`. Missing options get their defaults.

    Args:
      function: the public function that errors name.
      axis_name: as in `compress_gradients`.
      plan: as in `compress_gradients`.
      options: the options of `compress_gradients`.
      maker: the public function itself, if it has options of its own.
    """
    defaults: dict[str, Any] = compress_gradients.__kwdefaults__ or {}
    if unknown := [name for name in options if name not in defaults]:
        parameters = inspect.signature(maker or compress_gradients).parameters.values()
        own = [each.name for each in parameters if each.default is not each.empty]
        expected = f"an option of {function} ({', '.join(dict.fromkeys((*own, *defaults)))})"
        raise wrong(function, unknown[0], expected, repr(options[unknown[0]]), kind=TypeError)
    return Settings(function=function, axis_name=axis_name, plan=plan, **{**defaults, **options})


def compressed(
    optimizer: "optax.GradientTransformation", axis_name: AxisName, plan: Codec | Plan | dict[Any, Any], **options: Any
) -> "optax.GradientTransformation":
    """Makes an optimizer for the gradients of each rank's own batch: compress_gradients, followed by `optimizer`.

    Args:
      optimizer: an optax.GradientTransformation, which gets the mean of the gradients.
      axis_name: the axis of the ranks, or a tuple of axes; or an MPI communicator, or `jaxcgx.mpi.hierarchy()`.
      plan: a codec, {axis: codec}, a Plan or a schedule of these, as in `compress_gradients`.
      **options: all other options of `compress_gradients`.
    """
    return import_optax("compressed").chain(compress_with("compressed", axis_name, plan, **options), optimizer)


def _transformation(settings: Settings) -> "optax.GradientTransformationExtraArgs":
    optax = import_optax(settings.function)

    def init(params: Any) -> CompressState:
        return init_state(settings, params)

    def update(
        updates: Any, state: CompressState, params: Any = None, *, value: Any = None, **_: Any
    ) -> tuple[Any, CompressState]:
        return _update(settings, updates, state=state, params=params, loss=value)

    return optax.GradientTransformationExtraArgs(init, update)


def _update(
    settings: Settings, updates: Any, state: CompressState, params: Any, loss: Any
) -> tuple[Any, CompressState]:
    """Returns (the mean of the gradients `updates`, the state after the step). `loss` is the mean loss, or None."""
    settings.ranks.net()  # raises the error for ranks that can't be reached here before any other error
    updates = check_arrays(settings.function, "updates", updates)
    check_state(settings, state, describe_state(settings, updates, 1))
    if settings.weight_decay is None:
        params = None
    elif params is None:
        expected = "the parameters with 'weight_decay'"
        raise wrong(settings.function, "params", expected, None, "call update(gradients, state, params)")
    grads = flatten(updates)
    kept = Kept(
        residuals=grads.match(state.residuals), momentum=grads.match(state.momentum), factors=grads.match(state.factors)
    )
    trace = grads.match(state.trace)

    moved = [accelerate(settings, u, g) for u, g in zip(kept.momentum, grads.values)]
    key = fold(state.key, state.count) if settings.stochastic else None
    turn = state.count
    if len(settings.phases) > 1 and turn is not None and loss is not None:
        loss = jnp.asarray(loss)
        # XLA runs the exchanges of a conditional at the same time as others, in an order that differs from rank to
        # rank. So the conditional waits for the mean of the loss. A loss that varies is no mean.
        turn = turn if _compat.varying_axes(loss) else after(loss, turn)
    found = switch(
        settings.phases,
        turn,
        [functools.partial(exchange, settings, plan, key=key) for plan in settings.plans],
        grads.tree([each.gradient for each in moved]),
        kept._replace(momentum=[each.momentum for each in moved]),
    )
    count = None if state.count is None else import_optax(settings.function).safe_increment(state.count)

    new = found.kept
    if settings.beta is not None:
        new = new._replace(residuals=damp(settings.beta, kept.residuals, new.residuals))
    held = [hold(old, u, x) for old, u, x in zip(kept.momentum, new.momentum, found.mean)]
    new = new._replace(momentum=held)
    means = zip(trace, held, found.mean, decayed(settings, grads, params))
    final = [accelerate_mean(settings, t, u=u, x=x, p=p) for t, u, x, p in means]
    new_trace = [each.momentum for each in final]
    if settings.skip_nonfinite:
        new, new_trace = unless(count_nonfinite(found.mean), (new, new_trace), (kept, trace))
    if settings.reset_every is not None:
        new = new._replace(residuals=forget(settings.reset_every, count, new.residuals))

    tree = lambda field, values: None if field is None else grads.tree(values)
    renewed = CompressState(
        count=count,
        key=state.key,
        residuals=tree(state.residuals, new.residuals),
        momentum=tree(state.momentum, new.momentum),
        telemetry=found.telemetry,
        trace=tree(state.trace, new_trace),
        factors=tree(state.factors, new.factors),
    )
    return grads.tree([each.gradient for each in final]), renewed
