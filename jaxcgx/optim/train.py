"""make_train_step: data-parallel training done, for a loss, an optimizer and a mesh or an MPI communicator."""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jaxcgx.checks import check_flag, check_integer, wrong
from jaxcgx.codecs.raw import Raw
from jaxcgx.optim.accumulation import Given, addable, local_gradients
from jaxcgx.optim.alone import Alone
from jaxcgx.optim.compress import compress_gradients
from jaxcgx.optim.frozen import find_skipped, join, part
from jaxcgx.optim.model_state import ModelState, agree, put
from jaxcgx.optim.objective import make_objective
from jaxcgx.optim.placement import OP, Placement, check_placement
from jaxcgx.optim.require import import_optax
from jaxcgx.optim.settings import check_ranks
from jaxcgx.optim.sharded import Sharded
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
    mesh: Any = None,  # jax.sharding.Mesh has a decorator without types: for type checkers it is unknown
    *,
    data_axis: Any = "data",
    compress: Callable[..., Any] = compress_gradients,
    param_specs: Any = None,
    optimizer_specs: Any = None,
    gather: Any = Raw(),
    regather: bool = True,
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

    Between the processes of mpirun, pass a communicator in place of a mesh (docs/mpi.md):

        train = cgx.make_train_step(loss_fn, optax.adam(1e-3), data_axis=MPI.COMM_WORLD, plan=cgx.MaxMin(4))

    Args:
      loss_fn: a function (params, batch) that returns the loss of the part of a batch that it is given, or with
        `has_aux` (the loss, a pytree of arrays). Where `step` is given a random key, another one every step, it is
        called with (params, batch, key); the key differs for every rank and micro-batch.
      optimizer: an optax.GradientTransformation. One that takes `value` gets the mean loss.
      mesh: a jax.sharding.Mesh; none with a communicator.
      data_axis: the axis of the mesh, or tuple of axes, that the first dimension of a batch's leaves is split over.
        Scalars of a batch, also single random keys, are the same on every rank and for every micro-batch. Or an MPI
        communicator, or `jaxcgx.mpi.hierarchy()`. A batch is then that of the process, and `init` takes the parameters
        of the first rank.
      compress: what makes the transformation that exchanges gradients: `compress_gradients`, `dgc` or `bsc`.
      param_specs: how parameters are sharded: a tree of PartitionSpecs like them. Over `data_axis` (ZeRO-3, FSDP):
        each rank has its shards of parameters, gradients and optimizer state. It gathers the parameters for the loss,
        and gradients go straight to their shards, with the codecs of `plan`. `shard_specs` makes such specs. Over other
        axes of the mesh, which XLA's partitioner gets: gradients are compressed shard by shard (docs/meshes.md); plans
        see shards.
      optimizer_specs: how the state of the optimizer is sharded, where not as the parameters: their specs, with
        `data_axis` besides (ZeRO-1). Each rank has whole parameters, and updates its shards. The updates are gathered.
      gather: a codec, {axis: codec} or a Plan for what is gathered of shards: parameters, or updates. The shards of
        parameters lose nothing. What the gather of updates loses is kept in the state and sent later, except with
        feedback=False. Plans see shards.
      regather: gather parameters again for the backward pass, as FSDP does, in place of keeping them. XLA joins both
        gathers on CPUs. With False, micro-batches share one gather.
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
    placement = check_placement(mesh, data_axis, param_specs, optimizer_specs)
    ranks = check_ranks(OP, data_axis, "data_axis")
    sharded = Sharded(
        placement, gather, regather=regather, feedback=options.get("feedback", True), fusion_mb=options.get("fusion_mb")
    )
    _check_functions(loss_fn, optimizer, compress)
    check_flag(OP, "has_aux", has_aux)
    check_flag(OP, "donate", donate)
    accumulate = check_integer(OP, "accumulate", accumulate, 1)
    _check_options(compress, options)
    extended = optax.with_extra_args_support(optimizer)
    transformation = sharded.transformation(compress, options)
    names, state = placement.names, ModelState(model_state, ranks)
    objective = make_objective(loss_fn, names, has_state=model_state is not None, has_aux=has_aux)
    find_frozen = lambda params: find_skipped(options.get("plan"), placement.shards(params))

    def local_step(skipped: Any, params: Any, model_state: Any, sent: Any, batch: Any, key: Any) -> tuple[Any, ...]:
        """The part of one rank: the mean of the gradients."""
        whole, loss_of_whole = sharded.open(params, objective, sharded.key(sent))
        trained, frozen = part(whole, skipped)
        loss_of_trained = lambda trained, given: loss_of_whole(join(trained, given.frozen), given)
        gradients = local_gradients(loss_of_trained, ranks, accumulate)
        own_state = state.of_rank(model_state)
        found = gradients(trained, Given(frozen, own_state, batch, key))
        # Rules of the plan are for all leaves. Nothing reads those that it skips.
        grads = join(found.gradients, frozen)
        given = None if placement.state else params  # slices of means take no weight decay
        grads, sent = placement.update_shards(transformation.update, grads, state=sent, params=given)
        loss, aux = agree((found.loss, found.aux), ranks, averaged=addable)
        new_state = state.of_all(model_state, own_state, found.model_state)
        return part(grads, skipped)[0], new_state, sent, Metrics(loss, aux, sent.telemetry)

    def update(grads: Any, rest: Any, params: Any, loss: Any) -> Any:
        return _update_with_value(extended.update, grads, rest, params, value=loss)

    def init(params: Any, model_state: Any = None) -> tuple[Any, ...]:
        state.check_given(model_state)
        params, model_state = jax.tree_util.tree_map(jnp.asarray, (params, model_state))
        sharded.check(params)
        specs, skipped = placement.specs_of(params), find_frozen(params)
        sending = sharded.freeze(skipped)
        trained, updated = (part(tree, skipped)[0] for tree in (params, sending.placement.specs_of_updates(params)))
        rest_specs = placement.specs_of_state(extended, trained, updated)

        def fresh(params: Any) -> tuple[Any, ...]:
            own = jax.tree_util.tree_map(jnp.copy, params)  # what is donated later must not be the caller's
            return own, extended.init(part(params, skipped)[0]), sending.init_lost(params)

        @functools.partial(jax.jit, out_shardings=(None, placement.shardings(state.spec), None))
        def make(params: Any, model_state: Any) -> tuple[Any, ...]:
            params, model_state = ranks.first((params, model_state))
            own, rest, lost = placement.by_partitioner(fresh, (specs, rest_specs, sending.lost_specs))(params)
            opt_state = placement.init_per_rank(transformation.init, params), rest, *lost
            return own, state.first(model_state, placement.ranks), opt_state

        params = jax.device_put(params, placement.shardings(specs))
        params, model_state, opt_state = make(params, put(model_state, placement.shardings(P())))
        return (params, opt_state) if state.mode is None else (params, model_state, opt_state)

    def over_mesh(local: Callable[..., Any], sent: Any, batch: Any, skipped: Any) -> tuple[Callable[..., Any], Any]:
        """The part of one rank as a function of all ranks of the mesh, and the batch where it wants it."""
        specs = state_specs(sent, data_axis)
        batch = jax.tree_util.tree_map(jnp.asarray, batch)
        batch_specs = jax.tree_util.tree_map(lambda x: P(names) if x.ndim else P(), batch)
        if AxisType.Explicit in mesh.axis_types:  # where shard_map moves nothing
            batch = jax.tree_util.tree_map(jax.sharding.reshard, batch, placement.shardings(batch_specs))
        params_in, grads_out = (cut.specs(names) if cut else P() for cut in (placement.params, placement.state))
        grads_out = part(grads_out, skipped)[0] if placement.state else P()
        of_ranks = jax.shard_map(
            local,
            mesh=mesh,
            axis_names=set(names),
            in_specs=(params_in, state.spec, specs, batch_specs, P()),
            out_specs=(grads_out, state.spec, specs, P()),
        )
        return of_ranks, batch

    def step_with_state(params: Any, model_state: Any, opt_state: Any, batch: Any, key: Any = None) -> tuple[Any, ...]:
        state.check_rows(model_state)
        sent, rest, *lost = opt_state  # lost: by the gather of updates
        noise, skipped = sharded.key(sent), find_frozen(params)
        of_ranks = functools.partial(local_step, skipped)
        if not isinstance(placement, Alone):
            of_ranks, batch = over_mesh(of_ranks, sent, batch=batch, skipped=skipped)
        grads, model_state, sent, metrics = of_ranks(params, model_state, sent, batch, key)
        # Outside of shard_map, where norms and other numbers of an optimizer are those of whole arrays.
        sending = sharded.freeze(skipped)
        trained, frozen = part(params, skipped)
        updated, _ = part(sending.placement.specs_of_updates(params), skipped)
        placed = updated, placement.specs_of_state(extended, trained, updated)
        updates, rest = placement.by_partitioner(update, placed)(grads, rest, trained, metrics.loss)
        updates, lost = sending.send_updates(updates, tuple(lost), noise)
        params = join(optax.apply_updates(trained, updates), frozen)
        return params, model_state, (sent, rest, *lost), metrics

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

    def __init__(self, jitted: Any, placement: Placement | Alone, place: int) -> None:
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
