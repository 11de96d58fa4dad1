"""A pytree as lists with an entry for each leaf, and the codecs that encode each leaf."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxcgx.checks import check_array, wrong
from jaxcgx.codecs.base import Codec
from jaxcgx.optim.settings import Settings
from jaxcgx.plan import Plan, why_raw
from jaxcgx.plan.by_axis import skips


class Leaves(NamedTuple):
    """A flattened pytree."""

    paths: list[Any]  # the JAX path of each leaf
    values: list[Any]  # arrays, or jax.ShapeDtypeStructs
    structure: Any  # jax.tree_util.PyTreeDef

    def tree(self, values: list[Any]) -> Any:
        """Returns a tree of this structure with other values."""
        return self.structure.unflatten(values)

    def match(self, field: Any) -> list[Any]:
        """Returns the entries of a tree like this one as a list. For None, returns a list with None for every leaf."""
        return [None] * len(self.values) if field is None else self.structure.flatten_up_to(field)


def flatten(tree: Any) -> Leaves:
    """Returns a pytree, flattened."""
    found, structure = jax.tree_util.tree_flatten_with_path(tree)
    return Leaves([path for path, _ in found], [leaf for _, leaf in found], structure)


def check_arrays(function: str, argument: str, tree: Any) -> Any:
    """Returns the tree, after a check that its leaves are arrays or jax.ShapeDtypeStructs. Numbers become arrays."""
    shaped = lambda leaf: hasattr(leaf, "shape") and hasattr(leaf, "dtype")
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: leaf if shaped(leaf) else check_array(function, argument, leaf, path), tree
    )


def check_real(function: str, argument: str, tree: Any) -> None:
    """Checks that no leaf is complex, for functions that compute with their leaves in float32."""
    for path, x in jax.tree_util.tree_flatten_with_path(tree)[0]:
        if jnp.issubdtype(x.dtype, jnp.complexfloating):
            remedy = "keep the real and the imaginary part as two leaves"
            raise wrong(function, argument, "real numbers", x.dtype, remedy, path=path, kind=TypeError)


def loose(plan: Plan) -> Plan:
    """Returns the plan for use with only some leaves, where a rule that matches no leaf is no error."""
    return dataclasses.replace(plan, rules=[dataclasses.replace(rule, optional=True) for rule in plan.rules])


def encoders(settings: Settings, plan: Plan, leaves: Leaves) -> list[list[Codec] | None]:
    """Returns for each leaf the list of codecs that encode it, outermost axis first.

    The list is empty if the leaf travels raw. In place of the list is None if the plan skips the leaf.
    """
    if not leaves.values:  # optax may pass a tree without leaves, where the plan's rules match nothing
        return []
    names, found = settings.ranks.levels, list[list[Codec] | None]()
    assigned = plan.assign(settings.function, "plan", paths=leaves.paths, leaves=leaves.values)
    for leaf, (codec, guarded) in zip(leaves.values, assigned):
        codecs = [codec] if isinstance(codec, Codec) else [codec[name] for name in names if name in codec]
        found.append(None if skips(codec) else [] if guarded or why_raw(leaf, codecs) else codecs)
    return found
