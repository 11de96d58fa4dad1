"""Arrays with a row for each rank, among the nodes of any tree, and their conversion to another number of ranks."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxcgx.checks import check_integer, wrong
from jaxcgx.train.division import addable
from jaxcgx.train.exchange import keeps
from jaxcgx.train.model_state import fold_keys
from jaxcgx.train.state import ExchangeState, Pending, PerRank
from jaxcgx.typing import PyTree


def has_rows(node: Any) -> bool:
    """Returns whether a node of a state has fields with a row for each rank."""
    return isinstance(node, ExchangeState | PerRank | Pending)


def rows_keep(tree: PyTree) -> PyTree:
    """Returns a tree like this one, which says of each array what its rows keep for another number of ranks.

    It is the "sum" or the "mean" over the ranks, or "zeros": nothing. "" is for arrays without rows.
    """
    all_of = lambda what, part: jax.tree_util.tree_map(lambda _: what, part)

    def of_node(node: Any) -> Any:
        if isinstance(node, ExchangeState):
            return ExchangeState(keeps(node.own), all_of("", node.shared))
        if isinstance(node, Pending):
            return Pending(all_of("mean", node.grads), all_of("zeros", node.ticket), "", node.order)
        return all_of("mean" if isinstance(node, PerRank) else "", node)

    return jax.tree_util.tree_map(of_node, tree, is_leaf=has_rows)


def reshard_state(state: PyTree, new_size: int) -> PyTree:
    """Returns a state, converted to another number of ranks.

    Residuals keep their sum over ranks. If the number of samples per rank stays the same, the delayed part of a
    sample's gradient then counts as much as a new gradient. Momentum keeps its mean over ranks, which is the momentum
    of the mean gradient. Both are spread evenly over the new ranks. In a model's state per rank (`make_train_step`),
    floating-point arrays keep their mean, other numbers are the first rank's, and random keys are folded with the new
    ranks.

    The new arrays per rank are NumPy arrays, except random keys. The others are copies, so a step that donates the new
    state leaves the old one alone. For the number of ranks that the state has already, the result is the state itself.
    Put the state on the new mesh:

        jax.device_put(state, jax.tree.map(lambda spec: NamedSharding(mesh, spec), cgx.state_specs(state, axis_name)))

    Args:
      state: a `TrainState`, or an optimizer's state with that of compress_gradients at any depth.
      new_size: the new number of ranks.
    """
    size = check_integer("reshard_state", "new_size", new_size, 1)
    is_pending = lambda node: isinstance(node, Pending)
    for node in filter(is_pending, jax.tree_util.tree_leaves(state, is_leaf=is_pending)):
        if node.ticket is not None:
            expected, got = "a state whose gradients have arrived", "one whose gradients are on their way"
            raise wrong("reshard_state", "state", expected, got, "call train.finish(state) before")
    kept = rows_keep(state)
    of_ranks = [x for keep, x in zip(*map(jax.tree_util.tree_leaves, (kept, state))) if keep]
    if of_ranks and all(x.shape[0] == size for x in of_ranks):
        return state
    # A step may donate the new state, so no array in it may be one of the given state's.
    own = lambda x: x.copy() if isinstance(x, np.ndarray | jax.Array) else x
    return jax.tree_util.tree_map(lambda keep, x: spread(size, keep, x) if keep else own(x), kept, state)


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
        return jax.vmap(fold_keys)(rows[ranks % rows.shape[0]], ranks)
    if not jnp.issubdtype(rows.dtype, jnp.inexact):
        return np.broadcast_to(np.asarray(rows[0]), (size, *rows.shape[1:]))
    total = jnp.asarray(rows, jnp.float32 if rows.dtype.itemsize < 4 else rows.dtype).sum(0)
    each = total / (size if keep == "sum" else rows.shape[0])
    return np.broadcast_to(np.asarray(each.astype(rows.dtype)), (size, *each.shape))
