"""Momentum of a rank's own gradients before they are sent. Raw leaves and weight decay get theirs after the mean."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxcgx.checks import wrong
from jaxcgx.optim.leaves import Leaves
from jaxcgx.optim.settings import Settings


class Accelerated(NamedTuple):
    """The momentum of a leaf after a gradient was added, and the new gradient."""

    momentum: Any  # None for a leaf without momentum
    gradient: jax.Array  # takes the place of the gradient that was added


def accelerate(settings: Settings, u: Any, g: jax.Array) -> Accelerated:
    """Adds a gradient to the momentum `u` of a leaf. None: the leaf has no momentum, and the gradient is unchanged."""
    if u is None:
        return Accelerated(u, g)
    rate, new = jnp.asarray(settings.momentum, u.dtype), g.astype(u.dtype)
    u = rate * (u + new) if settings.nesterov else rate * u + new
    return Accelerated(u, (u + new if settings.nesterov else u).reshape(g.shape).astype(g.dtype))


def hold(old: Any, new: Any, mean: jax.Array) -> jax.Array | None:
    """Returns the new momentum of a leaf, or the old momentum where the mean or the new momentum is not finite.

    Otherwise, an overflow would stay in the momentum forever. The mean doesn't always show an overflow: TopK sends only
    some elements of an overflowing leaf, as NaN.
    """
    return None if new is None else jnp.where(jnp.isfinite(mean) & jnp.isfinite(new), new, old)


def decayed(settings: Settings, grads: Leaves, params: Any) -> list[Any]:
    """Returns for each leaf the parameter if it has weight decay, else None."""
    if settings.weight_decay is None or settings.weight_decay_mask is None:
        return grads.match(params)
    mask = settings.weight_decay_mask(params) if callable(settings.weight_decay_mask) else settings.weight_decay_mask
    try:
        chosen = grads.structure.flatten_up_to(jax.tree_util.tree_broadcast(mask, params))
    except ValueError as error:
        expected = "a tree of bools like the parameters"
        raise wrong(settings.function, "weight_decay_mask", expected, repr(mask)) from error
    return [p if keep else None for p, keep in zip(grads.match(params), chosen)]


def accelerate_mean(settings: Settings, trace: Any, u: Any, x: jax.Array, p: Any) -> Accelerated:
    """Applies momentum after the exchange: to the mean of a leaf that always travels raw, and to weight decay.

    Args:
      settings: the arguments of compress_gradients.
      trace: the momentum that is the same on every rank. None: the leaf has none.
      u: the momentum of this rank's own gradients. None: the leaf always travels raw, and its mean gets momentum here.
      x: the mean.
      p: the parameter. None: it has no weight decay.
    """
    if trace is None:
        return Accelerated(trace, x)
    rest = x if u is None else jnp.zeros_like(x)
    if p is not None:
        rest = rest + (jnp.asarray(settings.weight_decay, p.dtype) * p).astype(x.dtype)
    moved = accelerate(settings, trace, rest)
    after = jnp.where(jnp.isfinite(moved.momentum), moved.momentum, trace)
    return Accelerated(after, moved.gradient if u is None else x + moved.gradient)
