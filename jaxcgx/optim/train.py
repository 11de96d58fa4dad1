"""make_train_step: data-parallel training done, for a loss, an optimizer and a mesh or an MPI communicator."""

import functools
import inspect
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax

from jaxcgx.checks import check_choice, check_flag, check_integer, wrong
from jaxcgx.codecs.raw import Raw
from jaxcgx.collectives.gradients import without_constraints
from jaxcgx.optim.alone import Alone
from jaxcgx.optim.compress import compress_gradients
from jaxcgx.optim.model_state import ModelState
from jaxcgx.optim.objective import make_objective
from jaxcgx.optim.placement import OP, Placement, check_placement
from jaxcgx.optim.priority import PriorityTraining
from jaxcgx.optim.require import import_optax
from jaxcgx.optim.settings import check_ranks
from jaxcgx.optim.sharded import Sharded
from jaxcgx.optim.training import Metrics, Training

if TYPE_CHECKING:
    import optax

SLICE = 50_000  # elements, as P3 has it
MESSAGE = 4  # MiB of a message that travels while the backward pass goes on (benchmarks/notes/collectives.md)


class TrainStep(NamedTuple):
    """The functions of a training loop. With `model_state`, a model state follows `params` everywhere."""

    # params -> (params, opt_state), where `step` wants them
    init: Callable[..., tuple[Any, ...]]
    # as jitted: (params, opt_state, batch, key=None) -> (params, opt_state, Metrics)
    step: "Step"

    @property
    def finish(self) -> Callable[..., tuple[Any, ...]]:
        """(params, opt_state) -> the same after the last step: with overlap="priority" it applies what is pending."""
        return self.step.finish


def make_train_step(
    loss_fn: Callable[..., Any],
    optimizer: "optax.GradientTransformation",
    mesh: Any = None,  # jax.sharding.Mesh has a decorator without types: for type checkers it is unknown
    *,
    data_axis: Any = "data",
    compress: Callable[..., Any] = compress_gradients,
    param_specs: Any = None,
    optimizer_specs: Any = None,
    batch_specs: Any = None,
    gather: Any = Raw(),
    regather: bool = True,
    model_state: str | None = None,
    accumulate: int = 1,
    overlap: str | None = None,
    slice_elements: int | None = None,
    has_aux: bool = False,
    weighted: bool = False,
    donate: bool = True,
    diloco: Any = None,
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
        Scalars of a batch, also single random keys, are the same on every rank and for every micro-batch, and so is
        what `batch_specs` doesn't split. Or an MPI communicator, or `jaxcgx.mpi.hierarchy()`. A batch is then that of
        the process, and `init` takes the parameters of the first rank.
      compress: what makes the transformation that exchanges gradients: `compress_gradients`, `dgc`, `bsc` or a
        `jaxcgx.wan.Differential`.
      param_specs: how parameters are sharded: a tree of PartitionSpecs like them. Over `data_axis` (ZeRO-3, FSDP):
        each rank has its shards of parameters, gradients and optimizer state. It gathers the parameters for the loss,
        and gradients go straight to their shards, with the codecs of `plan`. `shard_specs` makes such specs. Over other
        axes of the mesh, which XLA's partitioner gets: gradients are compressed shard by shard (docs/meshes.md); plans
        see shards.
      optimizer_specs: how the state of the optimizer is sharded, where not as the parameters: their specs, with
        `data_axis` besides (ZeRO-1). Each rank has whole parameters, and updates its shards. The updates are gathered.
      batch_specs: how a batch is split over `data_axis`, where not every array is along its first dimension: a
        PartitionSpec, or a tree of them like the batch, or like its upper part. P() is for arrays that every rank, and
        every micro-batch, has whole, such as the weights of classes. On Explicit meshes the types of arrays say it.
        Over MPI, any name says which dimension micro-batches split.
      gather: a codec, {axis: codec} or a Plan for what is gathered of shards: parameters, or updates. The shards of
        parameters lose nothing. What the gather of updates loses is kept in the state and sent later, except with
        feedback=False. Plans see shards.
      regather: gather parameters again for the backward pass, as FSDP does, in place of keeping them. XLA may
        join both gathers on CPUs. With False, micro-batches share one gather.
      model_state: for models with state beside the parameters, such as statistics of batches or random streams; any
        pytree of arrays. `loss_fn` is then called with (params, model_state, batch) and returns (loss, the new model
        state), or with `has_aux` (loss, (the new model state, aux)). `init` takes (params, model_state), and `init` and
        `step` take and return it after the parameters. "mean": all ranks have the same. Floating-point numbers are
        averaged over the ranks after each step, uncompressed. Others, such as counters, must not depend on the batch,
        except through jax.lax.psum. Random keys (`jax.random.key`) are folded with the rank before `loss_fn` gets them.
        "per_rank": each rank keeps its own. `init` and `step` return a `PerRank`, with a row for each rank.
      accumulate: the number of micro-batches that a rank's batch is split into. Their gradients are averaged in float32
        and sent once. The model state goes from one to the next.
      overlap: "backward": messages are made and sent in the order in which the backward pass ends their gradients, and
        over `Tcp` it goes on meanwhile. A message then has 4 MiB, unless `fusion_mb` says otherwise. Gradients of
        micro-batches, and of a loop over layers, all end together.
        "priority": the gradients of a step travel until the next step needs them, those of the first layers first (P3).
        A step applies the gradients of the step before, and finds new ones at the new parameters. So its results are
        those of the plain step before the last update, which `train.finish` does after the last step.
      slice_elements: with overlap="priority", the elements of a message's slice (50,000). Leaves share a message of up
        to that many, unless `fusion_mb` says otherwise.
      has_aux: whether `loss_fn` returns auxiliary outputs. Arrays that have the examples along a dimension are those of
        the whole batch. What doesn't depend on the batch stays as it is. Others are averaged.
      weighted: whether `loss_fn` returns (sum, weight) in place of a loss. The loss is the sum of all sums over the sum
        of all weights, of all ranks and micro-batches: a mean over tokens that are not masked. The weight must not
        depend on the parameters.
      donate: update parameters and state in place; those that `step` was given are gone.
      diloco: `jaxcgx.wan.diloco(optimizer, ...)`, or one of its forms: the ranks along the outermost of `data_axis` are
        centers, which train on their own and exchange outer gradients now and then. `plan` is then that of the exchange
        inside a center, over the other axes, Raw() by default. `step` returns the outer parameters and a
        `jaxcgx.wan.DilocoMetrics` (docs/diloco.md).
      **options: the options of `compress`, among them `plan` and `telemetry`. Parameters that the plan skips (`Skip`)
        are frozen. They are not differentiated, the optimizer doesn't see them, and they keep their bits.
    """
    optax = import_optax(OP)
    placement = check_placement(
        mesh, data_axis, param_specs=param_specs, optimizer_specs=optimizer_specs, batch_specs=batch_specs
    )
    ranks = check_ranks(OP, data_axis, "data_axis")
    if not (diloco is None or hasattr(diloco, "over")):
        raise wrong(OP, "diloco", "jaxcgx.wan.diloco(optimizer, ...)", repr(diloco), kind=TypeError)
    centers = None if diloco is None else diloco.over(placement, optimizer, data_axis)
    if centers is not None:
        placement, ranks, compress, options = centers.inside(compress, options)
    sharded = Sharded(
        placement, gather, regather=regather, feedback=options.get("feedback", True), fusion_mb=options.get("fusion_mb")
    )
    _check_functions(loss_fn, optimizer, compress)
    for name, flag in (("has_aux", has_aux), ("weighted", weighted), ("donate", donate)):
        check_flag(OP, name, flag)
    accumulate = check_integer(OP, "accumulate", accumulate, 1)
    _check_options(compress, options)
    if overlap is not None:
        check_choice(OP, "overlap", overlap, ("backward", "priority"))
    if overlap == "backward":
        options = {"fusion_mb": MESSAGE, **options}
    if overlap == "priority" and diloco is not None:
        remedy = "leave it out: what centers exchange travels while they go on training"
        raise wrong(OP, "overlap", "None or 'backward' with 'diloco'", repr(overlap), remedy)
    if overlap is not None and not _takes(compress, "fusion_mb"):
        name = getattr(compress, "__name__", repr(compress))
        expected = f"None with compress={name}, whose exchange has no messages"
        raise wrong(OP, "overlap", expected, repr(overlap), "leave it out")
    options |= _slices(overlap, slice_elements, options, placement)
    training = (PriorityTraining if overlap == "priority" else Training)(
        placement=placement,
        ranks=ranks,
        sharded=sharded,
        state=ModelState(model_state, ranks),
        optimizer=optax.with_extra_args_support(optimizer),
        transformation=sharded.transformation(compress, options),
        ordered=None if overlap is None else functools.partial(sharded.transformation, compress, options),
        objective=make_objective(loss_fn, has_state=model_state is not None, has_aux=has_aux, weighted=weighted),
        accumulate=accumulate,
        has_aux=has_aux,
        plan=options.get("plan"),
    )
    if centers is not None:
        return centers.train_step(training, donate)
    if model_state is not None:
        jit = functools.partial(jax.jit, donate_argnums=(0, 1, 2) if donate else ())
        return TrainStep(training.init, Step(jit(training.step), placement, place=3, finish=jit(training.finish)))

    def init(params: Any, model_state: Any = None) -> tuple[Any, Any]:
        params, _, opt_state = training.init(params, model_state)
        return params, opt_state

    def step(params: Any, opt_state: Any, batch: Any, key: Any = None) -> tuple[Any, Any, Metrics]:
        params, _, opt_state, metrics = training.step(params, None, opt_state=opt_state, batch=batch, key=key)
        return params, opt_state, metrics

    def finish(params: Any, opt_state: Any) -> tuple[Any, Any]:
        params, _, opt_state = training.finish(params, None, opt_state)
        return params, opt_state

    jit = functools.partial(jax.jit, donate_argnums=(0, 1) if donate else ())
    return TrainStep(init, Step(jit(step), placement, place=2, finish=jit(finish)))


class Step:
    """The jitted function `step` of a `TrainStep`, and what jit can't do.

    That is a check of batches, and a remedy for constraints, which JAX refuses when it compiles.

    Its other members are those of the jitted function.
    """

    def __init__(self, jitted: Any, placement: Placement | Alone, place: int, finish: Any = None) -> None:
        """place: the position of the batch among the arguments. finish: see `TrainStep`; None: nothing is pending."""
        self._jitted, self._placement, self._place = jitted, placement, place
        self._finish: Callable[..., tuple[Any, ...]] = finish or (lambda *state: state)

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        self._placement.check_batch(kwargs.get("batch", args[self._place] if len(args) > self._place else None))
        with without_constraints(OP, "loss_fn", self._placement.names):
            return self._jitted(*args, **kwargs)

    def finish(self, *state: Any) -> tuple[Any, ...]:
        """See `TrainStep`."""
        with warnings.catch_warnings():
            # Pending gradients are donated to be freed early. No result can take their place.
            warnings.filterwarnings("ignore", "Some donated buffers were not usable")
            return self._finish(*state)

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "_jitted"), name)  # which a copy lacks at first


def _check_functions(loss_fn: Any, optimizer: Any, compress: Any) -> None:
    if not callable(loss_fn):
        raise wrong(OP, "loss_fn", "a function", repr(loss_fn), kind=TypeError)
    if not (callable(getattr(optimizer, "init", None)) and callable(getattr(optimizer, "update", None))):
        raise wrong(OP, "optimizer", "an optax.GradientTransformation", repr(optimizer), kind=TypeError)
    if not callable(compress):
        expected = "jaxcgx.compress_gradients, jaxcgx.dgc or jaxcgx.bsc"
        raise wrong(OP, "compress", expected, repr(compress), kind=TypeError)


def _takes(function: Callable[..., Any], option: str) -> bool:
    parameters = inspect.signature(function).parameters
    return option in parameters or any(each.kind == each.VAR_KEYWORD for each in parameters.values())


def _slices(
    overlap: str | None, slice_elements: Any, options: dict[str, Any], placement: Placement | Alone
) -> dict[str, Any]:
    """The options of `compress` that slice messages."""
    if overlap != "priority":
        if slice_elements is not None:
            remedy = 'pass overlap="priority", or leave it out'
            raise wrong(OP, "slice_elements", f"None with overlap={overlap!r}", slice_elements, remedy)
        return {}
    if placement.mesh is None:
        remedy = "leave it out: exchanges over MPI wait for one another, and nothing runs beside them"
        raise wrong(OP, "overlap", "None between the processes of mpirun", repr(overlap), remedy)
    elements = check_integer(OP, "slice_elements", SLICE if slice_elements is None else slice_elements, 1)
    return {"fusion_mb": 4 * elements / 2**20, **options, "slice_elements": elements}


def _check_options(compress: Callable[..., Any], options: dict[str, Any]) -> None:
    if "axis_size" in options:
        expected, got = "none, as the mesh says how many ranks there are", repr(options["axis_size"])
        raise wrong(OP, "axis_size", expected, got, "leave it out", kind=TypeError)
    if compress is compress_gradients and "plan" not in options:
        expected, remedy = "a codec, {axis: codec} or a Plan", "pass plan=jaxcgx.MaxMin(4), or compress=jaxcgx.dgc"
        raise wrong(OP, "plan", expected, "nothing", remedy, kind=TypeError)
