"""The rounds of a fragment: centers exchange their outer gradients, and the outer parameters move by the mean."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxcgx.optim.require import import_optax
from jaxcgx.optim.state import CompressState
from jaxcgx.wan.between import Between
from jaxcgx.wan.fragments import Fragment
from jaxcgx.wan.outer import OuterTelemetry, init_outer, measure


class Waiting(NamedTuple):
    """An exchange that began in an earlier step. Only the process that began it can end it.

    Attributes:
      begun: bool[ranks]: whether an exchange has begun.
      rows: a tree of arrays `[ranks, ...]` with what ends it.
    """

    begun: Any
    rows: Any

    @property
    def per_rank(self) -> dict[str, str]:
        """The fields with arrays per rank, and what becomes of them in other processes or on other ranks."""
        return {"begun": "zeros", "rows": "zeros"}

    @property
    def replicated(self) -> tuple[str, ...]:
        """The fields that are trees like the parameters, without a row per rank."""
        return ()


class Exchange(NamedTuple):
    """The state of a fragment. It is the same in every center, except residuals in `sent` and a ticket in `waiting`.

    Attributes:
      sent: the state of the exchange of outer gradients.
      outer: the state of the outer optimizer.
      waiting: the mean of outer gradients that is still to be applied, or the `Waiting` of its exchange. None if every
        exchange ends in the step in which it begins.
      before: the mean of outer gradients of the round before; None without telemetry.
      telemetry: the OuterTelemetry of the last round; None without telemetry.
    """

    sent: CompressState
    outer: Any
    waiting: Any
    before: Any
    telemetry: Any


class Both(NamedTuple):
    """The outer parameters and the own parameters of a center."""

    outer: Any  # the same in every center
    own: Any
    start: Any  # the own parameters at the beginning of the round; None if they always equal the outer parameters


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rounds:
    """The functions of a round, the same for all fragments. `diloco` explains the last three fields."""

    function: str  # that errors name
    between: Between
    outer: Any
    later: bool  # whether an exchange ends in a later step than it begins
    alpha: float
    decay: float
    telemetry: bool

    @property
    def crosses(self) -> bool:
        """Whether an exchange goes on while the programs of later steps run."""
        return self.later and self.between.crosses

    def init(self, params: Any, number: int) -> Exchange:
        """Returns the state before the first round, for these parameters of the fragment `number`."""
        zeros = lambda: jax.tree_util.tree_map(lambda x: jnp.zeros(x.shape, jnp.float32), params)
        sent, waiting = self.between.init(params, number), None
        if self.crosses:
            rows = jax.eval_shape(self.between.begin, zeros(), sent)
            waiting = Waiting(jnp.zeros(1, bool), jax.tree_util.tree_map(lambda x: jnp.zeros(x.shape, x.dtype), rows))
        elif self.later:
            waiting = zeros()
        return Exchange(
            sent=sent,
            outer=init_outer(self.function, self.outer, params),
            waiting=waiting,
            before=zeros() if self.telemetry else None,
            telemetry=OuterTelemetry(*jnp.zeros(2, jnp.float32)) if self.telemetry else None,
        )

    def begin(self, fragment: Fragment, both: Both, exchange: Exchange) -> tuple[Both, Exchange]:
        """Begins the exchange of outer gradients. It also ends the exchange if this can't go on in later steps."""
        moved = _moved(fragment, both)
        if self.crosses:
            begun = Waiting(jnp.ones(1, bool), self.between.begin(moved, exchange.sent))
            return both, exchange._replace(waiting=begun)
        mean, sent = self.between.mean(moved, exchange.sent)
        return both, self._received(mean, sent, exchange=exchange)._replace(waiting=mean)

    def end(self, fragment: Fragment, both: Both, exchange: Exchange) -> tuple[Both, Exchange]:
        """Moves the outer parameters by the mean, and the center's own parameters to the outer parameters.

        If the mean isn't finite, the outer parameters stay as they are, and the center goes back to them. If no
        exchange has begun, nothing changes.
        """
        mean, begun, exchange = self._arrived(fragment, both, exchange)
        good = begun & finite(mean)
        after, done = self._move(fragment.take(both.outer), exchange, mean=mean, good=good)
        own = after
        if self.alpha:
            mix = lambda x, y: (self.alpha * wide(x) + (1 - self.alpha) * wide(y)).astype(x.dtype)
            own = choose(good, jax.tree_util.tree_map(mix, fragment.take(both.own), after), after)
        own = choose(begun, own, fragment.take(both.own))
        return both._replace(outer=fragment.put(both.outer, after), own=fragment.put(both.own, own)), done

    def at_once(self, fragment: Fragment, both: Both, exchange: Exchange) -> tuple[Both, Exchange]:
        """Exchanges outer gradients, and moves the parameters by their mean in the same step."""
        both, done = self.end(fragment, *self.begin(fragment, both, exchange))
        return both, done._replace(waiting=None)

    def eager(self, fragment: Fragment, both: Both, exchange: Exchange, *, first: jax.Array) -> tuple[Both, Exchange]:
        """Moves the outer parameters by the mean of the round before, and exchanges this round's outer gradients.

        The center goes on from a preliminary outer step with its own part of this round's mean alone.

        Args:
          fragment: the fragment.
          both: the parameters.
          exchange: the state.
          first: whether this is the fragment's first round. It has no earlier mean to apply.
        """
        moved = _moved(fragment, both)
        mean, begun, exchange = self._arrived(fragment, both, exchange)
        good = begun & finite(mean) & ~first
        after, done = self._move(fragment.take(both.outer), exchange, mean=mean, good=good)
        part = jax.tree_util.tree_map(lambda d, x: (d / self.between.centers).astype(x.dtype), moved, after)
        ahead = import_optax(self.function).apply_updates(after, self.outer.update(part, done.outer, after)[0])
        start = choose(finite(moved), ahead, after)
        _, begun = self.begin(fragment, both, done)
        return Both(fragment.put(both.outer, after), *(fragment.put(x, start) for x in both[1:])), begun

    def _received(self, mean: Any, sent: CompressState, *, exchange: Exchange) -> Exchange:
        """Returns the state after an exchange, with residuals times `decay`, or unchanged if the mean isn't finite."""
        if self.decay != 1:
            sent = sent._replace(residuals=jax.tree_util.tree_map(lambda r: self.decay * r, sent.residuals))
        return exchange._replace(sent=choose(finite(mean), sent, exchange.sent))

    def _arrived(self, fragment: Fragment, both: Both, exchange: Exchange) -> tuple[Any, Any, Exchange]:
        """Ends the exchange that began in an earlier step.

        Returns (mean, whether an exchange has begun, state). In a restored state, none has begun.
        """
        waiting = exchange.waiting
        if not self.crosses:
            return waiting, True, exchange
        zeros = jax.tree_util.tree_map(lambda x: jnp.zeros(x.shape, jnp.float32), fragment.take(both.outer))

        def receive() -> tuple[Any, Exchange]:
            mean, sent = self.between.end(waiting.rows, zeros, exchange.sent)
            done = self._received(mean, sent, exchange=exchange)
            return mean, done._replace(waiting=jax.tree_util.tree_map(jnp.zeros_like, waiting))

        begun = waiting.begun[0]
        mean, exchange = lax.cond(begun, receive, lambda: (zeros, exchange))
        return mean, begun, exchange

    def _move(self, before: Any, exchange: Exchange, mean: Any, good: jax.Array) -> tuple[Any, Exchange]:
        """Returns (outer parameters, state) after an outer step with the mean, or both unchanged unless `good`."""
        given = jax.tree_util.tree_map(lambda d, x: d.astype(x.dtype), mean, before)
        step, state = self.outer.update(given, exchange.outer, before)
        done = exchange._replace(outer=state)
        if exchange.telemetry is not None:
            done = done._replace(before=mean, telemetry=measure(mean, step, exchange.before))
        return choose(good, (import_optax(self.function).apply_updates(before, step), done), (before, exchange))


def _moved(fragment: Fragment, both: Both) -> Any:
    """Returns a center's outer gradients."""
    start = fragment.take(both.outer if both.start is None else both.start)
    return jax.tree_util.tree_map(lambda x, y: wide(x) - wide(y), start, fragment.take(both.own))


def wide(x: jax.Array) -> jax.Array:
    """Returns an array in float32."""
    return x.astype(jnp.float32)


def finite(tree: Any) -> jax.Array:
    """Returns whether all numbers of a tree are finite."""
    return jnp.stack([jnp.isfinite(x).all() for x in jax.tree_util.tree_leaves(tree)]).all()


def choose(condition: jax.Array, yes: Any, no: Any) -> Any:
    """Returns the tree `yes` if the condition is True, otherwise the tree `no`."""
    return jax.tree_util.tree_map(lambda x, y: jnp.where(condition, x, y), yes, no)
