"""Converts optimizer states with arrays per rank to another number of ranks."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxcgx.checks import check_integer
from jaxcgx.optim.accumulation import addable
from jaxcgx.optim.model_state import fold
from jaxcgx.optim.nesting import has_rows


def reshard_state(opt_state: Any, new_size: int) -> Any:
    """Returns an optimizer's state, converted to another number of ranks.

    Residuals keep their sum over ranks. If the number of samples per rank stays the same, the delayed part of a
    sample's gradient then counts as much as a new gradient. Momentum keeps its mean over ranks, which is the momentum
    of the mean gradient. Both are spread evenly over the new ranks. In a model's state per rank (`make_train_step`),
    floating-point arrays keep their mean, other numbers are the first rank's, and random keys are folded with the new
    ranks.

    The new arrays per rank are NumPy arrays, except random keys. Put the state on the new mesh, and the parameters too:

        jax.device_put(state, jax.tree.map(lambda spec: NamedSharding(mesh, spec), cgx.state_specs(state, axis_name)))

    Args:
      opt_state: the state.
      new_size: the new number of ranks.
    """
    size = check_integer("reshard_state", "new_size", new_size, 1)

    def reshard(node: Any) -> Any:
        if not has_rows(node):
            return node
        field = lambda name, keep: jax.tree_util.tree_map(functools.partial(spread, size, keep), getattr(node, name))
        found = {name: field(name, keep) for name, keep in node.per_rank.items()}
        return node._replace(**found)

    return jax.tree_util.tree_map(reshard, opt_state, is_leaf=has_rows)


def spread(size: int, keep: str, rows: Any) -> Any:
    """Returns `size` equal rows with the same sum (`keep` "sum") or mean over ranks as `rows`, or zeros ("zeros").

    `reshard_state` explains the rows of integers, flags and random keys.
    """
    if keep == "zeros":
        return (np if addable(rows) else jnp).zeros((size, *rows.shape[1:]), rows.dtype)
    if rows.shape[0] == size:
        return rows
    if not addable(rows):
        ranks = jnp.arange(size)
        return jax.vmap(fold)(rows[ranks % rows.shape[0]], ranks)
    if not jnp.issubdtype(rows.dtype, jnp.inexact):
        return np.broadcast_to(np.asarray(rows[0]), (size, *rows.shape[1:]))
    total = jnp.asarray(rows, jnp.float32 if rows.dtype.itemsize < 4 else rows.dtype).sum(0)
    each = total / (size if keep == "sum" else rows.shape[0])
    return np.broadcast_to(np.asarray(each.astype(rows.dtype)), (size, *each.shape))
