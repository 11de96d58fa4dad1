"""Momentum of a rank's own gradients before they are sent. Raw leaves and weight decay get theirs after the mean."""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from jaxcgx.checks import check_flag, check_number, set_field, wrong
from jaxcgx.exchange.message import Carry
from jaxcgx.train.division import choose, zeros
from jaxcgx.train.exchange import At, Number, routes_of
from jaxcgx.train.feedback import Feedback
from jaxcgx.train.state import ExchangeState
from jaxcgx.typing import Params, PyTree


@dataclasses.dataclass(frozen=True)
class Momentum(Feedback):
    """A `Feedback` with momentum before the exchange (DGC's momentum correction).

    Every rank sends u = momentum * u + gradient instead of its gradient, so that elements that are sent late have
    momentum, too. The optimizer behind it should have no momentum. Leaves that always travel raw get their momentum
    after the reduction. Where the mean or the new u is not finite, u keeps its old value. `momentum` and `weight_decay`
    may be arrays, too.

    Args:
      plan: as in `Feedback`.
      momentum: the factor, from 0 to below 1.
      nesterov: whether to use Nesterov's momentum: u = momentum * (u + gradient), and u + gradient is sent.
      masking: whether u becomes 0 where TopK sent an element (DGC), so that stale momentum isn't used again.
      weight_decay: weight_decay * parameters is added to the mean. It has its own momentum, with the same factor, as
        weight decay has in an optimizer with momentum.
      weight_decay_mask: the parameters that have weight decay: a tree of bools like the parameters, a prefix of such a
        tree, or a function from the parameters to one. None: all.
    The other arguments are those of `Feedback`.
    """

    momentum: Number = 0.9
    _: dataclasses.KW_ONLY
    nesterov: bool = False
    masking: bool = False
    weight_decay: Number | None = None
    weight_decay_mask: PyTree | Callable[[Params], PyTree] = None
    scatters: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        set_field(self, "nesterov", check_flag)
        set_field(self, "masking", check_flag)
        self._check_numbers(
            momentum=(check_number, lambda x: 0 <= x < 1, "a number from 0 to below 1"),
            weight_decay=(check_number, lambda x: x >= 0, "a number of at least 0"),
        )
        if self.weight_decay is None and self.weight_decay_mask is not None:
            raise wrong(self.op, "weight_decay_mask", "None without 'weight_decay'", repr(self.weight_decay_mask))
        if self.masking and not self.keep:
            raise wrong(self.op, "keep", "True with 'masking'", False)
        if self.masking and not any("momentum" in codec.state for codec in self._codecs):
            expected = "False without jaxcgx.TopK(ratio < 1), the codec that sends some elements and not others"
            raise wrong(self.op, "masking", expected, True)

    def init(self, params: Params) -> ExchangeState:
        state, (first, *others) = super().init(params), routes_of(self.op, self.phases, params)
        momentum = zeros(first.carry(others, momentum=True).momentum)
        both = zip(first.leaves, first.each(momentum))
        traced = [not route.skipped and (self.weight_decay is not None or u is None) for route, u in both]
        trace = [jnp.zeros(route.shape, route.dtype) if has else None for route, has in zip(first.leaves, traced)]
        own = Carry(state.own.residuals, momentum)
        return ExchangeState(own, state.shared._replace(trace=first.tree.unflatten(trace)))

    def begin(self, grads: PyTree, state: ExchangeState, at: At) -> tuple[Any, ExchangeState]:
        leaves, tree = jax.tree.flatten(grads)
        before = state.own.momentum
        both = [self._accelerate(u, g) for u, g in zip(tree.flatten_up_to(before), leaves)]
        moved, terms = (tree.unflatten(each) for each in (zip(*both) if both else ((), ())))
        sent, state = super().begin(terms, ExchangeState(Carry(state.own.residuals, moved), state.shared), at)
        return sent._replace(momentum=before), state

    def end(self, ticket: Any, state: ExchangeState, at: At, grads: PyTree = None) -> tuple[PyTree, ExchangeState]:
        if self.weight_decay is not None and at.params is None:
            expected = "the parameters with 'weight_decay'"
            raise wrong(self.op, "params", expected, None, "call update(gradients, state, params)")
        moved, old = state.own.momentum, state.shared.trace
        given = Carry(state.own.residuals, moved if self.masking else None)
        mean, new = super().end(ticket, ExchangeState(given, state.shared), at)
        leaves, tree = jax.tree.flatten(mean)
        before, after = map(tree.flatten_up_to, (ticket.momentum, new.own.momentum if self.masking else moved))
        held = [_hold(*each) for each in zip(before, after, leaves)]
        parts = zip(tree.flatten_up_to(old), held, leaves, self._decayed(tree, at.params))
        both = [self._accelerate_mean(*each) for each in parts]
        trace, final = (tree.unflatten(each) for each in (zip(*both) if both else ((), ())))
        momentum = tree.unflatten(held)
        if self.skip_nonfinite:
            good = at.nonfinite(self.op, mean) == 0
            momentum, trace = choose(good, (momentum, trace), (ticket.momentum, old))
        return final, ExchangeState(Carry(new.own.residuals, momentum), new.shared._replace(trace=trace))

    def _accelerate(self, u: Any, g: jax.Array) -> tuple[Any, jax.Array]:
        """Returns (the new momentum of a leaf, what is sent for its gradient). With None, the gradient is unchanged."""
        if u is None:
            return u, g
        rate, new = jnp.asarray(self.momentum, u.dtype), g.astype(u.dtype)
        u = rate * (u + new) if self.nesterov else rate * u + new
        return u, (u + new if self.nesterov else u).astype(g.dtype)

    def _accelerate_mean(
        self, trace: jax.Array | None, u: jax.Array | None, x: jax.Array, p: jax.Array | None
    ) -> tuple[jax.Array | None, jax.Array]:
        """Applies momentum after the exchange: to the mean of a leaf that always travels raw, and to weight decay.

        `trace` is the momentum that is the same on every rank; None: the leaf has none. `u` is the momentum of this
        rank's own gradients; None: the leaf always travels raw, and its mean `x` gets momentum. `p` is the parameter;
        None: it has no weight decay.
        """
        if trace is None:
            return trace, x
        rest = x if u is None else jnp.zeros_like(x)
        if p is not None:
            rest = rest + (jnp.asarray(self.weight_decay, p.dtype) * p).astype(x.dtype)
        moved, moving = self._accelerate(trace, rest)
        return jnp.where(jnp.isfinite(moved), moved, trace), moving if u is None else x + moving

    def _decayed(self, tree: Any, params: Params) -> list[jax.Array | None]:
        """Returns for each leaf the parameter if it has weight decay, else None."""
        if self.weight_decay is None:
            return [None] * tree.num_leaves
        leaves, mask = tree.flatten_up_to(params), self.weight_decay_mask
        if mask is None:
            return leaves
        mask = mask(params) if callable(mask) else mask
        try:
            chosen = tree.flatten_up_to(jax.tree.broadcast(mask, params))
        except ValueError as error:
            raise wrong(self.op, "weight_decay_mask", "a tree of bools like the parameters", repr(mask)) from error
        return [p if keep else None for p, keep in zip(leaves, chosen)]


def _hold(old: jax.Array | None, new: jax.Array | None, mean: jax.Array) -> jax.Array | None:
    """Returns the new momentum of a leaf, or the old momentum where the mean or the new momentum is not finite.

    Otherwise, an overflow would stay in the momentum forever. The mean doesn't always show an overflow: TopK sends only
    some elements of an overflowing leaf, as NaN.
    """
    return new if new is None or old is None else jnp.where(jnp.isfinite(mean) & jnp.isfinite(new), new, old)
