"""Frozen parameters, which a plan skips. They are not differentiated, and the optimizer doesn't see them."""

from typing import Any

import jax

from jaxcgx.optim.accumulation import OP
from jaxcgx.optim.phases import check_phases
from jaxcgx.optim.require import import_optax


def find_skipped(plan: Any, shards: Any) -> Any:
    """Returns for each parameter whether a plan skips it, as a tree like `shards`.

    All plans of a schedule skip the same leaves (compress_gradients checks this). Without a plan, nothing is skipped.

    Args:
      plan: a plan, a schedule of plans, or None.
      shards: the shapes of a device's shards of the parameters.
    """
    if plan is None:
        return jax.tree_util.tree_map(lambda _: False, shards)
    return check_phases(OP, plan)[0].plan.skipped(OP, "plan", shards)


def part(tree: Any, skipped: Any) -> tuple[Any, Any]:
    """Returns (the trained leaves, the frozen leaves) of a tree, as two trees.

    Each tree has optax.MaskedNode() in place of the other tree's leaves. It is a node without leaves.
    """
    hole = import_optax(OP).MaskedNode()
    take = lambda wanted: jax.tree_util.tree_map(lambda x, skip: x if skip == wanted else hole, tree, skipped)
    return take(False), take(True)


def join(trained: Any, frozen: Any) -> Any:
    """Returns the tree that `part` has split."""
    hole = import_optax(OP).MaskedNode
    is_hole = lambda x: isinstance(x, hole)
    return jax.tree_util.tree_map(lambda x, y: y if is_hole(x) else x, trained, frozen, is_leaf=is_hole)
