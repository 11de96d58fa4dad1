"""make_train_step: makes a data-parallel training step from a loss, an optimizer and a mesh or an MPI communicator."""

import functools
import inspect
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
from jax.sharding import Mesh
from jax.stages import Compiled

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
from jaxcgx.optim.settings import check_ranks, not_over_mpi
from jaxcgx.optim.sharded import Sharded
from jaxcgx.optim.training import Metrics, Training
from jaxcgx.transports.axes import axis_names, is_communicator

if TYPE_CHECKING:
    import optax

SLICE = 50_000  # elements of a slice, as in P3's paper
MESSAGE = 4  # MiB of a message that is sent during the backward pass (benchmarks/notes/collectives.md)


class TrainStep(NamedTuple):
    """The functions of a training loop. With `model_state`, they take and return a model state after `params`.

    Attributes:
      init: a function (params) -> (params, opt_state), placed as `step` needs them.
      step: a jitted function (params, opt_state, batch, key=None) -> (params, opt_state, Metrics): a `Step`.
    """

    init: Callable[..., tuple[Any, ...]]
    step: "Step"

    @property
    def finish(self) -> Callable[..., tuple[Any, ...]]:
        """A function (params, opt_state) -> (params, opt_state), to be called after the last step.

        With overlap="priority", it applies the pending gradients. Otherwise it changes nothing.
        """
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
    """Makes the functions of data-parallel training with compressed gradients: a TrainStep.

        train = cgx.make_train_step(loss_fn, optax.adam(1e-3), mesh, plan=cgx.MaxMin(4))
        params, opt_state = train.init(params)
        for batch in batches:
            params, opt_state, metrics = train.step(params, opt_state, batch)

    Between the processes of mpirun, pass a communicator in place of a mesh (docs/mpi.md):

        train = cgx.make_train_step(loss_fn, optax.adam(1e-3), data_axis=MPI.COMM_WORLD, plan=cgx.MaxMin(4))

    Args:
      loss_fn: a function (params, batch) that returns the loss of its part of the batch or, with `has_aux`, (the loss,
        a pytree of arrays). If you pass a random key to `step`, a new one in every step, `loss_fn` is called with
        (params, batch, key). The key differs for every rank and micro-batch.
      optimizer: an optax.GradientTransformation. If it takes `value`, it gets the mean loss.
      mesh: a jax.sharding.Mesh. With a communicator as `data_axis`, leave it out.
      data_axis: the axis of the mesh, or a tuple of axes, over which the first dimension of a batch's leaves is split.
        Scalars of a batch, including single random keys, are the same on every rank and for every micro-batch, and so
        are arrays that `batch_specs` doesn't split. Or an MPI communicator, or `jaxcgx.mpi.hierarchy()`. A batch is
        then the batch of the process, and `init` takes the parameters of the first rank.
      compress: the function that makes the transformation that exchanges gradients: `compress_gradients`, `dgc`, `bsc`
        or a `jaxcgx.wan.Differential`.
      param_specs: the sharding of the parameters: a tree of PartitionSpecs like the parameters. Over `data_axis`
        (ZeRO-3, FSDP), each rank has its shards of parameters, gradients and optimizer state. It gathers the parameters
        for the loss. Gradients go straight to the owners of their shards, with the codecs of `plan`. `shard_specs`
        makes such specs. The other axes of the mesh are left to XLA's partitioner. Over these axes, gradients are
        compressed shard by shard (docs/meshes.md), and the rules of plans apply to shards.
      optimizer_specs: the sharding of the optimizer's state, if it differs from the sharding of the parameters: the
        specs of the parameters with `data_axis` added (ZeRO-1). Each rank has whole parameters, and computes the
        updates of its shards. The updates are gathered.
      batch_specs: the sharding of a batch over `data_axis`, if not every array is split along its first dimension: a
        PartitionSpec, or a tree of them like the batch or a prefix of it. With P(), an array is whole on every rank and
        for every micro-batch, such as the weights of classes. On Explicit meshes, the types of arrays have their
        sharding. Over MPI, any axis name marks the dimension that is split into micro-batches.
      gather: a codec, {axis: codec} or a Plan for the gather of parameters or of updates. The shards of parameters are
        never rounded. The errors of gathered updates are kept in the state and sent later, except with feedback=False.
        The rules of plans apply to shards.
      regather: whether to gather parameters again for the backward pass, as FSDP does, instead of keeping them. On
        CPUs, XLA may merge both gathers. With False, all micro-batches use the same gathered parameters.
      model_state: for models with state besides the parameters, such as statistics of batches or random streams; any
        pytree of arrays. `loss_fn` is then called with (params, model_state, batch) and returns (loss, the new model
        state) or, with `has_aux`, (loss, (the new model state, aux)). `init` takes (params, model_state). `init` and
        `step` take and return the model state after the parameters.
        "mean": all ranks have the same state. Floating-point numbers are averaged over the ranks after each step,
        uncompressed. Other numbers, such as counters, must not depend on the batch, except through jax.lax.psum. Random
        keys (`jax.random.key`) are folded with the rank before `loss_fn` gets them.
        "per_rank": each rank keeps its own state. `init` and `step` return a `PerRank`, with a row for each rank.
      accumulate: the number of micro-batches into which a rank's part of the batch is split. Their gradients are
        averaged in float32 and sent once. The model state is passed from one micro-batch to the next.
      overlap: "backward": messages are made and sent in the order in which their gradients are ready in the backward
        pass. Over `Tcp`, the backward pass continues during the exchange. A message then has up to 4 MiB, unless
        `fusion_mb` says otherwise. With micro-batches, or a loop over layers, all gradients are ready at the same time.
        "priority": the gradients of a step travel until the next step needs them, the gradients of the first layers
        first (P3). A step applies the gradients of the step before, and computes new gradients at the new parameters.
        So the parameters that it returns lack the last update. After the last step, `train.finish` applies it.
      slice_elements: with overlap="priority", the number of elements in a slice of a message (50,000). Leaves share
        messages of up to this number of elements, unless `fusion_mb` says otherwise.
      has_aux: whether `loss_fn` returns auxiliary outputs. Arrays with the examples along a dimension are returned for
        the whole batch. Outputs that don't depend on the batch are returned unchanged. Other outputs are averaged.
      weighted: whether `loss_fn` returns (sum, weight) in place of a loss. The loss is then the sum of all sums divided
        by the sum of all weights, over all ranks and micro-batches. An example is a mean over tokens that are not
        masked. The weight must not depend on the parameters.
      donate: whether parameters and state are updated in place. `step` then invalidates the arrays that it was given.
      diloco: `jaxcgx.wan.diloco(optimizer, ...)`, or one of its forms. The places along the outermost axis of
        `data_axis` are centers, which train on their own and exchange outer gradients once in many steps. `plan` is
        then the plan of the exchange inside a center, over the other axes, Raw() by default. `step` returns the outer
        parameters and a `jaxcgx.wan.DilocoMetrics` (docs/diloco.md).
      **options: the options of `compress`, including `plan` and `telemetry`. Parameters that the plan skips (`Skip`)
        are frozen. They are not differentiated, the optimizer doesn't see them, and they keep their bits.
    """
    optax = import_optax(OP)
    _check_functions(loss_fn, optimizer, compress)
    if diloco is not None:
        _check_axes(mesh, data_axis)
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
    if overlap is not None and centers is not None and not centers.inner:
        raise wrong(OP, "overlap", f"None, as {centers.why_none}", repr(overlap), "leave it out")
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
    """The function `step` of a `TrainStep`: a jitted function, with checks that jit can't do.

    It checks batches. If JAX refuses a sharding constraint in the loss when it compiles, the error says what to write.
    All other attributes are attributes of the jitted function.
    """

    def __init__(self, jitted: Any, placement: Placement | Alone, place: int, finish: Any = None) -> None:
        """Wraps a jitted function.

        Args:
          jitted: the jitted function.
          placement: the placement of the step.
          place: the position of the batch among the arguments.
          finish: the jitted function behind `TrainStep.finish`. None: nothing is ever pending.
        """
        self._jitted, self._placement, self._place = jitted, placement, place
        self._finish: Callable[..., tuple[Any, ...]] = finish or (lambda *state: state)

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        with self.checked(kwargs.get("batch", args[self._place] if len(args) > self._place else None)):
            return self._jitted(*args, **kwargs)

    def checked(self, batch: Any) -> AbstractContextManager[None]:
        """Checks a batch, and returns the context of a call with it."""
        self._placement.check_batch(batch)
        return without_constraints(OP, "loss_fn", self._placement.names)

    def programs(self, *args: Any, **kwargs: Any) -> list[Compiled]:
        """Returns the compiled programs that calls with such arguments run. JAX keeps them for these calls.

        There is one, except with `diloco` and `hfa`: the step of a center, followed by a program for each exchange.
        """
        return [self._jitted.lower(*args, **kwargs).compile()]

    def finish(self, *state: Any) -> tuple[Any, ...]:
        """Applies the pending gradients of the state, as `TrainStep.finish`."""
        with warnings.catch_warnings():
            # Pending gradients are donated only to free them early. No result can reuse their memory.
            warnings.filterwarnings("ignore", "Some donated buffers were not usable")
            return self._finish(*state)

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "_jitted"), name)  # a new copy has no `_jitted` yet


def _check_axes(mesh: Any, data_axis: Any) -> None:
    """Refuses a mesh with further axes for `diloco`, because its ranks have whole parameters."""
    if not isinstance(mesh, Mesh) or is_communicator(data_axis):
        return  # check_placement raises the error
    if others := [name for name, size in mesh.shape.items() if size > 1 and name not in axis_names(data_axis)]:
        expected = (
            f"one with no other axes than data_axis={data_axis!r} with 'diloco', whose ranks have whole parameters"
        )
        remedy = f"make a mesh without {others[0]!r}, or add it to data_axis as an axis of a center's ranks"
        raise wrong(OP, "mesh", expected, f"one with {others[0]!r}", remedy)


def _check_functions(loss_fn: Any, optimizer: Any, compress: Any) -> None:
    if not callable(loss_fn):
        raise wrong(OP, "loss_fn", "a function", repr(loss_fn), kind=TypeError)
    if not (callable(getattr(optimizer, "init", None)) and callable(getattr(optimizer, "update", None))):
        raise wrong(OP, "optimizer", "an optax.GradientTransformation", repr(optimizer), kind=TypeError)
    form = getattr(compress, "function", None) if hasattr(compress, "over") else None
    if inspect.isfunction(compress) and next(iter(inspect.signature(compress).parameters), "") == "inner":
        form = compress.__name__  # `diloco` and its forms take the inner optimizer first
    if form is not None:
        expected = "a function that makes an exchange of gradients, such as jaxcgx.dgc"
        remedy = f"pass diloco=jaxcgx.wan.{form}(optimizer, ...)"
        raise wrong(OP, "compress", expected, f"jaxcgx.wan.{form}", remedy, kind=TypeError)
    if not callable(compress):
        expected = "jaxcgx.compress_gradients, jaxcgx.dgc or jaxcgx.bsc"
        raise wrong(OP, "compress", expected, repr(compress), kind=TypeError)


def _takes(function: Callable[..., Any], option: str) -> bool:
    parameters = inspect.signature(function).parameters
    return option in parameters or any(each.kind == each.VAR_KEYWORD for each in parameters.values())


def _slices(
    overlap: str | None, slice_elements: Any, options: dict[str, Any], placement: Placement | Alone
) -> dict[str, Any]:
    """Returns the options of `compress` that slice messages."""
    if overlap is not None and placement.mesh is None:
        raise not_over_mpi(OP, "overlap", overlap)
    if overlap != "priority":
        if slice_elements is not None:
            remedy = 'pass overlap="priority", or leave it out'
            raise wrong(OP, "slice_elements", f"None with overlap={overlap!r}", slice_elements, remedy)
        return {}
    elements = check_integer(OP, "slice_elements", SLICE if slice_elements is None else slice_elements, 1)
    return {"fusion_mb": 4 * elements / 2**20, **options, "slice_elements": elements}


def _check_options(compress: Callable[..., Any], options: dict[str, Any]) -> None:
    if "axis_size" in options:
        expected, got = "none, as the mesh says how many ranks there are", repr(options["axis_size"])
        raise wrong(OP, "axis_size", expected, got, "leave it out", kind=TypeError)
    if compress is compress_gradients and "plan" not in options:
        expected, remedy = "a codec, {axis: codec} or a Plan", "pass plan=jaxcgx.MaxMin(4), or compress=jaxcgx.dgc"
        raise wrong(OP, "plan", expected, "nothing", remedy, kind=TypeError)
    if compress is compress_gradients and (unknown := [name for name in options if not _takes(compress, name)]):
        known = ", ".join(compress_gradients.__kwdefaults__ or {})
        expected = f"an option of make_train_step or of compress_gradients ({known})"
        remedy = "options of jaxcgx.dgc need compress=jaxcgx.dgc, and those of jaxcgx.bsc need compress=jaxcgx.bsc"
        raise wrong(OP, unknown[0], expected, repr(options[unknown[0]]), remedy, kind=TypeError)
