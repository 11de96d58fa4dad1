"""States of optimizers with arrays per rank, moved to another number of ranks."""

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
    """An optimizer's state for another number of ranks.

    Residuals keep their sum over ranks: what a sample's gradient lost then counts as much as a new gradient on a rank
    with equally many samples. Momentum keeps its mean, which is that of the mean gradient. Both are spread evenly. A
    model's state per rank (`make_train_step`) keeps the mean of its floating point and the first rank's other numbers,
    and its random keys are folded with the new ranks.

    The new arrays per rank are NumPy's. Put them where the new mesh wants them, and the parameters too:

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
    """`size` equal rows with the sum, or the mean, of `rows`; of what is no floating point, see `reshard_state`."""
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
