"""Steps whose mean is not finite everywhere. They must not change the state."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxcgx import _compat


def count_nonfinite(mean: list[jax.Array]) -> Any:
    """Returns the number of leaves with an element that is not finite. It is the same on all ranks and shards."""
    bad = sum((~jnp.isfinite(x)).any().astype(jnp.int32) for x in mean)
    # The axes of the mesh over which the gradients are sharded, in the same order in every process.
    shards = tuple(sorted(_compat.varying_axes(bad), key=str))
    return lax.psum(bad, shards) if shards else bad


def unless(bad: Any, new: Any, old: Any) -> Any:
    """Returns the new tree, or the old tree if `bad` is not 0."""
    return jax.tree_util.tree_map(lambda n, o: jnp.where(bad == 0, n, o), new, old)
