"""Steps whose mean is not finite everywhere. They must not change the state."""

from typing import Any

import jax
import jax.numpy as jnp


def unless(bad: Any, new: Any, old: Any) -> Any:
    """Returns the new tree, or the old tree if `bad` is not 0."""
    return jax.tree_util.tree_map(lambda n, o: jnp.where(bad == 0, n, o), new, old)
