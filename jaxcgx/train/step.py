"""A training step: jit, donation, and the order of the other rooms."""

import collections
import dataclasses
import functools
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jax.stages import Compiled

from jaxcgx import _programs
from jaxcgx._compat import InOrder, is_eager
from jaxcgx.checks import as_array, wrong
from jaxcgx.exchange.message import fold
from jaxcgx.exchange.resolve import without_constraints
from jaxcgx.exchange.routes import Routes, Way
from jaxcgx.plan import Plan
from jaxcgx.plan.leaves import check_floating
from jaxcgx.train.batch import OP, dimensions, filled
from jaxcgx.train.division import Division, addable, after, row, shapes, with_row, without_row
from jaxcgx.train.exchange import At, Exchange, Outcome, check_state, send
from jaxcgx.train.gradient import Gradient, Loss
from jaxcgx.train.outputs import ModelState, Outputs
from jaxcgx.train.state import ExchangeState, Metrics, Pending, Priority, TrainState
from jaxcgx.train.update import Update, nodes, part, warn_of_momentum
from jaxcgx.transports.tcp import ORDER
from jaxcgx.typing import Batch, Key, Params, PyTree

GATHERED = 1  # the number that is folded into the key of a step, for the noise of gathers


class TrainStep(NamedTuple):
    """The functions of a training loop.

    Attributes:
      init: a function (params, model_state=None) -> TrainState, placed as `step` needs it.
      step: a jitted function (state, batch, key=None) -> (TrainState, Metrics): a `Step`.
      finish: a function (state) -> TrainState, to be called after the last step. With `Priority`, it applies the
        pending gradients. With rounds, it ends the exchanges that have begun. Otherwise it changes nothing.
    """

    init: Callable[..., TrainState]
    step: "Step"
    finish: Callable[[TrainState], TrainState]


class Step:
    """The function `step` of a `TrainStep`: a jitted function, with checks that jit can't do.

    It checks batches. If JAX refuses a sharding constraint in the loss when it compiles, the error says what to write.
    All other attributes are attributes of the jitted function, such as `lower`. Over `Tcp`, calls run a program of
    their own, with the same operations.
    """

    def __init__(self, function: Callable[..., Any], division: Division, donate: bool) -> None:
        given = (0,) if donate else ()
        self._jitted: Any = jax.jit(function, donate_argnums=given)
        self._division = division
        # The same, but not for callers that JAX traces.
        self._called: Any = InOrder(function, ORDER, division.mesh, given) if division.crosses else self._jitted

    def __call__(self, state: TrainState, batch: Batch, key: Key | None = None) -> tuple[TrainState, Metrics]:
        with self.checked(batch):
            return (self._called if is_eager() else self._jitted)(state, batch, key)

    def checked(self, batch: Batch) -> AbstractContextManager[None]:
        """Checks a batch, and returns the context of a call with it."""
        self._division.check_batch(batch)
        return without_constraints(OP, self._division.names)

    def programs(self, state: TrainState, batch: Batch, key: Key | None = None) -> list[Compiled]:
        """Returns the compiled programs that calls with such a state, batch and key run, to be read. JAX keeps them.

        There is one, except with Rounds: the step of a center, followed by a program for each exchange.
        """
        with without_constraints(OP, self._division.names):
            return [self._called.lower(state, batch, key).compile()]

    def clear_cache(self) -> None:
        """Forgets all compiled programs of the step, as `clear_cache` of a jitted function does."""
        self._jitted.clear_cache()
        self._called.clear_cache()

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
    _states: dict[Any, ExchangeState] = dataclasses.field(default_factory=dict, init=False)

    def functions(self, donate: bool) -> TrainStep:
        jitted = jax.jit(self.finish, donate_argnums=0 if donate else ())

        def finish(state: TrainState) -> TrainState:
            with warnings.catch_warnings():
                # Pending gradients are donated only to free them early. No result can reuse their memory.
                warnings.filterwarnings("ignore", "Some donated buffers were not usable")
                return jitted(state)

        return TrainStep(self.init, Step(self.step, self.division, donate), finish)

    def init(self, params: Params, model_state: PyTree = None) -> TrainState:
        """Returns the state before the first step, placed as `step` needs it."""
        division = self.division
        self.model_state.check_given(model_state)
        params, model_state = as_arrays("params", params), as_arrays("model_state", model_state)
        division.check(params)
        skipped = self._skipped(params)
        self.check_trained(params, part(params, skipped))
        _, of_optimizer = self.update.specs(params, skipped)
        placed = division.specs_of(params)[0], of_optimizer, division.specs_of_lost(skipped)

        def fresh(params: Params) -> tuple[PyTree, ...]:
            own = jax.tree.map(jnp.copy, params)  # `step` must not donate the caller's arrays
            return own, *self.update.init(params, skipped)

        def make(params: Params, model_state: PyTree) -> tuple[PyTree, ...]:
            params, model_state = division.first((params, model_state))
            own, opt_state, lost = division.by_partitioner(fresh, placed)(params)
            sent = division.init_exchange(self.exchange.init, params)
            return own, self.model_state.first(model_state, division.numbers()), opt_state, sent, lost

        spec = self.model_state.spec(division.rows)
        make = jax.jit(make, out_shardings=(None, division.shardings(spec), None, None, None))
        *found, lost = make(put(params, division.shardings(placed[0])), put(model_state, division.shardings(P())))
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
        batch, specs, guessed = division.place(batch, self.accumulate)
        outputs = Outputs(OP, self.loss.aux_specs, rows, guessed=guessed)
        gradient = self.gradient(division, skipped, dimensions(specs), outputs)
        rank = Rank(division, self.exchange, skipped, self.overlap, state_of=self.state_of)
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
            return state.replace(pending=dataclasses.replace(found, loss=loss)), metrics
        return self.update(state, found, loss, skipped, key=noise), metrics

    def finish(self, state: TrainState) -> TrainState:
        """Applies the gradients that are pending. Without, it changes nothing."""
        self._check_state(state)
        if state.pending is None:
            return state
        division, pending, skipped = self.division, state.pending, self._skipped(state.params)
        # The parameters that the loss uses first have gradients that are ready last.
        rank = Rank(division, self.exchange, skipped, self.overlap, order=pending.order[::-1], state_of=self.state_of)
        sent, noise = ExchangeState(division.rows, P()), self._noise(state)
        means, sent = division.over(
            rank.receive,
            in_specs=(Pending(division.rows, division.rows, P(), pending.order), sent, division.params_specs),
            out_specs=(division.specs_of_means(skipped), sent),
        )(pending, state.exchange, state.params)
        state = state.replace(exchange=sent, pending=None)
        return self.update(state, means, pending.loss, skipped, key=noise)

    def gradient(self, division: Division, skipped: PyTree, dims: Sequence[int | None], outputs: Outputs) -> Gradient:
        return Gradient(
            division=division,
            loss=self.loss,
            model_state=self.model_state,
            skipped=skipped,
            accumulate=self.accumulate,
            dims=dims,
            outputs=outputs,
            early=self.exchange.early and division.crosses and self.overlap is None,
        )

    def state_of(self, params: Params) -> ExchangeState:
        """Returns the shapes of the exchange's state for parameters. It remembers them."""
        like = shapes(params)
        key = jax.tree.structure(like), *jax.tree.leaves(like)
        if key not in self._states:
            self._states[key] = jax.eval_shape(lambda params: with_row(self.exchange.init(params)), like)
        return self._states[key]

    def _skipped(self, params: Params) -> PyTree:
        """Returns for each parameter whether it is frozen. All plans of a schedule skip the same parameters."""
        shards, plan = self.division.shards(params), self.exchange.plan
        if plan is None:  # the exchange makes its own plan, which skips nothing
            return jax.tree.map(lambda _: False, shards)
        plan = plan if isinstance(plan, Plan) else next(iter(plan.values()))
        return Routes.of(OP, plan, shards, argument="exchange").skipped

    def _noise(self, state: TrainState) -> Key | None:
        shared = state.exchange.shared
        return fold(shared.key, shared.count, GATHERED) if self.division.noisy else None

    def _check_state(self, state: TrainState) -> None:
        check_train_state(state)
        self.model_state.check_rows(state.model_state, self.division.size, self.division.remedy)

    def check_trained(self, params: Params, trained: Params) -> None:
        """Checks that parameters can be trained, and that the optimizer doesn't compress gradients itself."""
        check_floating("train.init", trained)
        axes = [(name, self.division.mesh.shape[name]) for name in self.division.names]
        _, state = jax.make_jaxpr(self.update.optimizer.init, axis_env=axes, return_shape=True)(trained)
        if nodes(state, ExchangeState):
            expected, got = "an optimizer without compression", "one that exchanges gradients itself"
            raise wrong(OP, "optimizer", expected, got, "pass the plain one, such as optax.adam(1e-3)")
        sent = self.state_of(self.division.shards(params))
        warn_of_momentum(OP, "optimizer", state, sent, momentum=lambda: self.update.momentum(trained))


def check_train_state(state: Any) -> None:
    if not isinstance(state, TrainState):
        expected, got = "the TrainState that train.init or the step before returned", f"a {type(state).__name__}"
        raise wrong("train.step", "state", expected, got, "write train.step(state, batch)", kind=TypeError)


def as_arrays(argument: str, tree: PyTree) -> PyTree:
    remedy = "leave it out; in Equinox, params, static = eqx.partition(model, eqx.is_inexact_array)"
    check = functools.partial(as_array, "train.init", argument, remedy=remedy)
    return jax.tree.map_with_path(lambda path, x: check(x, path), tree)


def put(state: PyTree, shardings: Any) -> PyTree:
    """Returns the state on all devices. jax.device_put can't put random keys on other processes' devices, but words."""
    words = jax.tree.map(lambda x: x if addable(x) else jax.random.key_data(x), state)
    wrap = lambda x, key: x if addable(key) else jax.random.wrap_key_data(x, impl=jax.random.key_impl(key))
    # It compares what the processes pass, which it can't do if their numbers of devices differ. Then nothing does.
    if len({*collections.Counter(device.process_index for device in jax.devices()).values()}) > 1:
        words = jax.jit(lambda x: x, out_shardings=shardings)(words)
    return jax.tree.map(wrap, jax.device_put(words, shardings), state)


@dataclasses.dataclass(frozen=True, eq=False)
class Rank:
    """The functions of one rank. They run on all ranks by `Division.over`."""

    division: Division
    exchange: Exchange
    skipped: PyTree
    overlap: str | Priority | None
    # The numbers of the leaves in the order in which their gradients are ready, or in which they are needed.
    order: tuple[int, ...] | None = None
    # A function from gradients to the shapes of the exchange's state, which it must fit. None: it isn't checked.
    state_of: Callable[[Params], ExchangeState] | None = None
    number: tuple[jax.Array, ...] = ()  # the number of the rank's center, if it is one of `Rounds`

    def step(
        self,
        gradient: Gradient,
        params: Params,
        model_state: PyTree,
        sent: ExchangeState,
        batch: Batch,
        keys: tuple[Key | None, Key | None],
    ) -> tuple[Any, ...]:
        """Returns (means or, with `Priority`, a `Pending` without loss; exchange; model state; loss; outputs)."""
        rank, early, ticket = self, gradient.early, None
        if early:
            ticket, sent = self._begin(None, sent, params, None)
            # XLA begins the exchange before it computes anything from the batch.
            batch = jax.tree.map(lambda x: after(ticket, x) if addable(x) else x, batch)
        find, args = gradient, (params, model_state, batch, keys)
        if self.overlap is not None:
            find = jax.jit(gradient)  # with jit, it is traced only once, for its order and for the step
            rank = dataclasses.replace(self, order=self._ready(find, args))
        grads, loss, model_state, aux = find(*args)
        if isinstance(self.overlap, Priority):
            found, sent = rank._pend(grads, sent, params, loss)
        elif early:
            ticket = jax.tree.map(lambda x: after(grads, x), ticket)
            found, sent = self._end(ticket, grads, sent, params, loss=loss)
        else:
            found, sent = rank.reduce(grads, sent, params, loss)
        return found, sent, model_state, loss, aux

    def reduce(self, grads: PyTree, sent: ExchangeState, params: Params, loss: jax.Array) -> Outcome:
        """Returns (means of the trained leaves, state) of an exchange that begins and ends here."""
        run = self.division.on_shards(self._send, sent)
        means, sent = run(self._whole(grads, params), sent, None if self.division.dims else params, loss)
        return part(means, self.skipped), sent

    def receive(self, pending: Pending, sent: ExchangeState, params: Params) -> Outcome:
        """Returns (means, state) of the exchange of pending gradients."""
        if pending.ticket is None:
            return self.reduce(without_row(pending.grads), sent, params, pending.loss)
        grads = None if pending.grads is None else without_row(pending.grads)
        return self._end(pending.ticket, grads, sent, params, loss=pending.loss)

    def _pend(self, grads: PyTree, sent: ExchangeState, params: Params, loss: jax.Array) -> Outcome:
        """Begins an exchange that the next step ends, if it can go on in between."""
        early, ticket = self.exchange.early, None
        if crosses := self.division.crosses and not self.division.dims:
            ticket, sent = self._begin(None if early else grads, sent, params, loss)
        return Pending(row(grads) if early or not crosses else None, ticket, None, self.order or ()), sent

    def _whole(self, grads: PyTree, params: Params) -> PyTree:
        """Returns gradients for all leaves, as plans expect. Nothing reads those that the plan skips."""
        return filled(grads, part(self.division.like_whole(params), self.skipped, frozen=True))

    def _at(self, params: Params, loss: jax.Array | None) -> At:
        way = Way(dims=self.division.dims, join=True, order=self.order)
        if isinstance(self.overlap, Priority):
            way = way._replace(slice_elements=self.overlap.slice_elements, later=True)
        return At(self.division.net(), params, loss, way, shards=self.division.shard_axes, center=self.number)

    def _begin(self, grads: PyTree, sent: ExchangeState, params: Params, loss: jax.Array | None) -> Outcome:
        at, grads = self._at(params, loss), None if grads is None else row(self._whole(grads, params))
        begin = lambda own, grads: self.exchange.begin(grads, ExchangeState(own, sent.shared), at)
        ticket, new = jax.vmap(begin)(sent.own, grads)
        return ticket, ExchangeState(new.own, without_row(new.shared))

    def _end(self, ticket: PyTree, grads: PyTree, sent: ExchangeState, params: Params, loss: jax.Array) -> Outcome:
        at, grads = self._at(params, loss), row(self._whole(grads, params)) if self.exchange.early else None
        end = lambda own, ticket, grads: self.exchange.end(ticket, ExchangeState(own, sent.shared), at, grads)
        means, new = jax.vmap(end)(sent.own, ticket, grads)
        return part(without_row(means), self.skipped), ExchangeState(new.own, without_row(new.shared))

    def _send(self, grads: PyTree, sent: ExchangeState, params: Params, loss: jax.Array) -> Outcome:
        """Returns (means, state) of an exchange of all leaves, or of this device's shards of them."""
        if self.state_of is not None:
            check_state("train.step", sent, self.state_of(grads), self.division.remedy)
        return send(self.exchange, grads, sent, self._at(params, loss))

    def _ready(self, find: Any, args: tuple[Any, ...]) -> tuple[int, ...]:
        """Returns the order of all leaves. Those that are skipped come last."""
        skipped = jax.tree.leaves(self.skipped)
        trained = [i for i, skip in enumerate(skipped) if not skip]
        ends = _programs.ready(jax.make_jaxpr(find)(*args), len(trained))
        return *(trained[i] for i in ends), *(i for i, skip in enumerate(skipped) if skip)
