"""The centers of a mesh: the placement of their parameters and states, and a training step of all centers."""

import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer
from jax.sharding import PartitionSpec as P

from jaxcgx.checks import wrong
from jaxcgx.codecs.raw import Raw
from jaxcgx.exchange.keys import fold
from jaxcgx.optim.accumulation import addable
from jaxcgx.optim.alone import Alone
from jaxcgx.optim.compress import compress_gradients
from jaxcgx.optim.halves import after
from jaxcgx.optim.leaves import check_real, flatten
from jaxcgx.optim.model_state import PerRank, put
from jaxcgx.optim.model_state import fold as fold_keys
from jaxcgx.optim.nesting import has_rows
from jaxcgx.optim.placement import Placement
from jaxcgx.optim.ranks import MeshRanks, Ranks
from jaxcgx.optim.require import import_optax
from jaxcgx.optim.state import CompressState
from jaxcgx.optim.train import TrainStep
from jaxcgx.optim.training import Training, as_arrays
from jaxcgx.transports.axes import crosses
from jaxcgx.transports.xla import Axes
from jaxcgx.typing import AxisName
from jaxcgx.wan.agreement import check_same
from jaxcgx.wan.fragments import Fragment, cut
from jaxcgx.wan.rounds import Both, Exchange, Rounds
from jaxcgx.wan.turns import CentersStep, Ongoing

OP = "make_train_step"


def check_centers(function: str, ranks: Ranks) -> None:
    """Checks that the outermost axis has several ranks, because the public function `function` needs several."""
    try:
        net = ranks.net()
    except NameError:
        return  # an `init` outside of shard_map; the first step is traced inside
    name, outer = next(iter(net.parts.items()), ("", net))
    check_several(function, f"centers along {name!r}" if name else "processes", outer.size)


def check_several(function: str, what: str, count: int) -> None:
    """Checks that there is more than one center. `count` is their number, and `what` describes them in the error."""
    if count == 1:
        remedy = f"leave {function} out, or make a mesh of several centers"
        raise wrong(function, "axis_name", f"several {what}", "one", remedy)


class Center(NamedTuple):
    """The state that each center has for itself. In `DilocoState`, arrays have a leading axis of the centers.

    Attributes:
      params: the parameters of the center.
      start: the parameters at the beginning of the round; None without eager updates.
      inner: the state of the inner optimizer.
      sent: the state of the exchange inside the center. Its arrays have a second axis, of the center's ranks.
    """

    params: Any
    start: Any
    inner: Any
    sent: Any


class DilocoState(NamedTuple):
    """The state of training with `diloco`.

    Attributes:
      count: int32[]: the number of steps until now.
      centers: a Center with a row for each center.
      exchanges: the state of the exchange of each fragment.
    """

    count: Any
    centers: PerRank
    exchanges: tuple[Exchange, ...]


class DilocoMetrics(NamedTuple):
    """The metrics that a step reports.

    Attributes:
      loss: [centers]: the loss of each center. Their mean would need an exchange in every step.
      telemetry: the Telemetry of the exchange inside a center. Its arrays have a leading axis of the centers.
      outer: for each fragment, the OuterTelemetry of its last round; None without telemetry.
    """

    loss: Any
    telemetry: Any
    outer: Any


@dataclasses.dataclass(frozen=True)
class RankOfCenter(Alone):
    """The placement of a rank of a center, whose arrays are rows: they have a leading axis of 1."""

    def in_place(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Computes with the axis: if a reshape is fused into the function, XLA doesn't write in place.

        A function that vmap would change computes without the axis.
        """

        def computed(*args: Any) -> Any:
            if not _is_same_in_vmap(jax.make_jaxpr(function)(*args)):
                return function(*args)
            return _without_axis(jax.vmap(function)(*_row(args)))

        return computed


def _is_same_in_vmap(program: Any) -> bool:
    """Returns whether vmap leaves what a program does as it is.

    It runs both branches of a conditional, and refuses or repeats calls of functions that aren't JAX's.
    """
    program = getattr(program, "jaxpr", program)  # newer versions of JAX have only one class of jaxprs
    values = [
        value for eqn in program.eqns for each in eqn.params.values() for value in jax.tree_util.tree_leaves(each)
    ]
    inner = [value for value in values if hasattr(getattr(value, "jaxpr", value), "eqns")]
    changed = any(re.search("cond|while|callback|ffi_call", eqn.primitive.name) for eqn in program.eqns)
    return not (program.effects or changed) and all(map(_is_same_in_vmap, inner))


class One(MeshRanks):
    """The rank of a center that has a single rank. `jaxcgx.optim.ranks.Ranks` documents the members."""

    def net(self) -> Axes:
        return Axes(())

    def pmean(self, x: Any) -> Any:
        return x

    def value_and_grad(self, objective: Callable[..., Any]) -> Callable[..., Any]:
        return jax.value_and_grad(objective, has_aux=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Centers:
    """The centers of a mesh.

    A rank computes like a process without a mesh: all axes of the ranks are manual, and each rank has whole parameters.
    """

    diloco: Any
    placement: Placement
    axis: Any  # of the exchange between centers: their axis, then the axes of a center's ranks; some may be marked

    @property
    def name(self) -> Any:
        return self.placement.names[0]

    @property
    def inner(self) -> tuple[Any, ...]:
        """The axes of a center's ranks."""
        return self.placement.names[1:]

    @property
    def why_none(self) -> str:
        """Why there is no exchange of gradients, if `inner` has no axes."""
        return "a center has one rank, which exchanges nothing"

    def inside(self, compress: Callable[..., Any], options: dict[str, Any]) -> tuple[Any, ...]:
        """Returns (placement, ranks, compress, options), the parts of a step inside a center.

        `compress` makes the transformation that exchanges gradients inside the center, with `options`.
        """
        if not self.inner:
            if compress is not compress_gradients:
                options = {"compress": compress, **options}
            alone = RankOfCenter(self.name, self.placement.batch_specs)
            return alone, One(OP, self.name), self._no_exchange, {"plan": None, **options}
        axis = self.axis[1:] if len(self.axis) > 2 else self.axis[1]
        raw = {"plan": Raw()} if compress is compress_gradients else {}
        return RankOfCenter(axis, self.placement.batch_specs), MeshRanks(OP, axis), compress, {**raw, **options}

    def _no_exchange(self, axis_name: AxisName, **options: Any) -> Any:
        """Makes the transformation of a rank that exchanges no gradients. They are already their mean."""
        if given := [name for name, value in options.items() if value is not None]:
            (name, *_), form = given, self.diloco.function
            remedy = f"give it to jaxcgx.wan.{form}, for the exchange between centers (or leave {name} out)"
            got = getattr(options[name], "__name__", repr(options[name]))
            raise wrong(OP, name, f"none, as {self.why_none}", got, "leave it out" if name == "compress" else remedy)

        def init(params: Any) -> CompressState:
            # The structure is that of centers with several ranks that exchange raw gradients, for checkpoints.
            nothing = jax.tree_util.tree_map(lambda _: None, params)
            return CompressState(count=None, key=None, residuals=nothing, momentum=None, telemetry=None)

        return import_optax(OP).GradientTransformation(init, lambda grads, state, params=None: (grads, state))

    def train_step(self, training: Training, donate: bool) -> TrainStep:
        """Returns the functions of a training loop."""
        if training.has_aux or training.state.mode == "per_rank":
            name, got = ("has_aux", True) if training.has_aux else ("model_state", "'per_rank'")
            remedy = "leave it out" if training.has_aux else 'pass "mean": every center has its own'
            raise wrong(OP, name, f"{False if training.has_aux else 'mean'!r} with diloco", got, remedy)
        if training.plan is None:
            training = dataclasses.replace(training, plan=self.diloco.plan)
        if training.state.mode is not None:
            jitted = jax.jit(functools.partial(self._step, training), donate_argnums=(0, 1, 2) if donate else ())
            step_of_centers = CentersStep(jitted, self, training, donate, place=3)
            return TrainStep(functools.partial(self._init, training), step_of_centers)

        def init(params: Any, model_state: Any = None) -> tuple[Any, DilocoState]:
            params, _, opt_state = self._init(training, params, model_state)
            return params, opt_state

        def step(params: Any, opt_state: Any, batch: Any, key: Any = None) -> tuple[Any, ...]:
            params, _, opt_state, metrics = self._step(
                training, params, None, opt_state=opt_state, batch=batch, key=key
            )
            return params, opt_state, metrics

        jitted = jax.jit(step, donate_argnums=(0, 1) if donate else ())
        return TrainStep(init, CentersStep(jitted, self, training, donate, place=2))

    @property
    def _specs(self) -> DilocoState:
        rows = P(self.name)
        sent = CompressState(P(), P(), residuals=rows, momentum=rows, telemetry=P(), trace=P(), factors=P())
        waiting = P(self.placement.names) if self._later and crosses(self.axis) else P()
        return DilocoState(
            count=P(),
            centers=PerRank(Center(params=rows, start=rows, inner=rows, sent=P(self.name, self.inner))),
            exchanges=(Exchange(sent=sent, outer=P(), waiting=waiting, before=P(), telemetry=P()),)
            * self.diloco.fragments,
        )

    def _over_ranks(self, function: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
        return self.placement.over_ranks(function, in_specs=in_specs, out_specs=out_specs, check_vma=False)

    def _init(self, training: Training, params: Any, model_state: Any = None) -> tuple[Any, ...]:
        """Returns (outer parameters, model states, optimizer state) before the first step.

        The model states are a PerRank with a row for each center.
        """
        training.state.check_given(model_state)
        params, model_state = as_arrays("params", params), as_arrays("model_state", model_state)
        self._check(training, params)
        self._compare(training, params)

        def of_rank(params: Any, model_state: Any) -> tuple[Any, ...]:
            center = lax.axis_index(self.name)
            model_state = jax.tree_util.tree_map(lambda x: x if addable(x) else fold_keys(x, center), model_state)
            outer, model_state, (sent, inner) = training.init(params, model_state)
            fragments, rounds = self._cut(training, outer), self._rounds(outer)
            exchanges = [rounds.init(fragment.take(outer), p) for p, fragment in enumerate(fragments)]
            own = Center(outer, outer if self.diloco.eager else None, inner=inner, sent=sent)
            state = DilocoState(jnp.zeros((), jnp.int32), PerRank(_rows(own)), tuple(exchanges))
            return outer, PerRank(_row(model_state)), state

        make = self._over_ranks(of_rank, in_specs=P(), out_specs=(P(), P(self.name), self._specs))
        replicated = self.placement.shardings(P())
        return jax.jit(make)(jax.device_put(params, replicated), put(model_state, replicated))

    def _step(
        self, training: Training, params: Any, model_state: Any, opt_state: Any, batch: Any, key: Any = None
    ) -> tuple[Any, ...]:
        """Returns (outer parameters, model states, optimizer state, metrics) after a step of all ranks."""
        self.check(opt_state)
        count, centers, model_state, metrics = self.train(
            training, opt_state.count, opt_state.centers, model_state, batch=batch, key=key
        )
        rows, specs = P(self.name), self._specs

        def exchange(params: Any, own: Any, start: Any, count: Any, exchanges: tuple[Exchange, ...]) -> tuple[Any, ...]:
            both = Both(params, *_without_axis((own, start)))
            both, exchanges = self._exchange(training, count, both, exchanges)
            return both.outer, *_row((both.own, both.start)), exchanges

        mapped = self._over_ranks(
            exchange, in_specs=(P(), rows, rows, P(), specs.exchanges), out_specs=(P(), rows, rows, specs.exchanges)
        )
        center = centers.rows
        params, own, start, exchanges = mapped(params, center.params, center.start, count, opt_state.exchanges)
        state = DilocoState(count, PerRank(center._replace(params=own, start=start)), exchanges)
        return params, model_state, state, self.measured(metrics, exchanges)

    def check(self, opt_state: Any) -> None:
        """Checks the state that a step gets."""
        if not isinstance(opt_state, DilocoState):
            got = type(opt_state).__name__
            raise wrong("train.step", "opt_state", "a DilocoState, which init or the step before returned", got)
        if (got := len(opt_state.exchanges)) != self.diloco.fragments:
            expected = f"the state of {self.diloco.fragments} fragments, as many as {self.diloco.function} got"
            raise wrong("train.step", "opt_state", expected, got, f"pass fragments={got}")

    def placed(self, params: Any, opt_state: DilocoState) -> tuple[Any, DilocoState]:
        """Returns parameters and a state where a step leaves them."""
        return put((params, opt_state), self.placement.shardings((P(), self._specs)))

    def measured(self, metrics: DilocoMetrics, exchanges: tuple[Exchange, ...]) -> DilocoMetrics:
        """Returns the metrics of a step with the telemetry of the exchanges, if there is any."""
        return metrics._replace(outer=tuple(each.telemetry for each in exchanges) if self.diloco.telemetry else None)

    def train(
        self, training: Training, count: Any, centers: PerRank, model_state: Any, batch: Any, key: Any
    ) -> tuple[Any, ...]:
        """Returns (count, centers, model states, metrics) after a step inside the centers, before any exchange."""
        batch, batch_specs = self.placement.place_batch(batch, training.accumulate)
        rows = P(self.name)
        mapped = self._over_ranks(
            functools.partial(self._train_rank, training),
            in_specs=(P(), self._specs.centers, rows, batch_specs, P()),
            out_specs=(P(), self._specs.centers, rows, DilocoMetrics(loss=rows, telemetry=rows, outer=P())),
        )
        return mapped(count, centers, PerRank(None) if model_state is None else model_state, batch, key)

    def _train_rank(
        self, training: Training, count: Any, centers: PerRank, model_states: PerRank, batch: Any, key: Any
    ) -> tuple[Any, ...]:
        if key is not None:
            key = jax.random.fold_in(key, lax.axis_index(self.name))
        center, model_state = _of_rank(centers.rows), _without_axis(model_states.rows)
        # Centers draw independent noise. Their keys in the state are equal, so that there may be any number of centers.
        sent = _map_keys(lambda key: fold(key, lax.axis_index(self.name)), center.sent)
        own, model_state, (sent, inner), found = training.step(
            center.params, model_state, opt_state=(sent, center.inner), batch=batch, key=key
        )
        sent = _map_keys(lambda _, key: key, sent, center.sent)
        # The mean of the losses is an exchange, too. Ranks that begin both in other orders would wait for one another.
        count = after(found.loss, count + 1)
        renewed = PerRank(_rows(Center(own, center.start, inner=inner, sent=sent)))
        loss, telemetry = _row((found.loss, found.telemetry))
        return count, renewed, PerRank(_row(model_state)), DilocoMetrics(loss, telemetry, outer=None)

    @property
    def _turns(self) -> tuple[tuple[Callable[..., Any], int], ...]:
        """What is done with a fragment that has its turn, in order: (a method of Rounds, after how many steps)."""
        if self.diloco.eager:
            return ((Rounds.eager, 0),)
        return ((Rounds.end, self.diloco.overlap), (Rounds.begin, 0)) if self.diloco.overlap else ((Rounds.at_once, 0),)

    def _due(self, count: Any, delay: int) -> tuple[Any, Any]:
        """Returns (whether a fragment had its turn `delay` steps ago, which fragment)."""
        steps, period = count - delay, self.diloco.period
        return (steps >= period) & (steps % period == 0), steps // period % self.diloco.fragments

    def all_acts(self) -> list[tuple[Callable[..., Any], int]]:
        """Returns everything that is done in some step."""
        return [(act, p) for act, _ in self._turns for p in range(self.diloco.fragments)]

    def acts(self, count: int) -> list[tuple[Callable[..., Any], int]]:
        """Returns what is done after `count` steps, in order: (a method of Rounds, the fragment)."""
        found = [(act, *self._due(count, delay)) for act, delay in self._turns]
        return [(act, p) for act, due, p in found if due]

    def act(self, training: Training, act: Callable[..., Any], p: int, given: Ongoing) -> Ongoing:
        """Does one of `acts`, in all centers."""
        rows = P(self.name)

        def of_rank(given: Ongoing) -> Ongoing:
            both = Both(given.params, *_without_axis(given.center))
            both, exchange = self._act(training, act, p, both, exchange=given.exchange, count=given.count)
            return Ongoing(both.outer, given.count, _row((both.own, both.start)), exchange)

        specs = Ongoing(params=P(), count=P(), center=rows, exchange=self._specs.exchanges[0])
        return self._over_ranks(of_rank, in_specs=(specs,), out_specs=specs)(given)

    def _act(
        self, training: Training, act: Callable[..., Any], p: int, both: Both, *, exchange: Exchange, count: Any
    ) -> tuple[Both, Exchange]:
        first = {"first": count <= self.diloco.every} if act is Rounds.eager else {}
        return act(self._rounds(both.outer), self._cut(training, both.outer)[p], both, exchange, **first)

    def _exchange(self, training: Training, count: Any, both: Both, exchanges: tuple[Exchange, ...]) -> Any:
        """Returns the parameters and the states of the exchanges after `count` steps, which is traced."""
        for act, delay in self._turns:

            def on(
                p: int, both: Both, exchanges: tuple[Exchange, ...], act: Callable[..., Any] = act
            ) -> tuple[Both, tuple[Exchange, ...]]:
                both, done = self._act(training, act, p, both, exchange=exchanges[p], count=count)
                return both, (*exchanges[:p], done, *exchanges[p + 1 :])

            due, p = self._due(count, delay)
            branches = [lambda *same: same, *(functools.partial(on, p) for p in range(self.diloco.fragments))]
            both, exchanges = lax.switch(jnp.where(due, 1 + p, 0), branches, both, exchanges)
        return both, exchanges

    @property
    def _later(self) -> bool:
        """Whether an exchange ends in a later step than it begins."""
        return self.diloco.eager or self.diloco.overlap > 0

    def _rounds(self, params: Any) -> Rounds:
        given = self.diloco
        return Rounds(
            function=given.function,
            between=given.between(self.axis, params),
            outer=given.outer,
            later=self._later,
            alpha=given.alpha,
            decay=given.decay,
            telemetry=given.telemetry,
        )

    def _cut(self, training: Training, params: Any) -> tuple[Fragment, ...]:
        return cut(self.diloco.function, params, training.skipped(params), self.diloco.fragments)

    def _compare(self, training: Training, params: Any) -> None:
        """Checks that all processes of the mesh have the same settings. While JAX traces, nothing can be compared."""
        mesh = self.placement.mesh
        several = len({device.process_index for device in mesh.devices.flat}) > 1
        if several and not any(isinstance(x, Tracer) for x in jax.tree_util.tree_leaves(params)):
            fragments = [jax.eval_shape(each.take, params) for each in self._cut(training, params)]
            check_same(self.diloco.function, self.diloco.shared(fragments), mesh)

    def _check(self, training: Training, params: Any) -> None:
        """Checks that each rule of the plan holds for a parameter, and that both plans freeze the same parameters."""
        op, found, plan = self.diloco.function, flatten(params), self.diloco.plan
        check_real(op, "params", params)
        plan.assign(op, "plan", paths=found.paths, leaves=found.values)
        each = (plan.skipped(op, "plan", params), training.skipped(params))
        for path, outer, inner in zip(found.paths, *map(jax.tree_util.tree_leaves, each)):
            if outer != inner:
                expected = "a plan that skips the same parameters as that inside a center"
                remedy = "give both plans the same rules with jaxcgx.Skip()"
                raise wrong(op, "plan", expected, "another", remedy, path=path)


def _row(tree: Any) -> Any:
    """Adds a leading axis of size one to all arrays: this center's row of the arrays of all centers."""
    return jax.tree_util.tree_map(lambda x: x[None], tree)


def _without_axis(tree: Any) -> Any:
    """Removes the leading axis of all arrays: the inverse of `_row`."""
    return jax.tree_util.tree_map(lambda x: x[0], tree)


def _map_keys(function: Callable[..., Any], sent: Any, *others: Any) -> Any:
    """Returns a state of an exchange with new keys of noise: function(key, the keys of other states of its form)."""
    has_key = lambda x: has_rows(x) and hasattr(x, "key")

    def of_state(*states: Any) -> Any:
        first = states[0]
        return first._replace(key=function(*(x.key for x in states))) if has_key(first) else first

    return jax.tree_util.tree_map(of_state, sent, *others, is_leaf=has_key)


def _rows(center: Center) -> Center:
    """Adds the leading axes to a rank's Center: the axis of the centers, and in `sent` that of the ranks too."""
    found = _row(center)
    return found._replace(sent=_row(found.sent))


def _of_rank(rows: Center) -> Center:
    """Removes the leading axes: the inverse of `_rows`."""
    found = _without_axis(rows)
    return found._replace(sent=_without_axis(found.sent))
