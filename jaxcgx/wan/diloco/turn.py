"""The turn of a fragment: centers exchange their outer gradients, and the outer parameters move by the mean."""

import dataclasses
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxcgx.train.state import ExchangeState
from jaxcgx.train.update import import_optax
from jaxcgx.typing import Params, PyTree
from jaxcgx.wan.diloco.between import Between, Sent
from jaxcgx.wan.diloco.outer import OuterTelemetry, init_outer, measure
from jaxcgx.wan.fragments import Fragment

if TYPE_CHECKING:
    import optax


class Waiting(NamedTuple):
    """A round that began in an earlier step.

    Attributes:
      begun: bool[]: whether one has begun.
      arrays: the mean of outer gradients that is still to be applied; or what ends its exchange, which only the process
        that began it can end.
    """

    begun: jax.Array
    arrays: PyTree


class Own(NamedTuple):
    """What each center has of a fragment.

    Attributes:
      residuals: the residuals of the exchange; None without feedback.
      start: the own parameters at the beginning of the round; None if they always equal the outer parameters.
      waiting: the exchange that goes on while later steps run, a row for each rank; None without.
    """

    residuals: PyTree
    start: PyTree
    waiting: Waiting | None

    @staticmethod
    def per_rank() -> dict[str, str]:
        """Returns what becomes of the rows of each field for another number of ranks."""
        return {"residuals": "sum", "start": "mean", "waiting": "zeros"}


class Shared(NamedTuple):
    """What is the same in every center.

    Attributes:
      sent: the state of the exchange, without residuals.
      outer: the state of the outer optimizer.
      waiting: the mean that is still to be applied; None if every round ends in the step in which it begins, or if
        exchanges go on while later steps run.
      before: the mean of outer gradients of the round before; None without telemetry.
      telemetry: the OuterTelemetry of the last round; None without telemetry.
    """

    sent: Sent
    outer: PyTree
    waiting: Waiting | None
    before: PyTree
    telemetry: OuterTelemetry | None


class Both(NamedTuple):
    """The outer parameters and the own parameters of a center, or a fragment of them."""

    outer: Params  # the same in every center
    own: Params


@dataclasses.dataclass(frozen=True, kw_only=True)
class Turn:
    """What is done with a fragment. `both` are all parameters, `state` is that of the fragment.

    `Diloco` explains the last three fields.
    """

    op: str  # the name that errors have
    fragment: Fragment
    between: Between
    optimizer: "optax.GradientTransformation"  # the outer one
    later: bool  # whether an exchange ends in a later step than it begins
    ahead: bool  # whether a center goes on from a preliminary outer step
    alpha: float
    decay: float
    telemetry: bool

    @property
    def crosses(self) -> bool:
        """Whether an exchange goes on while the programs of later steps run."""
        return self.later and self.between.net.begin_sum is not None

    def init(self, params: Params, number: int, *, seed: int, keep: bool) -> ExchangeState:
        """Returns the state before the first round, for all parameters and the fragment with this number."""
        params = self.fragment.take(params)
        zeros = lambda like: jax.tree_util.tree_map(lambda x: jnp.zeros(x.shape, x.dtype), like)
        moved = jax.tree_util.tree_map(lambda x: jnp.zeros(x.shape, jnp.float32), params)
        sent, waiting, mean = self.between.init(params, seed, number, keep=keep), None, None
        if self.crosses:
            rows = jax.eval_shape(self.between.begin, moved, sent)
            waiting = Waiting(jnp.zeros((), bool), zeros(jax.tree_util.tree_leaves(rows)))
        elif self.later:
            mean = Waiting(jnp.zeros((), bool), moved)
        shared = Shared(
            sent=sent._replace(residuals=None),
            outer=init_outer(self.op, self.optimizer, params),
            waiting=mean,
            before=moved if self.telemetry else None,
            telemetry=OuterTelemetry(*jnp.zeros(2, jnp.float32)) if self.telemetry else None,
        )
        return ExchangeState(Own(sent.residuals, params if self.ahead else None, waiting), shared)

    def begin(self, both: Both, state: ExchangeState) -> tuple[Both, ExchangeState]:
        """Begins the exchange of outer gradients. It also ends the exchange if this can't go on in later steps."""
        begun, own, shared = self.between.begin(self._moved(both, state), _sent(state)), state.own, state.shared
        if self.crosses:
            waiting = Waiting(jnp.ones((), bool), jax.tree_util.tree_leaves(begun))
            return both, ExchangeState(own._replace(waiting=waiting), shared)
        mean, state = self._received(begun, state)
        return both, ExchangeState(state.own, state.shared._replace(waiting=Waiting(jnp.ones((), bool), mean)))

    def end(self, both: Both, state: ExchangeState) -> tuple[Both, ExchangeState]:
        """Moves the outer parameters by the mean, and the center's own parameters to the outer parameters.

        If the mean isn't finite, the outer parameters stay as they are, and the center goes back to them. If no
        exchange has begun, nothing changes.
        """
        mean, begun, state = self._arrived(both, state)
        good = begun & finite(mean)
        after, state = self._move(self.fragment.take(both.outer), state, mean=mean, good=good)
        own, before = after, self.fragment.take(both.own)
        if self.alpha:
            weight = self.alpha
            mix = lambda x, y: (weight * wide(x) + (1 - weight) * wide(y)).astype(x.dtype)
            own = choose(good, jax.tree_util.tree_map(mix, before, after), after)
        own = choose(begun, own, before)
        if self.ahead:  # `finish` ends the last round
            state = ExchangeState(state.own._replace(start=choose(begun, own, state.own.start)), state.shared)
        return self._put(both, after, own), state

    def at_once(self, both: Both, state: ExchangeState) -> tuple[Both, ExchangeState]:
        """Exchanges outer gradients, and moves the parameters by their mean in the same step."""
        both, done = self.end(*self.begin(both, state))
        return both, ExchangeState(done.own, done.shared._replace(waiting=None))

    def eager(self, both: Both, state: ExchangeState) -> tuple[Both, ExchangeState]:
        """Moves the outer parameters by the mean of the round before, and exchanges this round's outer gradients.

        The center goes on from a preliminary outer step with its own part of this round's mean alone.
        """
        moved = self._moved(both, state)
        mean, begun, done = self._arrived(both, state)
        after, done = self._move(self.fragment.take(both.outer), done, mean=mean, good=begun & finite(mean))
        part = jax.tree_util.tree_map(lambda d, x: (d / self.between.centers).astype(x.dtype), moved, after)
        ahead, _ = self.optimizer.update(part, done.shared.outer, after)
        start = choose(finite(moved), import_optax(self.op).apply_updates(after, ahead), after)
        _, done = self.begin(both, done)
        return self._put(both, after, start), ExchangeState(done.own._replace(start=start), done.shared)

    def _moved(self, both: Both, state: ExchangeState) -> PyTree:
        """Returns a center's outer gradients."""
        start = self.fragment.take(both.outer) if state.own.start is None else state.own.start
        return jax.tree_util.tree_map(lambda x, y: wide(x) - wide(y), start, self.fragment.take(both.own))

    def _put(self, both: Both, outer: Params, own: Params) -> Both:
        return Both(self.fragment.put(both.outer, outer), self.fragment.put(both.own, own))

    def _received(self, begun: PyTree, state: ExchangeState) -> tuple[PyTree, ExchangeState]:
        """Ends an exchange. Returns (mean, state).

        Residuals are multiplied by `decay`. If the mean isn't finite, the state stays as it is.
        """
        before = _sent(state)
        mean, sent = self.between.end(begun, before)
        if self.decay != 1:
            sent = sent._replace(residuals=jax.tree_util.tree_map(lambda r: self.decay * r, sent.residuals))
        sent = choose(finite(mean), sent, before)
        own = state.own._replace(residuals=sent.residuals)
        return mean, ExchangeState(own, state.shared._replace(sent=sent._replace(residuals=None)))

    def _arrived(self, both: Both, state: ExchangeState) -> tuple[PyTree, jax.Array, ExchangeState]:
        """Ends the round that began in an earlier step. Returns (mean, whether one has begun, state)."""
        waiting, none = state.own.waiting if self.crosses else state.shared.waiting, jnp.zeros((), bool)
        if not self.crosses:
            return (
                waiting.arrays,
                waiting.begun,
                ExchangeState(state.own, state.shared._replace(waiting=waiting._replace(begun=none))),
            )
        part = self.fragment.take(both.outer)
        zeros = jax.tree_util.tree_map(lambda x: jnp.zeros(x.shape, jnp.float32), part)
        tree = jax.tree_util.tree_structure(jax.eval_shape(self.between.begin, zeros, _sent(state)))

        def receive() -> tuple[PyTree, ExchangeState]:
            mean, done = self._received(tree.unflatten(waiting.arrays), state)
            return mean, ExchangeState(
                done.own._replace(waiting=jax.tree_util.tree_map(jnp.zeros_like, waiting)), done.shared
            )

        mean, state = lax.cond(waiting.begun, receive, lambda: (zeros, state))
        return mean, waiting.begun, state

    def _move(
        self, before: Params, state: ExchangeState, mean: PyTree, good: jax.Array
    ) -> tuple[Params, ExchangeState]:
        """Returns (outer parameters, state) after an outer step with the mean, or both unchanged unless `good`."""
        shared = state.shared
        given = jax.tree_util.tree_map(lambda d, x: d.astype(x.dtype), mean, before)
        step, outer = self.optimizer.update(given, shared.outer, before)
        done = shared._replace(outer=outer)
        if shared.telemetry is not None:
            done = done._replace(before=mean, telemetry=measure(mean, step, shared.before))
        moved = import_optax(self.op).apply_updates(before, step)
        after, shared = choose(good, (moved, done), (before, shared))
        return after, ExchangeState(state.own, shared)


def _sent(state: ExchangeState) -> Sent:
    return state.shared.sent._replace(residuals=state.own.residuals)


def wide(x: jax.Array) -> jax.Array:
    """Returns an array in float32."""
    return x.astype(jnp.float32)


def finite(tree: PyTree) -> jax.Array:
    """Returns whether all numbers of a tree are finite."""
    return jnp.stack([jnp.isfinite(x).all() for x in jax.tree_util.tree_leaves(tree)]).all()


def choose(condition: jax.Array, yes: PyTree, no: PyTree) -> PyTree:
    """Returns the tree `yes` if the condition is True, otherwise the tree `no`."""
    return jax.tree_util.tree_map(lambda x, y: jnp.where(condition, x, y), yes, no)
