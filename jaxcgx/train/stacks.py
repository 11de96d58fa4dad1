"""Stacks of matrices, so that ZeRO-1 keeps each matrix whole on one rank."""

import math
import re
from typing import Any

import jax
import jax.numpy as jnp

from jaxcgx.checks import check_integer
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
      names: the names of the stacks, such as "stack 256x1024", in the dicts that `stack` returns.
    """

    def __init__(self, params: Params, *, ranks: int = 1, leave: str | None = None) -> None:
        check_integer("Stacks", "ranks", ranks, 1)
        leaves, self._structure = jax.tree_util.tree_flatten_with_path(params)
        self._ranks: int = ranks
        self._places: list[str] = []  # for each leaf, the name of its array in a dict
        dtypes = dict[Any, Any]()
        for path, x in leaves:
            name = spell_path(path)
            if x.ndim == 2 and not (leave and re.search(leave, name)):
                name = f"stack {'x'.join(map(str, x.shape))}"
                if dtypes.setdefault(name, x.dtype) != x.dtype:
                    name += f" {x.dtype}"
            self._places.append(name)
        self.names: tuple[str, ...] = tuple(dict.fromkeys(n for n in self._places if n.startswith("stack ")))

    def stack(self, params: Params) -> dict[str, jax.Array]:
        """Returns {name of a stack, or path of another leaf: array} of `params`."""
        rows = dict[str, list[jax.Array]]()
        for name, x in zip(self._places, self._structure.flatten_up_to(params)):
            rows.setdefault(name, []).append(x)
        return {name: self._pile(found) if name in self.names else found[0] for name, found in rows.items()}

    def _pile(self, rows: list[jax.Array]) -> jax.Array:
        length = self._ranks * math.ceil(len(rows) / self._ranks)
        return jnp.stack(rows + [jnp.zeros_like(rows[0])] * (length - len(rows)))

    def unstack(self, stacked: dict[str, jax.Array]) -> Params:
        """Returns the parameters of `stacked`, which has the names of a dict that `stack` returned."""
        rows = {name: iter(stacked[name]) for name in self.names}
        return self._structure.unflatten([next(rows[n]) if n in rows else stacked[n] for n in self._places])
