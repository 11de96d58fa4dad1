"""Parameters that a plan skips: they are held out of differentiation and of the optimizer."""

from typing import Any

import jax

from jaxcgx.optim.accumulation import OP
from jaxcgx.optim.phases import check_phases
from jaxcgx.optim.require import import_optax


def find_skipped(plan: Any, shards: Any) -> Any:
    """For each parameter whether a plan skips it: a tree like `shards`, what a device has of the parameters.

    Of a schedule, any plan says it: compress_gradients wants them to skip the same leaves. Without a plan, nothing is
    skipped.
    """
    if plan is None:
        return jax.tree_util.tree_map(lambda _: False, shards)
    return check_phases(OP, plan)[0].plan.skipped(OP, "plan", shards)


def part(tree: Any, skipped: Any) -> tuple[Any, Any]:
    """(what is trained, what is frozen) of a tree. Each has optax's hole, which is no leaf, in place of the other."""
    hole = import_optax(OP).MaskedNode()
    take = lambda wanted: jax.tree_util.tree_map(lambda x, skip: x if skip == wanted else hole, tree, skipped)
    return take(False), take(True)


def join(trained: Any, frozen: Any) -> Any:
    """The tree that `part` parted."""
    hole = import_optax(OP).MaskedNode
    is_hole = lambda x: isinstance(x, hole)
    return jax.tree_util.tree_map(lambda x, y: y if is_hole(x) else x, trained, frozen, is_leaf=is_hole)
