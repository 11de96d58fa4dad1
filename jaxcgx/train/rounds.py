"""Rounds move parameters instead of gradients, once in many steps. The loop of the centers that train in between."""

import dataclasses
import functools
import json
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import PartitionSpec as P
from jax.stages import Compiled

from jaxcgx import _compat, _programs
from jaxcgx.checks import check_real, wrong
from jaxcgx.exchange.resolve import transport_over_axes
from jaxcgx.exchange.routes import Routes
from jaxcgx.plan import Plan
from jaxcgx.plan.plan import as_phases
from jaxcgx.train.batch import OP, dimensions
from jaxcgx.train.division import Division, OverMesh, addable, after, row, with_row, without_row
from jaxcgx.train.exchange import AnyExchange, At, check_centers
from jaxcgx.train.outputs import Outputs, fold_keys
from jaxcgx.train.sharded import ShardedMesh
from jaxcgx.train.state import ExchangeState, Metrics, PerRank, TrainState
from jaxcgx.train.step import Rank, Step, Training, TrainStep, as_arrays, check_train_state, put
from jaxcgx.train.update import Update, part
from jaxcgx.transports.axes import each_axis
from jaxcgx.transports.xla import Axes
from jaxcgx.typing import AxisName, Batch, Key, Params, PyTree


class Act(NamedTuple):
    """What is done in some steps: every `every` steps, from `first` on. Both count from 1."""

    name: str  # what is done, for `Rounds.act`
    part: int  # the number of the part of the parameters; -1: it needs no state
    first: int
    every: int

    def due(self, steps: Any) -> Any:
        """Returns whether it is done after this number of steps, a number or an array."""
        return (steps >= self.first) & ((steps - self.first) % self.every == 0)


# (the outer parameters, the center's own parameters, the state of the part) after an act
Acted = tuple[Params, Params, ExchangeState | None]


class Rounds(Protocol):
    """How centers that train on their own move common parameters: a frozen dataclass.

    Each center has own parameters. The outer parameters are the same in all centers. The places along the outermost
    axis of the ranks are the centers.

    Attributes:
      op: the name that errors have.
      plan: the plan of what centers exchange. Parameters that it skips are frozen.
      inside: the exchange of gradients between the ranks of a center.
      alone: whether each rank trains its own parameters, like a center with one rank.
      turns: what is done, in order. Of the acts of a turn, at most one is due at a time.
      last: the acts of `finish`. They end what has begun.
    """

    alone: ClassVar[bool]

    @property
    def op(self) -> str: ...
    @property
    def plan(self) -> Plan: ...
    @property
    def inside(self) -> AnyExchange: ...
    @property
    def turns(self) -> Sequence[Sequence[Act]]: ...
    @property
    def last(self) -> Sequence[Act]: ...

    def warn(self, axis: AxisName) -> None:
        """Warns if exchanges over these axes can't do what was asked for."""
        ...

    def settings(self, params: Params) -> dict[str, str]:
        """Returns the settings that all processes must share, {argument: text}, except what messages compare."""
        ...

    def init(self, params: Params, at: At) -> Sequence[ExchangeState]:
        """Returns the state of each part before the first step."""
        ...

    def specs(self, center: P, rank: P) -> ExchangeState:
        """Returns the specs of a part's state: those of arrays with rows per center or per rank, or P()."""
        ...

    def act(self, act: Act, outer: Params, own: Params, state: ExchangeState | None, at: At) -> Acted: ...

    def measured(self, states: Sequence[ExchangeState]) -> PyTree:
        """Returns the telemetry of the last rounds, or None."""
        ...


class RoundsState(NamedTuple):
    """The state of centers besides the outer parameters, the optimizer's states and the model states."""

    steps: jax.Array  # int32[]: the number of steps so far
    params: PerRank  # the own parameters of each center
    inside: PerRank  # the state of the exchange inside each center. Its arrays per rank have a row for each rank
    parts: tuple[ExchangeState, ...]  # the state of the rounds, for each part of the parameters


class CentersTelemetry(NamedTuple):
    inside: PyTree  # the Telemetry of the exchange inside a center. Its arrays have a row for each center
    outer: PyTree  # the telemetry of the last rounds, for each part of the parameters


class Ongoing(NamedTuple):
    """What the program of an act gets, and what becomes of it."""

    outer: PyTree  # the outer parameters
    steps: PyTree  # the number of steps, unchanged: the next step waits for it
    params: PyTree  # the own parameters of the centers, as rows
    parts: list[PyTree]  # the states of parts; None stands for no part


def train_rounds(rounds: Rounds, training: Training, axis: AxisName, donate: bool) -> TrainStep:
    """Returns the functions of a training loop with rounds, from the rooms of all ranks. Axes may be marked."""
    division = training.division
    _check(rounds, training)
    assert isinstance(division, OverMesh)
    rounds.warn(axis)
    axes = each_axis(axis)
    inner: AxisName = () if rounds.alone else axes[1:] if len(axes) != 2 else axes[-1]
    net = lambda: Axes(()) if inner == () else transport_over_axes(OP, inner)
    center, plan = Division(net, division.batch_specs, inner), training.exchange.plan
    if inner == () and not (isinstance(plan, Plan) and plan.raw and not plan.rules):
        why = "as the ranks of a center average parameters" if rounds.alone else "as a center has one rank"
        expected = f"jaxcgx.Raw(), {why} and exchange no gradients"
        raise wrong(rounds.op, "inside", expected, repr(rounds.inside), "leave it out")
    if inner == () and training.overlap is not None:
        expected = "None, as a center has one rank, which exchanges no gradients"
        raise wrong(OP, "overlap", expected, repr(training.overlap), "leave it out")
    training = dataclasses.replace(training, update=Update(training.update.optimizer, center))
    centers = CentersTraining(rounds, training, division, center, axis=axis)
    step = StepOfCenters(centers, donate)
    return TrainStep(centers.init, step, step.finish if rounds.last else lambda state: state)


def _check(rounds: Rounds, training: Training) -> None:
    division, op = training.division, rounds.op
    if not isinstance(division, OverMesh):
        raise wrong(OP, "mesh_or_comm", f"a mesh, whose outermost axis has the centers, with {op}", "a communicator")
    if isinstance(division, ShardedMesh):
        expected, remedy = f"parameters and state that every rank has whole with {op}", "leave out params and optimizer"
        raise wrong(OP, "sharding", expected, "shards", remedy)
    if division.others:
        other = sorted(division.others, key=str)[0]
        expected = f"one with no other axes than {division.names!r} with {op}, whose ranks have whole parameters"
        raise wrong(OP, "mesh_or_comm", expected, f"one with {other!r}", "name all axes in Sharding(axis)")
    if training.loss.has_aux:
        raise wrong(OP, "has_aux", f"False with {op}", True, "leave it out")
    if training.model_state.mode == "per_rank":
        raise wrong(OP, "model_state", f"'mean' with {op}", "'per_rank'", 'pass "mean": every center has its own')
    check_centers(op, *next(iter(division.sizes.items())))


@dataclasses.dataclass(frozen=True, eq=False)
class CentersTraining:
    """The centers of a mesh, which train on their own between acts.

    A rank computes like a process without a mesh: all axes of the ranks are manual, and each rank has whole parameters.
    """

    rounds: Rounds
    training: Training  # with the exchange and the update of a rank inside its center
    ranks: OverMesh
    center: Division  # the ranks of a center
    axis: AxisName

    @property
    def names(self) -> tuple[Any, ...]:
        """The axes of the centers. Their parameters have a row for each place along them."""
        return self.ranks.names if self.rounds.alone else self.ranks.names[:1]

    @property
    def rows(self) -> P:
        return P(self.names)

    @property
    def acts(self) -> list[Act]:
        return [act for turn in self.rounds.turns for act in turn]

    @property
    def parts(self) -> int:
        return 1 + max(act.part for act in self.acts)

    @property
    def part(self) -> ExchangeState:
        return self.rounds.specs(self.rows, self.ranks.rows)

    @property
    def specs(self) -> TrainState:
        rows, inside = self.rows, PerRank(ExchangeState(self.ranks.rows, self.rows))
        sent: PyTree = RoundsState
        return TrainState(P(), rows, rows, sent(P(), rows, inside, (self.part,) * self.parts))

    def at(self) -> At:
        return At(transport_over_axes(self.rounds.op, self.axis))

    def number(self) -> jax.Array:
        return jax.lax.axis_index(self.names)

    def skipped(self, params: Params) -> PyTree:
        return Routes.of(self.rounds.op, self.rounds.plan, params).skipped

    def init(self, params: Params, model_state: PyTree = None) -> TrainState:
        """Returns the state before the first step, placed as `step` needs it."""
        training, rounds = self.training, self.rounds
        training.model_state.check_given(model_state)
        params, model_state = as_arrays("params", params), as_arrays("model_state", model_state)
        skipped = self.skipped(params)
        self._check(params, skipped)

        def of_rank(params: Params, model_state: PyTree) -> TrainState:
            fold_in = lambda x: x if addable(x) else fold_keys(x, self.number())
            model_state = jax.tree.map(fold_in, model_state)
            opt_state, _ = training.update.init(params, skipped)
            states = [with_row(each) for each in rounds.init(params, self.at())]
            own, inside = PerRank(row(params)), PerRank(row(training.exchange.init(params)))
            sent = RoundsState(jnp.zeros((), jnp.int32), own, inside, tuple(states))
            model = PerRank(row(model_state)) if training.model_state.mode else None
            return TrainState(params, model, PerRank(row(opt_state)), sent)

        make = self.ranks.over(of_rank, P(), self.specs)
        replicated = self.ranks.shardings(P())
        return jax.jit(make)(*put((params, model_state), replicated))

    def step(self, state: TrainState, batch: Batch, key: Key | None = None) -> tuple[TrainState, Metrics]:
        """A step of all centers, with all acts in conditionals."""
        self.check(state)
        inner, loss, telemetry = self.train(inside(state), batch, key)

        def acts(given: Ongoing) -> Ongoing:
            for turn in self.rounds.turns:
                which = sum(jnp.where(act.due(given.steps), 1 + i, 0) for i, act in enumerate(turn))
                branches = [lambda same: same, *(functools.partial(self._of_rank, act, act.part) for act in turn)]
                given = jax.lax.switch(which, branches, given)
            return given

        specs = Ongoing(P(), P(), self.rows, [*(self.part,) * self.parts, None])
        state = joined(inner, self.ranks.over(acts, (specs,), specs)(ongoing(state, inner)))
        return state, self.metrics(state, loss, telemetry)

    def finish(self, state: TrainState) -> TrainState:
        """Ends exchanges that have begun, and applies their results."""
        self.check(state)
        inner = inside(state)
        return joined(inner, self.do(self.act, self.rounds.last, ongoing(state, inner)))

    def do(self, program: Callable[[Act, Ongoing], Ongoing], acts: Sequence[Act], given: Ongoing) -> Ongoing:
        """Does acts one after another. Each has a program, which gets the state of one part alone."""
        parts = list(given.parts)
        for act in acts:
            given = program(act, given._replace(parts=[parts[act.part]]))
            (parts[act.part],) = given.parts
        return given._replace(parts=parts)

    def train(self, given: TrainState, batch: Batch, key: Key | None) -> tuple[TrainState, jax.Array, PyTree]:
        """Returns (the state before any act, losses of centers, telemetry). Only acts change what `given` lacks."""
        training, rows, specs = self.training, self.rows, inside(self.specs)
        batch, of_batch, _ = self.ranks.place(batch, training.accumulate)

        def of_rank(given: TrainState, batch: Batch, key: Key | None) -> tuple[TrainState, jax.Array, PyTree]:
            sent, state = given.exchange, given.exchange.inside.rows
            params, shared, opt_state = without_row((sent.params.rows, state.shared, given.opt_state.rows))
            model_state = None if given.model_state is None else without_row(given.model_state.rows)
            skipped, center, number = self.skipped(params), self.center, self.number()
            gradient = training.gradient(center, skipped, dimensions(of_batch), Outputs(OP, None, P()))
            rank = Rank(center, training.exchange, skipped, training.overlap, number=(number,))
            keys = None if key is None else jax.random.fold_in(key, number), None
            means, state, model_state, loss, _ = rank.step(
                gradient, params, model_state, sent=ExchangeState(state.own, shared), batch=batch, keys=keys
            )
            params, opt_state = self._updated(params, opt_state, means, loss)
            telemetry = row(getattr(state.shared, "telemetry", None))
            state = ExchangeState(state.own, row(state.shared))
            # The mean of the losses is an exchange, too. Ranks that begin both in other orders would wait for one
            # another.
            sent = RoundsState(after(loss, sent.steps + 1), PerRank(row(params)), PerRank(state), ())
            model = None if given.model_state is None else PerRank(row(model_state))
            return TrainState(None, model, PerRank(row(opt_state)), sent), row(loss), telemetry

        return self.ranks.over(of_rank, (specs, of_batch, P()), (specs, rows, rows))(given, batch, key)

    def act(self, act: Act, given: Ongoing) -> Ongoing:
        specs = Ongoing(P(), P(), self.rows, [None if act.part < 0 else self.part])
        return self.ranks.over(functools.partial(self._of_rank, act, 0), (specs,), specs)(given)

    def _of_rank(self, act: Act, place: int, given: Ongoing) -> Ongoing:
        parts, state = list(given.parts), given.parts[place]
        state = state and ExchangeState(without_row(state.own), state.shared)
        outer, own, state = self.rounds.act(act, given.outer, without_row(given.params), state=state, at=self.at())
        parts[place] = state and with_row(state)
        return Ongoing(outer, given.steps, row(own), parts)

    def _updated(self, params: Params, opt_state: PyTree, means: PyTree, loss: jax.Array) -> tuple[Params, PyTree]:
        """Returns (parameters, the optimizer's state) after an update.

        It runs with a leading axis: if a reshape is fused into the update, XLA doesn't write in place. An optimizer
        that vmap would change runs without.
        """
        skipped = self.skipped(params)

        def update(params: Params, opt_state: PyTree, means: PyTree, loss: jax.Array) -> tuple[Params, PyTree]:
            state = self.training.update(TrainState(params, None, opt_state, None), means, loss, skipped, key=None)
            return state.params, state.opt_state

        given = params, opt_state, means, loss
        if not _programs.same_in_vmap(jax.make_jaxpr(update)(*given)):
            return update(*given)
        return without_row(jax.vmap(update)(*row(given)))

    def metrics(self, state: TrainState, loss: jax.Array, telemetry: PyTree) -> Metrics:
        outer = self.rounds.measured(state.exchange.parts)
        return Metrics(loss, None, None if telemetry is None and outer is None else CentersTelemetry(telemetry, outer))

    def check(self, state: Any) -> None:
        check_train_state(state)
        found = len(state.exchange.parts) if isinstance(state.exchange, RoundsState) else 0
        if found != self.parts:
            expected = f"the state of {self.parts} fragments of {self.rounds.op}"
            got = found or f"one with {type(state.exchange).__name__}"
            raise wrong("train.step", "state", expected, got, f"pass fragments={found}" * (found > 0))

    def placed(self, state: TrainState) -> TrainState:
        return put(state, self.ranks.shardings(self.specs))

    def _check(self, params: Params, skipped: PyTree) -> None:
        """Checks that parameters can be trained, that both plans freeze the same ones, and that processes agree."""
        op, mesh = self.rounds.op, self.ranks.mesh
        check_real(op, "params", params)
        self.training.check_trained(params, part(params, skipped))
        plan = self.training.exchange.plan
        if self.center.names and plan is not None:
            first = as_phases(op, plan, "inside")[0].plan  # all plans of a schedule skip the same
            inside = Routes.of(op, first, params, argument="inside").skipped
            for (path, one), two in zip(jax.tree.leaves_with_path(skipped), jax.tree.leaves(inside)):
                if one != two:
                    expected = "a plan that skips the same parameters as that inside a center"
                    remedy = "give both plans the same rules with jaxcgx.Skip()"
                    raise wrong(op, "plan", expected, "another", remedy, path=path)
        several = len({device.process_index for device in mesh.devices.flat}) > 1
        # While JAX traces, nothing can be compared.
        if several and not any(isinstance(x, Tracer) for x in jax.tree.leaves(params)):
            check_same(op, self.rounds.settings(params), mesh)


class StepOfCenters(Step):
    """The function `step` of the `TrainStep` of centers.

    A call from Python runs a program without acts, and then a program for each act that is due: Python knows the number
    of steps. In a traced call (jax.jit, lax.scan), the step has the acts in conditionals. XLA copies what a branch
    returns unchanged, so every step would copy the parameters and the states of the rounds.
    """

    def __init__(self, centers: CentersTraining, donate: bool) -> None:
        super().__init__(centers.step, centers.ranks, donate)
        given = lambda *numbers: numbers if donate else ()
        self._centers, self._donate = centers, donate
        self._train = jax.jit(centers.train, donate_argnums=given(0))
        self._act = jax.jit(centers.act, static_argnums=0, donate_argnums=given(1))
        self.finish: Callable[[TrainState], TrainState] = jax.jit(centers.finish, donate_argnums=given(0))
        self._last: tuple[list[Any], int] = [], 0  # what the last call returned, and the number of its steps
        self._known: set[Any] = set()  # the kinds of states for which the programs of acts have been compiled

    def __call__(self, state: TrainState, batch: Batch, key: Key | None = None) -> tuple[TrainState, Metrics]:
        centers = self._centers
        centers.check(state)
        if not _compat.is_eager():
            return super().__call__(state, batch, key)
        last, number = self._last
        now = self._arrays(state)
        if list(map(id, now)) != list(map(id, last)):
            number, state = self._begin(state)
        with self.checked(batch):
            inner, loss, telemetry = self._train(inside(state), batch, key)
        due = [act for act in centers.acts if act.due(number + 1)]
        state = joined(inner, centers.do(self._act, due, ongoing(state, inner)))
        self._last = self._arrays(state), number + 1
        metrics = centers.metrics(state, loss, telemetry)
        if self._donate:  # the state's own arrays may be donated to a later step
            metrics = metrics._replace(telemetry=jax.tree.map(jnp.copy, metrics.telemetry))
        return state, metrics

    def clear_cache(self) -> None:
        programs: Any = super(), self._train, self._act, self.finish
        for program in programs:
            program.clear_cache()
        self._known.clear()

    def _arrays(self, state: TrainState) -> list[Any]:
        return [state.exchange.steps, *jax.tree.leaves(state.params)]

    def _begin(self, state: TrainState) -> tuple[int, TrainState]:
        """Prepares a call with a state that the last call didn't return. Returns (the number of its steps, the state).

        Arrays are placed, because a step returns those that no act changes as they are. All programs are compiled,
        because compiling an exchange over a Tcp connects its processes: without this they would wait for one another in
        the first exchange.
        """
        state = self._centers.placed(state)
        leaves, tree = jax.tree.flatten(state)
        kind = tree, *((x.shape, x.dtype, x.sharding) for x in leaves)
        if kind not in self._known:
            self.acts(state)
            self._known.add(kind)
        return int(state.exchange.steps.addressable_data(0)), state

    def programs(self, state: TrainState, batch: Batch, key: Key | None = None) -> list[Compiled]:
        state = self._centers.placed(state)
        return [self._train.lower(inside(state), batch, key).compile(), *self.acts(state)]

    def acts(self, state: TrainState) -> list[Compiled]:
        """Returns the compiled programs of all acts. JAX keeps them for the calls that follow."""
        given = ongoing(state, inside(state))
        each = lambda act: self._act.lower(act, given._replace(parts=[given.parts[act.part]])).compile()
        return [each(act) for act in self._centers.acts]


def inside(state: TrainState) -> TrainState:
    return state.replace(params=None, exchange=state.exchange._replace(parts=()))


def ongoing(state: TrainState, inner: TrainState) -> Ongoing:
    """Returns what acts get: the state before the step, and what `train` made of it."""
    sent = inner.exchange
    return Ongoing(state.params, sent.steps, sent.params.rows, [*state.exchange.parts, None])


def joined(inner: TrainState, given: Ongoing) -> TrainState:
    *parts, _ = given.parts
    sent = inner.exchange._replace(steps=given.steps, params=PerRank(given.params), parts=tuple(parts))
    return inner.replace(params=given.outer, exchange=sent)


BYTES = 1024  # of the settings of a process, as JSON
LONGEST = 64  # characters of a setting


def check_same(function: str, settings: dict[str, str], mesh: jax.sharding.Mesh) -> None:
    """Checks that all processes of a mesh, which call it together, have the same settings, {argument: text}."""
    text = json.dumps({name: value[:LONGEST] for name, value in settings.items()}).encode()
    own = np.frombuffer(text.ljust(BYTES), np.uint8)[None]
    rows = jax.sharding.NamedSharding(mesh, P(mesh.axis_names))
    given = jax.make_array_from_callback((mesh.size, BYTES), rows, lambda _: own)
    gathered = jax.jit(lambda x: x, out_shardings=jax.sharding.NamedSharding(mesh, P()))(given)
    here = json.loads(text)
    for device, text in zip(mesh.devices.flat, np.asarray(gathered.addressable_data(0))):
        there = json.loads(text.tobytes())
        for name in here | there:
            mine, other = here.get(name, "none"), there.get(name, "none")
            if mine != other:
                got = f"{mine} in this process and {other} in process {device.process_index}"
                remedy = f"pass the same arguments to {function} in every process"
                raise wrong(function, name, "the same value in all processes", got, remedy)
