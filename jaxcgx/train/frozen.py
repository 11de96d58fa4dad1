"""Frozen parameters, which a plan skips. They are not differentiated, and the optimizer doesn't see them."""

import jax

from jaxcgx.typing import PyTree


def part(tree: PyTree, skipped: PyTree) -> tuple[PyTree, PyTree]:
    """Returns (the trained leaves, the frozen leaves) of a tree, as two trees.

    Each tree has optax.MaskedNode() in place of the other tree's leaves. It is a node without leaves.
    """
    from optax import MaskedNode  # an optional dependency

    hole = MaskedNode()
    take = lambda wanted: jax.tree_util.tree_map(lambda x, skip: x if skip == wanted else hole, tree, skipped)
    return take(False), take(True)


def join(trained: PyTree, frozen: PyTree) -> PyTree:
    """Returns the tree that `part` has split."""
    from optax import MaskedNode

    is_hole = lambda x: isinstance(x, MaskedNode)
    return jax.tree_util.tree_map(lambda x, y: y if is_hole(x) else x, trained, frozen, is_leaf=is_hole)
