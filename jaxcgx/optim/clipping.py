"""Clipping of every rank's own gradients, before momentum and before they are sent (DGC)."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxcgx import _compat
from jaxcgx.checks import check_positive
from jaxcgx.optim.settings import check_hyperparameter


@dataclasses.dataclass(frozen=True, kw_only=True)
class Clipping:
    """The limits of `dgc`, whose docstring explains them. None: no limit."""

    clip_value: Any
    clip_norm: Any
    clip_global_norm: Any

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            limit = getattr(self, field.name)
            if limit is not None:
                check_hyperparameter("dgc", field.name, limit, check_positive)

    def clip(self, grads: Any, names: tuple[Any, ...], ranks: int) -> Any:
        """Returns this rank's gradients, clipped. There are `ranks` ranks, along the axes `names`."""
        square = lambda g: _square(g, names)
        if (limit := self.clip_value) is not None:
            grads = _map(lambda g: jnp.clip(g, jnp.asarray(-limit, g.dtype), jnp.asarray(limit, g.dtype)), grads)
        if (norm := self.clip_norm) is not None:
            grads = _map(lambda g: g * _scale(norm, square(g)).astype(g.dtype), grads)
        if self.clip_global_norm is not None:
            # In the paper, ranks sum gradients that are already divided by the number of ranks N, and clip them to
            # N^-1/2 times the limit. Here gradients are not divided yet, so the bound is N times larger.
            limit = self.clip_global_norm * math.sqrt(ranks)
            share = _scale(limit, sum(map(square, jax.tree_util.tree_leaves(grads))))
            grads = _map(lambda g: g * share.astype(g.dtype), grads)
        return grads


def _map(change: Callable[..., Any], grads: Any) -> Any:
    return jax.tree_util.tree_map(lambda g: change(g).astype(g.dtype), grads)


def _scale(limit: Any, squares: Any) -> jax.Array:
    """Returns the factor that reduces a norm to at most `limit`. `squares` is the square of the norm."""
    return jnp.minimum(1, limit / jnp.maximum(jnp.sqrt(squares), jnp.finfo(jnp.float32).tiny))


def _square(g: jax.Array, names: tuple[Any, ...]) -> jax.Array:
    """Returns the sum of a leaf's squares over all of its shards.

    The shards are along the axes of the mesh other than `names`, the axes of the ranks.
    """
    g = jnp.abs(g) if jnp.issubdtype(g.dtype, jnp.complexfloating) else g
    found = jnp.square(g.astype(jnp.float32)).sum()
    shards = tuple(sorted(_compat.varying_axes(found) - set(names), key=str))  # in the same order in every process
    return lax.psum(found, shards) if shards else found
