"""A round of a fragment: the centers' outer gradients are exchanged, and the outer parameters move by their mean."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxcgx.optim.model_state import PerRank
from jaxcgx.optim.require import import_optax
from jaxcgx.optim.state import CompressState
from jaxcgx.wan.between import Between
from jaxcgx.wan.fragments import Fragment
from jaxcgx.wan.outer import OuterTelemetry, init_outer, measure

OP = "diloco"


class Exchange(NamedTuple):
    """The state of a fragment, the same in every center except the residuals of `sent`."""

    sent: CompressState  # of the exchange of outer gradients
    outer: Any  # of the outer optimizer
    # The mean of outer gradients that is still to be applied, or a PerRank of the ticket of its exchange. None where
    # each exchange ends in the step in which it begins.
    waiting: Any
    before: Any  # the mean of the round before; None without telemetry
    telemetry: Any  # an OuterTelemetry of the last round, or None


class Both(NamedTuple):
    """The parameters in a center."""

    outer: Any  # the same in every center
    own: Any
    start: Any  # what a center began its round with; None if that is always the outer parameters


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rounds:
    """What the rounds of all fragments are made of. `diloco` explains the last fields."""

    between: Between
    outer: Any
    later: bool  # whether an exchange ends in a later step than it begins
    alpha: float
    decay: float
    telemetry: bool

    @property
    def crosses(self) -> bool:
        """Whether an exchange goes on while the next steps' programs run."""
        return self.later and self.between.crosses

    def init(self, params: Any) -> Exchange:
        """The state before the first round of these parameters."""
        zeros = lambda: jax.tree_util.tree_map(lambda x: jnp.zeros(x.shape, jnp.float32), params)
        sent, waiting = self.between.init(params), None
        if self.crosses:
            ticket, _ = jax.eval_shape(self.between.begin, zeros(), sent)
            waiting = PerRank(jax.tree_util.tree_map(lambda x: jnp.zeros(x.shape, x.dtype), ticket))
        elif self.later:
            waiting = zeros()
        return Exchange(
            sent=sent,
            outer=init_outer(OP, self.outer, params),
            waiting=waiting,
            before=zeros() if self.telemetry else None,
            telemetry=OuterTelemetry(*jnp.zeros(2, jnp.float32)) if self.telemetry else None,
        )

    def begin(self, fragment: Fragment, both: Both, exchange: Exchange) -> tuple[Both, Exchange]:
        """Begins to exchange outer gradients. What can't go on in later steps ends here, too."""
        ticket, sent = self.between.begin(_moved(fragment, both), exchange.sent)
        if self.crosses:
            return both, exchange._replace(sent=sent, waiting=PerRank(ticket))
        mean, sent = self._received(ticket, sent)
        return both, exchange._replace(sent=choose(finite(mean), sent, exchange.sent), waiting=mean)

    def end(self, fragment: Fragment, both: Both, exchange: Exchange) -> tuple[Both, Exchange]:
        """Moves the outer parameters by the mean, and the center's own to them.

        After a mean that isn't finite the center goes back to the outer parameters, which stay as they are.
        """
        mean, exchange = self._arrived(exchange)
        good = finite(mean)
        after, done = self._move(fragment.take(both.outer), exchange, mean=mean, good=good)
        own = after
        if self.alpha:
            mix = lambda x, y: (self.alpha * wide(x) + (1 - self.alpha) * wide(y)).astype(x.dtype)
            own = choose(good, jax.tree_util.tree_map(mix, fragment.take(both.own), after), after)
        return both._replace(outer=fragment.put(both.outer, after), own=fragment.put(both.own, own)), done

    def at_once(self, fragment: Fragment, both: Both, exchange: Exchange) -> tuple[Both, Exchange]:
        """Exchanges outer gradients, and moves by their mean."""
        both, done = self.end(fragment, *self.begin(fragment, both, exchange))
        return both, done._replace(waiting=None)

    def eager(self, fragment: Fragment, both: Both, exchange: Exchange, *, first: jax.Array) -> tuple[Both, Exchange]:
        """Moves the outer parameters by the mean of the round before, and exchanges this round's outer gradients.

        The center goes on from an outer step that it makes with its own part of their mean alone.

        Args:
          fragment: the fragment.
          both: the parameters.
          exchange: the state.
          first: whether this is the fragment's first round, which has none before it.
        """
        moved = _moved(fragment, both)
        mean, exchange = self._arrived(exchange)
        after, done = self._move(fragment.take(both.outer), exchange, mean=mean, good=finite(mean) & ~first)
        part = jax.tree_util.tree_map(lambda d, x: (d / self.between.centers).astype(x.dtype), moved, after)
        ahead = import_optax(OP).apply_updates(after, self.outer.update(part, done.outer, after)[0])
        start = choose(finite(moved), ahead, after)
        _, begun = self.begin(fragment, both, done)
        return Both(fragment.put(both.outer, after), *(fragment.put(x, start) for x in both[1:])), begun

    def _received(self, ticket: Any, sent: CompressState) -> tuple[Any, CompressState]:
        """The mean of an exchange that has begun, and the state after it."""
        mean, sent = self.between.end(ticket, sent)
        if self.decay != 1:
            sent = sent._replace(residuals=jax.tree_util.tree_map(lambda r: self.decay * r, sent.residuals))
        return mean, sent

    def _arrived(self, exchange: Exchange) -> tuple[Any, Exchange]:
        """The mean that has been waited for, and the state, which then waits for none."""
        if not self.crosses:
            return exchange.waiting, exchange
        mean, sent = self._received(exchange.waiting.rows, exchange.sent)
        return mean, exchange._replace(sent=sent, waiting=jax.tree_util.tree_map(jnp.zeros_like, exchange.waiting))

    def _move(self, before: Any, exchange: Exchange, mean: Any, good: jax.Array) -> tuple[Any, Exchange]:
        """The outer parameters after a step along the mean, and the state; both as they were unless it is good."""
        given = jax.tree_util.tree_map(lambda d, x: d.astype(x.dtype), mean, before)
        step, state = self.outer.update(given, exchange.outer, before)
        done = exchange._replace(outer=state)
        if exchange.telemetry is not None:
            done = done._replace(before=mean, telemetry=measure(mean, step, exchange.before))
        return choose(good, (import_optax(OP).apply_updates(before, step), done), (before, exchange))


def _moved(fragment: Fragment, both: Both) -> Any:
    """A center's outer gradients."""
    start = fragment.take(both.outer if both.start is None else both.start)
    return jax.tree_util.tree_map(lambda x, y: wide(x) - wide(y), start, fragment.take(both.own))


def wide(x: jax.Array) -> jax.Array:
    """An array in float32."""
    return x.astype(jnp.float32)


def finite(tree: Any) -> jax.Array:
    """Whether all numbers of a tree are finite."""
    return jnp.stack([jnp.isfinite(x).all() for x in jax.tree_util.tree_leaves(tree)]).all()


def choose(condition: jax.Array, yes: Any, no: Any) -> Any:
    """One of two trees."""
    return jax.tree_util.tree_map(lambda x, y: jnp.where(condition, x, y), yes, no)
