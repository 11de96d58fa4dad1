"""Steps whose mean is not finite everywhere, in which nothing of the state may change."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxcgx import _compat


def count_nonfinite(mean: list[jax.Array]) -> Any:
    """How many leaves are not finite somewhere, the same number on all ranks and shards."""
    bad = sum((~jnp.isfinite(x)).any().astype(jnp.int32) for x in mean)
    # The axes of the mesh that the gradients are sharded over, in the same order in every process.
    shards = tuple(sorted(_compat.varying_axes(bad), key=str))
    return lax.psum(bad, shards) if shards else bad


def unless(bad: Any, new: Any, old: Any) -> Any:
    """The new tree, or the old one where `bad` is not 0."""
    return jax.tree_util.tree_map(lambda n, o: jnp.where(bad == 0, n, o), new, old)
