"""make_train_step: data-parallel training done, for a loss, an optimizer and a mesh."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jaxcgx import _compat
from jaxcgx.checks import check_flag, check_integer, wrong
from jaxcgx.optim.accumulation import Given, addable, local_gradients
from jaxcgx.optim.compress import compress_gradients
from jaxcgx.optim.frozen import find_skipped, join, part
from jaxcgx.optim.model_state import ModelState, first_rank, put
from jaxcgx.optim.objective import make_objective
from jaxcgx.optim.placement import OP, Placement
from jaxcgx.optim.require import import_optax
from jaxcgx.optim.specs import state_specs
from jaxcgx.optim.telemetry import Telemetry

if TYPE_CHECKING:
    import optax


class Metrics(NamedTuple):
    """What a step reports, the same on every rank."""

    loss: jax.Array  # the mean over ranks and micro-batches, uncompressed
    # The mean of each leaf, also uncompressed; of random keys, those of the first rank's last micro-batch. None without
    # has_aux.
    aux: Any
    telemetry: Telemetry | None


class TrainStep(NamedTuple):
    """The two functions of a training loop. With `model_state`, there is one behind `params` everywhere."""

    # params -> (params, opt_state), where `step` wants them
    init: Callable[..., tuple[Any, ...]]
    # as jitted: (params, opt_state, batch, key=None) -> (params, opt_state, Metrics)
    step: Callable[..., tuple[Any, ...]]


def make_train_step(
    loss_fn: Callable[..., Any],
    optimizer: "optax.GradientTransformation",
    mesh: Any,  # jax.sharding.Mesh has a decorator without types: for type checkers it is unknown
    *,
    data_axis: Any = "data",
    compress: Callable[..., Any] = compress_gradients,
    param_specs: Any = None,
    model_state: str | None = None,
    accumulate: int = 1,
    has_aux: bool = False,
    donate: bool = True,
    **options: Any,
) -> TrainStep:
    """Data-parallel training with compressed gradients: a TrainStep.

        train = cgx.make_train_step(loss_fn, optax.adam(1e-3), mesh, plan=cgx.MaxMin(4))
        params, opt_state = train.init(params)
        for batch in batches:
            params, opt_state, metrics = train.step(params, opt_state, batch)

    Args:
      loss_fn: a function (params, batch) that returns the loss of the part of a batch that it is given, or with
        `has_aux` (the loss, a pytree of arrays). Where `step` is given a random key, another one every step, it is
        called with (params, batch, key); the key differs for every rank and micro-batch.
      optimizer: an optax.GradientTransformation. One that takes `value` gets the mean loss.
      mesh: a jax.sharding.Mesh.
      data_axis: the axis of the mesh, or tuple of axes, that the first dimension of a batch's leaves is split over.
        Scalars of a batch, also single random keys, are the same on every rank and for every micro-batch.
      compress: what makes the transformation that exchanges gradients: `compress_gradients`, `dgc` or `bsc`.
      param_specs: for a mesh with other axes, which XLA's partitioner gets: a tree of PartitionSpecs like the
        parameters that says how they are sharded over these. Gradients are compressed shard by shard (docs/meshes.md);
        plans see shards.
      model_state: for models with state beside the parameters, such as statistics of batches or random streams; any
        pytree of arrays. `loss_fn` is then called with (params, model_state, batch) and returns (loss, the new model
        state), or with `has_aux` (loss, (the new model state, aux)). `init` takes (params, model_state), and `init` and
        `step` take and return it behind the parameters. "mean": all ranks have the same. Numbers of floating point are
        averaged over the ranks after each step, uncompressed. Others, such as counters, are those of the first rank.
        Random keys (`jax.random.key`) are folded with the rank before `loss_fn` gets them. "per_rank": each rank keeps
        its own. `init` and `step` return a `PerRank`, with a row for each rank.
      accumulate: the number of micro-batches that a rank's batch is split into. Their gradients are averaged in float32
        and sent once. The model state goes from one to the next.
      has_aux: whether `loss_fn` returns auxiliary outputs.
      donate: update parameters and state in place; those that `step` was given are gone.
      **options: the options of `compress`, among them `plan` and `telemetry`. Parameters that the plan skips (`Skip`)
        are frozen. They are not differentiated, the optimizer doesn't see them, and they keep their bits.
    """
    optax = import_optax(OP)
    placement = Placement(mesh, data_axis, param_specs)
    _check_functions(loss_fn, optimizer, compress)
    check_flag(OP, "has_aux", has_aux)
    check_flag(OP, "donate", donate)
    accumulate = check_integer(OP, "accumulate", accumulate, 1)
    _check_options(compress, options)
    extended = optax.with_extra_args_support(optimizer)
    transformation = compress(data_axis, axis_size=placement.ranks, **options)
    names, state = placement.names, ModelState(model_state, placement.names)
    objective = make_objective(loss_fn, names, has_state=model_state is not None, has_aux=has_aux)
    gradients = local_gradients(objective, data_axis, accumulate)
    find_frozen = lambda params: find_skipped(options.get("plan"), placement.shards(params))

    def local_step(params: Any, model_state: Any, opt_state: Any, batch: Any, key: Any) -> tuple[Any, ...]:
        """The part of one rank."""
        sent, rest = opt_state
        skipped = find_frozen(params)
        trained, frozen = part(params, skipped)
        own_state = state.of_rank(model_state)
        found = gradients(trained, Given(frozen, own_state, batch, key))
        # Rules of the plan are for all leaves. Nothing reads those that it skips.
        grads = join(found.gradients, frozen)
        grads, sent = placement.update_shards(transformation.update, grads, state=sent, params=params)
        tracked = _compat.tracked_axes(names)
        mean = lambda x: (lax.pmean if addable(x) else first_rank)(_compat.vary(x, tracked), names)
        loss, aux = jax.tree_util.tree_map(mean, (found.loss, found.aux))
        updates, rest = _update_with_value(extended.update, part(grads, skipped)[0], rest, trained, value=loss)
        params = join(optax.apply_updates(trained, updates), frozen)
        new_state = state.of_all(model_state, own_state, found.model_state)
        return params, new_state, (sent, rest), Metrics(loss, aux, sent.telemetry)

    def init(params: Any, model_state: Any = None) -> tuple[Any, ...]:
        state.check_given(model_state)
        params, model_state = jax.tree_util.tree_map(jnp.asarray, (params, model_state))
        specs, skipped = placement.specs_of(params), find_frozen(params)
        first, first_specs = placement.init_per_rank(transformation.init, params)
        trained, trained_specs = (part(tree, skipped)[0] for tree in (params, specs))
        opt_specs = first_specs, placement.optimizer_specs(extended, trained, trained_specs)

        def fresh(params: Any, model_state: Any) -> tuple[Any, ...]:  # copies: what is donated must not be the caller's
            own, trained = jax.tree_util.tree_map(jnp.copy, params), part(params, skipped)[0]
            return own, state.first(model_state, placement.ranks), (first(params), extended.init(trained))

        make = jax.jit(fresh, out_shardings=placement.shardings((specs, state.spec, opt_specs)))
        params = jax.device_put(params, placement.shardings(specs))
        params, model_state, opt_state = make(params, put(model_state, placement.shardings(P())))
        return (params, opt_state) if state.mode is None else (params, model_state, opt_state)

    def step_with_state(params: Any, model_state: Any, opt_state: Any, batch: Any, key: Any = None) -> tuple[Any, ...]:
        state.check_rows(model_state)
        specs = state_specs(opt_state, data_axis)
        batch = jax.tree_util.tree_map(jnp.asarray, batch)
        batch_specs = jax.tree_util.tree_map(lambda x: P(names) if x.ndim else P(), batch)
        if AxisType.Explicit in mesh.axis_types:  # where shard_map moves nothing
            batch = jax.tree_util.tree_map(jax.sharding.reshard, batch, placement.shardings(batch_specs))
        return jax.shard_map(
            local_step,
            mesh=mesh,
            axis_names=set(names),
            in_specs=(P(), state.spec, specs, batch_specs, P()),
            out_specs=(P(), state.spec, specs, P()),
        )(params, model_state, opt_state, batch, key)

    def step(params: Any, opt_state: Any, batch: Any, key: Any = None) -> tuple[Any, ...]:
        params, _, opt_state, metrics = step_with_state(params, None, opt_state=opt_state, batch=batch, key=key)
        return params, opt_state, metrics

    if state.mode is None:
        jitted = jax.jit(step, donate_argnums=(0, 1) if donate else ())
        return TrainStep(init, Step(jitted, placement, place=2))
    jitted = jax.jit(step_with_state, donate_argnums=(0, 1, 2) if donate else ())
    return TrainStep(init, Step(jitted, placement, place=3))


class Step:
    """The jitted function `step` of a `TrainStep`, and a check of its batches, which jit can't do.

    Its other members are those of the jitted function.
    """

    def __init__(self, jitted: Any, placement: Placement, place: int) -> None:
        """place: the position of the batch among the arguments."""
        self._jitted, self._placement, self._place = jitted, placement, place

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        self._placement.check_batch(kwargs.get("batch", args[self._place] if len(args) > self._place else None))
        return self._jitted(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "_jitted"), name)  # which a copy lacks at first


def _update_with_value(update: Callable[..., Any], *args: Any, value: Any) -> Any:
    """An optimizer's update with the loss; without it where the optimizer, or one inside of it, takes no `value`."""
    try:
        return update(*args, value=value)
    except (TypeError, ValueError) as error:
        if asked := [name for name in ("value_fn", "obj_fn") if name in str(error)]:  # searches along a line, Sophia
            raise wrong(
                OP,
                "optimizer",
                "one that needs gradients, parameters and the loss",
                f"one that calls the loss function itself, as {asked[0]!r}, whose gradients would travel uncompressed",
                "for optax.lbfgs pass linesearch=None",
            ) from error
        if "unexpected keyword argument 'value'" not in str(error):
            raise
    return update(*args)


def _check_functions(loss_fn: Any, optimizer: Any, compress: Any) -> None:
    if not callable(loss_fn):
        raise wrong(OP, "loss_fn", "a function", repr(loss_fn), kind=TypeError)
    if not (callable(getattr(optimizer, "init", None)) and callable(getattr(optimizer, "update", None))):
        raise wrong(OP, "optimizer", "an optax.GradientTransformation", repr(optimizer), kind=TypeError)
    if not callable(compress):
        expected = "jaxcgx.compress_gradients, jaxcgx.dgc or jaxcgx.bsc"
        raise wrong(OP, "compress", expected, repr(compress), kind=TypeError)


def _check_options(compress: Callable[..., Any], options: dict[str, Any]) -> None:
    if "axis_size" in options:
        expected, got = "none, as the mesh says how many ranks there are", repr(options["axis_size"])
        raise wrong(OP, "axis_size", expected, got, "leave it out", kind=TypeError)
    if compress is compress_gradients and "plan" not in options:
        expected, remedy = "a codec, {axis: codec} or a Plan", "pass plan=jaxcgx.MaxMin(4), or compress=jaxcgx.dgc"
        raise wrong(OP, "plan", expected, "nothing", remedy, kind=TypeError)
