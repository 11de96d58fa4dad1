"""Ranks as a mapped axis (vmap) of one program, which XLA's partitioner distributes over the axes of a mesh."""

from typing import Any

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxcgx import _compat
from jaxcgx.train.batch import axes_of, is_spec
from jaxcgx.train.division import Function, OverMesh
from jaxcgx.typing import PyTree, Specs


class OverMapped(OverMesh):
    """The ranks of another division, but with `vmap` in place of `shard_map`.

    JAX knows no manual axes in it. The partitioner leaves each rank's part of the arrays on the rank's devices.
    """

    def __init__(self, division: OverMesh) -> None:
        super().__init__(division.mesh, division.names)

    def over(self, function: Function, in_specs: Specs, out_specs: Specs) -> Function:
        def run(*args: PyTree) -> PyTree:
            leaves, tree = jax.tree_util.tree_flatten(args)
            specs = tree.flatten_up_to(jax.tree_util.tree_broadcast(in_specs, args, is_leaf=is_spec))
            each = lambda *leaves: function(*tree.unflatten(leaves))
            out_axes = jax.tree_util.tree_map(lambda spec: 0 if any(spec) else None, out_specs, is_leaf=is_spec)
            for name in reversed(self.names):
                axes = [0 if any(name in axes_of(part) for part in spec) else None for spec in specs]
                each = jax.vmap(each, axes, out_axes, axis_name=name, axis_size=self.sizes[name], spmd_axis_name=name)
            with _compat.mapped_ranks(self.names):
                found = each(*map(self._parts, leaves, specs))
            join = lambda x: self._placed(x.reshape(-1, *x.shape[len(self.names) + 1 :]), P(self.names))
            return jax.tree_util.tree_map(
                lambda spec, part: jax.tree_util.tree_map(join, part) if any(spec) else part,
                out_specs,
                found,
                is_leaf=is_spec,
            )

        if not self.explicit:
            return run
        return jax.sharding.auto_axes(run, out_sharding=self.shardings(out_specs))

    def _parts(self, x: jax.Array, spec: P) -> jax.Array:
        """Returns an array with an axis for each axis of ranks that splits it, and then the dimensions of a part."""
        if not any(spec):
            return x
        shape, lead = list[int](), list[tuple[Any, int]]()
        for d, size in enumerate(x.shape):
            for name in axes_of(spec[d]) if d < len(spec) else ():
                lead.append((name, len(shape)))
                shape.append(self.sizes[name])
                size //= self.sizes[name]
            shape.append(size)
        lead.sort(key=lambda pair: self.names.index(pair[0]))
        rest = [d for d in range(len(shape)) if d not in dict(lead).values()]
        parts = x.reshape(shape).transpose(*(d for _, d in lead), *rest)
        return self._placed(parts, P(*(name for name, _ in lead)))

    def _placed(self, x: jax.Array, spec: P) -> jax.Array:
        """Returns x, whose first dimensions are sharded over the ranks. The partitioner chooses the others."""
        spec = P(*spec, *[P.UNCONSTRAINED] * (x.ndim - len(spec)))
        mesh = jax.sharding.get_abstract_mesh() if self.explicit else self.mesh
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))
