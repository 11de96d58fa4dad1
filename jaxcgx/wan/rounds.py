"""A round of a fragment: the centres' outer gradients are exchanged, and the outer parameters move by their mean."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxcgx.optim.require import import_optax
from jaxcgx.optim.state import CompressState
from jaxcgx.wan.fragments import Fragment
from jaxcgx.wan.outer import OuterTelemetry, init_outer, measure

OP = "diloco"


class Exchange(NamedTuple):
    """The state of a fragment, the same in every centre except the residuals of `sent`."""

    sent: CompressState  # of the exchange of outer gradients
    outer: Any  # of the outer optimizer
    mean: Any  # the mean of outer gradients that is still to be applied; None if it always is at once
    before: Any  # the mean of the round before; None without telemetry
    telemetry: OuterTelemetry | None  # of the last round


class Both(NamedTuple):
    """The parameters in a centre."""

    outer: Any  # the same in every centre
    own: Any
    start: Any  # what a centre began its round with; None if that is always the outer parameters


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rounds:
    """What the rounds of all fragments are made of. `diloco` explains the last fields."""

    transformation: Any  # from outer gradients to their mean over all ranks
    names: tuple[Any, ...]  # the axes of the centres and of a centre's ranks, which have the same outer gradients
    outer: Any
    keeps: bool  # whether a mean is applied in a later step
    alpha: float
    decay: float
    telemetry: bool

    def init(self, params: Any) -> Exchange:
        """The state before the first round of these parameters."""
        zeros = lambda: jax.tree_util.tree_map(lambda x: jnp.zeros(x.shape, jnp.float32), params)
        return Exchange(
            sent=self.transformation.init(params),
            outer=init_outer(OP, self.outer, params),
            mean=zeros() if self.keeps else None,
            before=zeros() if self.telemetry else None,
            telemetry=OuterTelemetry(*jnp.zeros(2, jnp.float32)) if self.telemetry else None,
        )

    def begin(self, fragment: Fragment, both: Both, exchange: Exchange) -> tuple[Both, Exchange]:
        """Exchanges outer gradients. A mean that isn't finite leaves no trace in the residuals."""
        mean, sent = self._mean(_moved(fragment, both), exchange.sent)
        if self.decay != 1:
            sent = sent._replace(residuals=jax.tree_util.tree_map(lambda r: self.decay * r, sent.residuals))
        return both, exchange._replace(sent=_choose(_finite(mean), sent, exchange.sent), mean=mean)

    def end(self, fragment: Fragment, both: Both, exchange: Exchange) -> tuple[Both, Exchange]:
        """Moves the outer parameters by the mean, and the centre's own to them.

        After a mean that isn't finite the centre goes back to the outer parameters, which stay as they are.
        """
        finite = _finite(exchange.mean)
        after, done = self._move(fragment.take(both.outer), exchange, good=finite)
        own = after
        if self.alpha:
            mix = lambda x, y: (self.alpha * _wide(x) + (1 - self.alpha) * _wide(y)).astype(x.dtype)
            own = _choose(finite, jax.tree_util.tree_map(mix, fragment.take(both.own), after), after)
        both = both._replace(outer=fragment.put(both.outer, after), own=fragment.put(both.own, own))
        return both, done if self.keeps else done._replace(mean=None)

    def at_once(self, fragment: Fragment, both: Both, exchange: Exchange) -> tuple[Both, Exchange]:
        """Exchanges outer gradients, and moves by their mean."""
        return self.end(fragment, *self.begin(fragment, both, exchange))

    def eager(self, fragment: Fragment, both: Both, exchange: Exchange, *, first: jax.Array) -> tuple[Both, Exchange]:
        """Moves the outer parameters by the mean of the round before, and exchanges this round's outer gradients.

        The centre goes on from an outer step that it makes with its own part of their mean alone.

        Args:
          fragment: the fragment.
          both: the parameters.
          exchange: the state.
          first: whether this is the fragment's first round, which has none before it.
        """
        moved = _moved(fragment, both)
        good = _finite(exchange.mean) & ~first
        after, done = self._move(fragment.take(both.outer), exchange, good=good)
        part = jax.tree_util.tree_map(lambda d, x: (d / lax.axis_size(self.names[0])).astype(x.dtype), moved, after)
        ahead = import_optax(OP).apply_updates(after, self.outer.update(part, done.outer, after)[0])
        start = _choose(_finite(moved), ahead, after)
        _, begun = self.begin(fragment, both, done)
        return Both(fragment.put(both.outer, after), *(fragment.put(x, start) for x in both[1:])), begun

    def _move(self, before: Any, exchange: Exchange, good: jax.Array) -> tuple[Any, Exchange]:
        """The outer parameters after a step along the mean, and the state; both as they were unless it is good."""
        mean = exchange.mean
        given = jax.tree_util.tree_map(lambda d, x: d.astype(x.dtype), mean, before)
        step, state = self.outer.update(given, exchange.outer, before)
        done = exchange._replace(outer=state)
        if exchange.telemetry is not None:
            done = done._replace(before=mean, telemetry=measure(mean, step, exchange.before))
        return _choose(good, (import_optax(OP).apply_updates(before, step), done), (before, exchange))

    def _mean(self, moved: Any, sent: CompressState) -> tuple[Any, CompressState]:
        """The mean over the centres.

        The ranks of a centre share the work. All of them have the same outer gradients and residuals, of which the
        first rank's count.
        """
        inner = self.names[1:]
        if not inner:
            return self.transformation.update(moved, sent)
        first, ranks = lax.axis_index(inner) == 0, lax.axis_size(inner)
        alone = lambda tree: jax.tree_util.tree_map(lambda x: jnp.where(first, x, 0), tree)
        each = lambda function, state: state._replace(**{n: function(getattr(state, n)) for n in state.per_rank})
        mean, sent = self.transformation.update(alone(moved), each(alone, sent))
        return jax.tree_util.tree_map(lambda x: x * ranks, mean), each(lambda x: lax.psum(x, inner), sent)


def _moved(fragment: Fragment, both: Both) -> Any:
    """A centre's outer gradients."""
    start = fragment.take(both.outer if both.start is None else both.start)
    return jax.tree_util.tree_map(lambda x, y: _wide(x) - _wide(y), start, fragment.take(both.own))


def _wide(x: jax.Array) -> jax.Array:
    return x.astype(jnp.float32)


def _finite(tree: Any) -> jax.Array:
    return jnp.stack([jnp.isfinite(x).all() for x in jax.tree_util.tree_leaves(tree)]).all()


def _choose(condition: jax.Array, yes: Any, no: Any) -> Any:
    return jax.tree_util.tree_map(lambda x, y: jnp.where(condition, x, y), yes, no)
