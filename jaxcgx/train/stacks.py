"""Stacks of matrices, so that ZeRO-1 keeps each matrix whole on one rank."""

import re
from typing import Any

import jax
import jax.numpy as jnp

from jaxcgx.checks import check_integer, check_pattern, spell_array, wrong
from jaxcgx.plan.leaves import spell_path
from jaxcgx.typing import Params


class Stacks:
    """Parameters whose matrices of equal shape and dtype are stacked, for optimizers that multiply matrices.

    Along its first dimension a stack can be sharded, and each matrix stays whole:

        stacks = cgx.Stacks(params, ranks=4, leave="embed|head")
        stacked = stacks.stack(params)
        specs = cgx.shard_specs(stacked, mesh) | dict.fromkeys(stacks.names, P("data"))

    Args:
      params: a pytree of arrays or jax.ShapeDtypeStruct.
      ranks: a stack gets rows of zeros until its length is a multiple of `ranks`.
      leave: a regular expression. Matrices whose path contains a match aren't stacked.

    Attributes:
      names: the names of the stacks, such as "stack 256x1024 float32", in the dicts that `stack` returns.
    """

    def __init__(self, params: Params, *, ranks: int = 1, leave: str | None = None) -> None:
        check_integer("Stacks", "ranks", ranks, 1)
        check_pattern("Stacks", "leave", leave)
        leaves, self._structure = jax.tree.flatten_with_path(params)
        self._types: list[str] = [_spell(x) for _, x in leaves]
        self._places: list[str] = []  # for each leaf, the name of its array in a dict
        lengths = dict[str, int]()
        for path, x in leaves:
            name = spell_path(path)
            if stacked := getattr(x, "ndim", 0) == 2 and not (leave and re.search(leave, name)):
                name = "stack {}x{} {}".format(*x.shape, x.dtype)
            if name in self._places and not (stacked and name in lengths):
                raise wrong("Stacks", "params", "leaves with other names", repr(name), "rename one of them", path=path)
            self._places.append(name)
            if stacked:
                lengths[name] = lengths.get(name, 0) + 1
        self.names: tuple[str, ...] = tuple(lengths)
        self._lengths: dict[str, int] = {name: length + -length % ranks for name, length in lengths.items()}

    def stack(self, params: Params) -> dict[str, jax.Array]:
        """Returns {name of a stack, or path of another leaf: array} of `params`."""
        leaves, structure = jax.tree.flatten(params)
        types = [_spell(x) for x in leaves]
        if structure != self._structure or types != self._types:
            expected, got = self._structure.unflatten(self._types), structure.unflatten(types)
            raise wrong("Stacks.stack", "params", f"the tree of Stacks, {expected}", got)
        rows = dict[str, list[Any]]()
        for name, x in zip(self._places, leaves):
            rows.setdefault(name, []).append(x)
        pile = lambda found, length: jnp.stack(found + [jnp.zeros_like(found[0])] * (length - len(found)))
        lengths = self._lengths
        return {name: pile(found, lengths[name]) if name in lengths else found[0] for name, found in rows.items()}

    def unstack(self, stacked: dict[str, jax.Array]) -> Params:
        """Returns the parameters of `stacked`, which has the names and shapes of a dict that `stack` returned."""
        names = dict.fromkeys(self._places)
        got = {name: len(stacked[name]) for name in self.names} if {*stacked} == {*names} else list(stacked)
        if got != self._lengths:
            raise wrong("Stacks.unstack", "stacked", f"a dict of {list(names)}, with stacks of {self._lengths}", got)
        rows = {name: iter(stacked[name]) for name in self.names}
        return self._structure.unflatten([next(rows[n]) if n in rows else stacked[n] for n in self._places])


def _spell(x: Any) -> str:
    return spell_array(x if hasattr(x, "dtype") else jnp.asarray(x))
