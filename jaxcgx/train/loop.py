"""make_train_step: the loop's room. jit, donation, and the order of the other rooms."""

import dataclasses
import functools
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jax.stages import Compiled

from jaxcgx.checks import check_array, check_flag, check_integer, spell_array, warn, wrong
from jaxcgx.collectives.gradients import without_constraints
from jaxcgx.exchange.carry import Carry
from jaxcgx.exchange.keys import fold
from jaxcgx.exchange.routes import Routes
from jaxcgx.plan.leaves import spell_path
from jaxcgx.plan.phases import check_phases
from jaxcgx.train.batch import dimensions
from jaxcgx.train.cut import OP
from jaxcgx.train.division import Division, addable
from jaxcgx.train.exchange import Exchange, as_exchange
from jaxcgx.train.frozen import part
from jaxcgx.train.gradient import Gradient, Loss, Parts
from jaxcgx.train.mesh import OverMesh, check_mesh
from jaxcgx.train.model_state import ModelState
from jaxcgx.train.outputs import Outputs
from jaxcgx.train.rank import Rank
from jaxcgx.train.require import import_optax
from jaxcgx.train.sharded import ShardedMesh, check_gather
from jaxcgx.train.state import ExchangeState, Metrics, Pending, Priority, Sharding, TrainState
from jaxcgx.train.update import Update
from jaxcgx.transports.axes import is_communicator
from jaxcgx.typing import Batch, Key, Params, PyTree, Specs

if TYPE_CHECKING:
    import optax

GATHERED = 1  # the number that is folded into the key of a step, for the noise of gathers


class TrainStep(NamedTuple):
    """The functions of a training loop.

    Attributes:
      init: a function (params, model_state=None) -> TrainState, placed as `step` needs it.
      step: a jitted function (state, batch, key=None) -> (TrainState, Metrics): a `Step`.
      finish: a function (state) -> TrainState, to be called after the last step. With `Priority`, it applies the
        pending gradients. Otherwise it changes nothing.
    """

    init: Callable[..., TrainState]
    step: "Step"
    finish: Callable[[TrainState], TrainState]


def make_train_step(
    loss_fn: Callable[..., Any],
    optimizer: "optax.GradientTransformation",
    mesh_or_comm: Any,  # jax.sharding.Mesh has a decorator without types: for type checkers it is unknown
    exchange: Any,
    *,
    sharding: Sharding = Sharding(),
    accumulate: int = 1,
    overlap: str | Priority | None = None,
    model_state: str | None = None,
    has_aux: bool = False,
    aux_specs: Specs = None,
    weighted: bool = False,
    donate: bool = True,
) -> TrainStep:
    """Makes the functions of data-parallel training with compressed gradients: a TrainStep.

        train = cgx.make_train_step(loss_fn, optax.adam(1e-3), mesh, cgx.MaxMin(4))
        state = train.init(params)
        for batch in batches:
            state, metrics = train.step(state, batch)

    Between the processes of mpirun, pass a communicator in place of a mesh (docs/mpi.md):

        train = cgx.make_train_step(loss_fn, optax.adam(1e-3), MPI.COMM_WORLD, cgx.MaxMin(4))

    Args:
      loss_fn: a function (params, batch) that returns the loss of its part of the batch or, with `has_aux`, (the loss,
        a pytree of arrays). If you pass a random key to `step`, a new one in every step, `loss_fn` is called with
        (params, batch, key). The key differs for every rank and micro-batch.
      optimizer: an optax.GradientTransformation. If it takes `value`, it gets the mean loss.
      mesh_or_comm: a jax.sharding.Mesh; or an MPI communicator, or `jaxcgx.mpi.hierarchy()`. A batch is then the batch
        of the process, and `init` takes the parameters of the first rank.
      exchange: how gradients are exchanged. A codec, {axis: codec} or a Plan, or a schedule of these, {first step:
        plan}, keeps the errors of compression and sends them later: a `Feedback`. Others are `Momentum`, `DGC`, `BSC`,
        `MPQ`, `wan.Differential` and `wan.MixedSync`. Rounds (`wan.Diloco`, `wan.HFA`) exchange parameters in
        place of gradients. Parameters that the plan skips (`Skip`) are frozen. They are not differentiated, the
        optimizer doesn't see them, and they keep their bits.
      sharding: how batches, parameters and the optimizer's state are divided over the mesh: a `Sharding`. Scalars of a
        batch, including single random keys, are the same on every rank and for every micro-batch.
      accumulate: the number of micro-batches into which a rank's part of the batch is split. Their gradients are
        averaged in float32 and sent once. The model state is passed from one micro-batch to the next.
      overlap: "backward": messages are made and sent in the order in which their gradients are ready in the backward
        pass. Over `Tcp`, the backward pass continues during the exchange. A message then has up to 4 MiB, unless the
        plan's `fusion_mb` says otherwise. With micro-batches, or a loop over layers, all gradients are ready at the
        same time. Or a `Priority`: the gradients of a step travel until the next step needs them.
      model_state: for models with state besides the parameters, such as statistics of batches or random streams; any
        pytree of arrays. `loss_fn` is then called with (params, model_state, batch) and returns (loss, the new model
        state) or, with `has_aux`, (loss, (the new model state, aux)). `init` takes (params, model_state).
        "mean": all ranks have the same state. Floating-point numbers that the loss renews are averaged over the ranks
        after each step, uncompressed. Other numbers, such as counters, are those of the first rank: let `jax.lax.psum`
        add up those that depend on the batch. Random keys (`jax.random.key`) are folded with the rank before `loss_fn`
        gets them.
        "per_rank": each rank keeps its own state. `TrainState.model_state` is a `PerRank`, with a row for each rank.
      has_aux: whether `loss_fn` returns auxiliary outputs. Arrays with the examples along their first dimension are
        joined: `metrics.aux` has those of the whole batch. Other floating-point outputs are averaged. Random keys are
        those of the first rank's last micro-batch. `aux_specs` says what all other outputs are.
      aux_specs: what becomes of auxiliary outputs, a tree like them or a prefix of it: "mean", "sum", "first" (of the
        first rank's last micro-batch), or a PartitionSpec with the axis of the ranks at the dimension of the examples.
        None: as `has_aux` says.
      weighted: whether `loss_fn` returns (sum, weight) in place of a loss. The loss is then the sum of all sums divided
        by the sum of all weights, over all ranks and micro-batches. An example is a mean over tokens that are not
        masked. The weight must not depend on the parameters.
      donate: whether the state is updated in place. `step` and `finish` then invalidate the state that they got.
    """
    optax = import_optax(OP)
    _check_functions(loss_fn, optimizer)
    for name, flag in (("has_aux", has_aux), ("weighted", weighted), ("donate", donate)):
        check_flag(OP, name, flag)
    if aux_specs is not None and not has_aux:
        raise wrong(OP, "aux_specs", "None without has_aux", repr(aux_specs), "pass has_aux=True")
    rounds = exchange if is_rounds(exchange) else None
    exchange = as_exchange(exchange if rounds is None else rounds.inside)
    division = _divide(mesh_or_comm, sharding, exchange)
    _check_overlap(overlap, mesh_or_comm, exchange, rounds)
    training = Training(
        division=division,
        loss=Loss(OP, loss_fn, model_state is not None, has_aux, weighted),
        exchange=exchange,
        update=Update(optax.with_extra_args_support(optimizer), division),
        model_state=ModelState(model_state),
        accumulate=check_integer(OP, "accumulate", accumulate, 1),
        overlap=overlap,
        aux_specs=aux_specs,
    )
    if rounds is not None:
        from jaxcgx.train.rounds import train_rounds  # it is made of the rooms of this module

        return train_rounds(rounds, training, sharding.axis, donate)
    jit = functools.partial(jax.jit, donate_argnums=0 if donate else ())
    finish = jit(training.finish)

    def finished(state: TrainState) -> TrainState:
        with warnings.catch_warnings():
            # Pending gradients are donated only to free them early. No result can reuse their memory.
            warnings.filterwarnings("ignore", "Some donated buffers were not usable")
            return finish(state)

    return TrainStep(training.init, Step(jit(training.step), division), finished)


class Step:
    """The function `step` of a `TrainStep`: a jitted function, with checks that jit can't do.

    It checks batches. If JAX refuses a sharding constraint in the loss when it compiles, the error says what to write.
    All other attributes are attributes of the jitted function.
    """

    def __init__(self, jitted: Any, division: Division) -> None:
        self._jitted, self._division = jitted, division

    def __call__(self, state: TrainState, batch: Batch, key: Key | None = None) -> tuple[TrainState, Metrics]:
        with self.checked(batch):
            return self._jitted(state, batch, key)

    def checked(self, batch: Batch) -> AbstractContextManager[None]:
        """Checks a batch, and returns the context of a call with it."""
        self._division.check_batch(batch)
        return without_constraints(OP, "loss_fn", self._division.names)

    def programs(self, state: TrainState, batch: Batch, key: Key | None = None) -> list[Compiled]:
        """Returns the compiled programs that calls with such arguments run. JAX keeps them for these calls.

        There is one, except with Rounds: the step of a center, followed by a program for each exchange.
        """
        return [self._jitted.lower(state, batch, key).compile()]

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "_jitted"), name)  # a new copy has no `_jitted` yet


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Training:
    """The rooms of a step: division, gradient, exchange, update. `make_train_step` explains the other fields."""

    division: Division
    loss: Loss
    exchange: Exchange
    update: Update
    model_state: ModelState
    accumulate: int
    overlap: str | Priority | None
    aux_specs: Specs

    def init(self, params: Params, model_state: PyTree = None) -> TrainState:
        """Returns the state before the first step, placed as `step` needs it."""
        division = self.division
        self.model_state.check_given(model_state)
        params, model_state = as_arrays("params", params), as_arrays("model_state", model_state)
        division.check(params)
        skipped = self._skipped(params)
        self.check_trained(params, part(params, skipped)[0])
        _, of_optimizer = self.update.specs(params, skipped)
        placed = division.specs_of(params), of_optimizer, division.specs_of_lost(skipped)

        def fresh(params: Params) -> tuple[PyTree, ...]:
            own = jax.tree_util.tree_map(jnp.copy, params)  # `step` must not donate the caller's arrays
            return own, *self.update.init(params, skipped)

        def make(params: Params, model_state: PyTree) -> tuple[PyTree, ...]:
            params, model_state = division.first((params, model_state))
            own, opt_state, lost = division.by_partitioner(fresh, placed)(params)
            sent = division.init_exchange(self.exchange.init, params)
            return own, self.model_state.first(model_state, division.numbers()), opt_state, sent, lost

        spec = self.model_state.spec(division.rows)
        make = jax.jit(make, out_shardings=(None, division.shardings(spec), None, None, None))
        params = jax.device_put(params, division.shardings(placed[0]))
        *found, lost = make(params, put(model_state, division.shardings(P())))
        return TrainState(*found, pending=None, lost=lost)

    def step(self, state: TrainState, batch: Batch, key: Key | None = None) -> tuple[TrainState, Metrics]:
        """A step of all ranks: gradient, exchange, update. With `Priority`, the update comes first."""
        division, late = self.division, isinstance(self.overlap, Priority)
        self._check_state(state)
        if late:
            state = self.finish(state)
        elif state.pending is not None:
            expected, got = "a state whose gradients have arrived", "one whose gradients are on their way (Priority)"
            raise wrong("train.step", "state", expected, got, "call finish(state) of the train step that sent them")
        skipped, noise, rows = self._skipped(state.params), self._noise(state), division.rows
        batch, specs = division.place(batch, self.accumulate)
        outputs = Outputs(OP, self.aux_specs, rows, guessed=division.guesses(self.accumulate))
        parts = Parts(self.accumulate, dimensions(specs))
        early = self.exchange.early and division.crosses and self.overlap is None
        gradient = Gradient(division, self.loss, self.model_state, skipped, parts, outputs, early)
        rank = Rank(division, self.exchange, skipped, self.overlap)
        model, sent = self.model_state.spec(rows), ExchangeState(rows, P())
        found, sent, model_state, loss, aux = division.over(
            functools.partial(rank.step, gradient),
            in_specs=(division.params_specs, model, sent, specs, P()),
            out_specs=(rows if late else division.specs_of_means(skipped), sent, model, P(), outputs.out_specs),
        )(state.params, state.model_state, state.exchange, batch, (key, noise))
        # With Priority, the telemetry is that of the exchange before.
        telemetry = getattr((state.exchange if late else sent).shared, "telemetry", None)
        metrics = Metrics(loss, outputs.tree(aux), telemetry)
        state = state.replace(model_state=model_state, exchange=sent)
        if late:
            return state.replace(pending=Pending(*found, loss, rank.order)), metrics
        return self.update(state, found, loss, skipped, noise), metrics

    def finish(self, state: TrainState) -> TrainState:
        """Applies the gradients that are pending. Without, it changes nothing."""
        self._check_state(state)
        if state.pending is None:
            return state
        division, pending, skipped = self.division, state.pending, self._skipped(state.params)
        # The parameters that the loss uses first have gradients that are ready last.
        rank = Rank(division, self.exchange, skipped, self.overlap, pending.order[::-1])
        sent, noise = ExchangeState(division.rows, P()), self._noise(state)
        means, sent = division.over(
            rank.receive,
            in_specs=(Pending(division.rows, division.rows, P(), pending.order), sent, division.params_specs),
            out_specs=(division.specs_of_means(skipped), sent),
        )(pending, state.exchange, state.params)
        state = state.replace(exchange=sent, pending=None)
        return self.update(state, means, pending.loss, skipped, noise)

    def _skipped(self, params: Params) -> PyTree:
        """Returns for each parameter whether it is frozen. All plans of a schedule skip the same parameters."""
        shards = self.division.shards(params)
        if self.exchange.plan is None:  # it makes its own plan, which skips nothing
            return jax.tree_util.tree_map(lambda _: False, shards)
        return Routes.of(OP, check_phases(OP, self.exchange.plan)[0].plan, shards).skipped

    def _noise(self, state: TrainState) -> Key | None:
        """Returns the key of a step's gathers, or None."""
        if not self.division.noisy:
            return None
        shared = state.exchange.shared
        return fold(shared.key, shared.count, GATHERED)

    def _check_state(self, state: TrainState) -> None:
        if not isinstance(state, TrainState):  # pyright: ignore[reportUnnecessaryIsInstance]
            expected, got = "the TrainState that train.init or the step before returned", f"a {type(state).__name__}"
            raise wrong("train.step", "state", expected, got, "write train.step(state, batch)", kind=TypeError)
        self.model_state.check_rows(state.model_state, self.division.size, self.division.remedy)

    def check_trained(self, params: Params, trained: Params) -> None:
        """Checks that parameters can be trained, and that the optimizer doesn't compress gradients itself."""
        for path, x in jax.tree_util.tree_leaves_with_path(trained):
            if not jnp.issubdtype(x.dtype, jnp.inexact):
                rule = f'rules=[("{spell_path(path)}", jaxcgx.Skip())]'
                remedy = f"freeze it: pass jaxcgx.Plan(codec, {rule})"
                expected = "parameters of floating point where they are trained"
                raise wrong("train.init", "params", expected, spell_array(x), remedy, path=path)
        axes = [(name, self.division.mesh.shape[name]) for name in self.division.names]
        _, state = jax.make_jaxpr(self.update.optimizer.init, axis_env=axes, return_shape=True)(trained)
        if nodes(state, ExchangeState):
            expected, got = "an optimizer without compression", "one that exchanges gradients itself"
            raise wrong(OP, "optimizer", expected, got, "pass the plain one, such as optax.adam(1e-3)")
        moved = jax.eval_shape(self.exchange.init, self.division.shards(params))
        if nodes(state, import_optax(OP).TraceState) and any(x.momentum is not None for x in nodes(moved, Carry)):
            expected = "none with momentum of its own, because gradients already have momentum"
            warn(str(wrong(OP, "optimizer", expected, "optax.trace", "write optax.sgd(rate)")))


def nodes(tree: PyTree, kind: type) -> list[Any]:
    """Returns the nodes of this class in a tree."""
    is_node = lambda x: isinstance(x, kind)
    return [x for x in jax.tree_util.tree_leaves(tree, is_leaf=is_node) if is_node(x)]


def as_arrays(argument: str, tree: PyTree) -> PyTree:
    """Returns a tree of parameters or of a model's state, an argument of `init`, as JAX arrays."""
    remedy = "leave it out; in Equinox, params, static = eqx.partition(model, eqx.is_inexact_array)"
    check = functools.partial(check_array, "train.init", argument, remedy=remedy)
    return jax.tree_util.tree_map_with_path(lambda path, x: check(x, path), tree)


def put(state: PyTree, sharding: Any) -> PyTree:
    """Returns the state on all devices.

    jax.device_put can't put random keys on devices of other processes. So their words are put there.
    """
    words = jax.tree_util.tree_map(lambda x: x if addable(x) else jax.random.key_data(x), state)
    wrap = lambda x, key: x if addable(key) else jax.random.wrap_key_data(x, impl=jax.random.key_impl(key))
    return jax.tree_util.tree_map(wrap, jax.device_put(words, sharding), state)


def _divide(mesh_or_comm: Any, sharding: Sharding, exchange: Exchange) -> Division:
    """Returns the ranks of a mesh or of a communicator."""
    if not isinstance(sharding, Sharding):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise wrong(OP, "sharding", "a jaxcgx.Sharding", repr(sharding), kind=TypeError)
    check_gather(sharding)
    if is_communicator(mesh_or_comm):
        from jaxcgx.train.processes import Processes  # this import starts MPI, which is optional

        return Processes(mesh_or_comm, sharding)
    check_mesh(mesh_or_comm, sharding)
    if sharding.params is sharding.optimizer is None:
        return OverMesh(mesh_or_comm, sharding.axis, sharding.batch)
    division = ShardedMesh(mesh_or_comm, sharding, keep=getattr(exchange, "keep", True))
    if division.dims and not exchange.scatters:
        expected = f"a plan or a Feedback, where gradients are sharded over {sharding.axis!r}"
        remedy = "pass one, such as jaxcgx.TopK(0.01), or leave parameters and optimizer state whole"
        raise wrong(OP, "exchange", expected, type(exchange).__name__, remedy)
    return division


def _check_functions(loss_fn: Any, optimizer: Any) -> None:
    if not callable(loss_fn):
        raise wrong(OP, "loss_fn", "a function", repr(loss_fn), kind=TypeError)
    if not (callable(getattr(optimizer, "init", None)) and callable(getattr(optimizer, "update", None))):
        raise wrong(OP, "optimizer", "an optax.GradientTransformation", repr(optimizer), kind=TypeError)


def is_rounds(exchange: Any) -> bool:
    """Returns whether this is Rounds, which exchange parameters in place of gradients."""
    return callable(getattr(exchange, "act", None)) and not isinstance(exchange, type)


def _check_overlap(overlap: Any, mesh_or_comm: Any, exchange: Exchange, rounds: Any) -> None:
    if overlap is None:
        return
    if not (isinstance(overlap, Priority) or overlap == "backward"):
        raise wrong(OP, "overlap", 'None, "backward" or a jaxcgx.Priority', repr(overlap))
    if rounds is not None and isinstance(overlap, Priority):
        expected = f"None or 'backward' with {type(rounds).__name__}"
        remedy = "leave it out: what centers exchange travels while they go on training"
        raise wrong(OP, "overlap", expected, repr(overlap), remedy)
    if is_communicator(mesh_or_comm):
        remedy = "leave it out: exchanges over MPI wait for one another, and nothing runs beside them"
        raise wrong(OP, "overlap", "None between the processes of mpirun", repr(overlap), remedy)
    if exchange.plan is None:
        expected = f"None with {type(exchange).__name__}, whose exchange has no messages"
        raise wrong(OP, "overlap", expected, repr(overlap), "leave it out")
