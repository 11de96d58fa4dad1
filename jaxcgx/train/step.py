"""A training step: jit, donation, and the order of the other rooms."""

import dataclasses
import functools
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jax.stages import Compiled

from jaxcgx.checks import check_array, spell_array, wrong
from jaxcgx.exchange.message import fold
from jaxcgx.exchange.resolve import without_constraints
from jaxcgx.exchange.routes import Routes
from jaxcgx.plan.leaves import spell_path
from jaxcgx.plan.plan import check_phases
from jaxcgx.train.batch import OP, dimensions
from jaxcgx.train.division import Division, addable
from jaxcgx.train.exchange import Exchange, with_row
from jaxcgx.train.frozen import part
from jaxcgx.train.gradient import Gradient, Loss, Parts
from jaxcgx.train.model_state import ModelState
from jaxcgx.train.nesting import nodes, warn_of_momentum
from jaxcgx.train.outputs import Outputs
from jaxcgx.train.rank import Rank
from jaxcgx.train.state import ExchangeState, Metrics, Pending, Priority, TrainState
from jaxcgx.train.update import Update
from jaxcgx.typing import Batch, Key, Params, PyTree, Specs

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
        """Returns the compiled programs that calls with such a state, batch and key run. JAX keeps them.

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

    def functions(self, donate: bool) -> TrainStep:
        """Returns the functions of a training loop."""
        jit = functools.partial(jax.jit, donate_argnums=0 if donate else ())
        jitted = jit(self.finish)

        def finish(state: TrainState) -> TrainState:
            with warnings.catch_warnings():
                # Pending gradients are donated only to free them early. No result can reuse their memory.
                warnings.filterwarnings("ignore", "Some donated buffers were not usable")
                return jitted(state)

        return TrainStep(self.init, Step(jit(self.step), self.division), finish)

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
        gradient = Gradient(division, self.loss, self.model_state, skipped, parts=parts, outputs=outputs, early=early)
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
            grads, ticket = found
            return state.replace(pending=Pending(grads, ticket, loss, rank.order or ())), metrics
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

    @functools.cached_property
    def state_of(self) -> Callable[[Params], ExchangeState]:
        """A function from parameters to the shapes of the exchange's state. It remembers them."""
        known: dict[Any, ExchangeState] = {}

        def find(params: Params) -> ExchangeState:
            leaves, tree = jax.tree_util.tree_flatten(params)
            key = tree, tuple((x.shape, x.dtype) for x in leaves)
            if key not in known:
                like = tree.unflatten([jax.ShapeDtypeStruct(*each) for each in key[1]])
                known[key] = jax.eval_shape(lambda params: with_row(self.exchange.init(params)), like)
            return known[key]

        return find

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
        warn_of_momentum(OP, "optimizer", state, self.state_of(self.division.shards(params)))


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
