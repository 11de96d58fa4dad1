"""How a training step is placed on a mesh: batches are split over some axes, parameters are sharded over the others."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxcgx.checks import wrong
from jaxcgx.collectives.splitting import check_spans
from jaxcgx.optim.accumulation import OP
from jaxcgx.optim.require import import_optax
from jaxcgx.optim.specs import specs_per_rank
from jaxcgx.transports.axes import axis_names, check_axis_names


@dataclasses.dataclass(frozen=True)
class Placement:
    """A mesh, and what is split over its axes. `make_train_step` explains the fields."""

    mesh: Any
    data_axis: Any
    param_specs: Any

    def __post_init__(self) -> None:
        mesh = self.mesh
        if not isinstance(mesh, Mesh):
            raise wrong(OP, "mesh", "a jax.sharding.Mesh", repr(mesh), kind=TypeError)
        names = self.names and check_axis_names(OP, self.data_axis, "data_axis")
        if not names or any(name not in mesh.shape for name in names):
            expected = f"an axis of the mesh, {', '.join(map(repr, mesh.shape))}, or a tuple of them"
            raise wrong(OP, "data_axis", expected, repr(self.data_axis))
        if self.param_specs is None and any(mesh.shape[name] > 1 for name in self.others):
            raise wrong(
                OP,
                "param_specs",
                "a tree of PartitionSpecs like the parameters for a mesh with other axes than "
                f"{self.data_axis!r}, which says how they are sharded over them",
                None,
            )
        for spec in jax.tree_util.tree_leaves(self.param_specs, is_leaf=lambda x: isinstance(x, P)):
            if any(name in names for part in spec for name in (part if isinstance(part, tuple) else (part,))):
                raise wrong(
                    OP,
                    "param_specs",
                    f"parameters that are whole on every rank of {self.data_axis!r}",
                    spec,
                    "docs/meshes.md shows how to train weights that are sharded over it",
                )

    @property
    def names(self) -> tuple[Any, ...]:
        """The axes that batches are split over, outermost first."""
        return axis_names(self.data_axis)

    @property
    def others(self) -> set[Any]:
        """The other axes of the mesh, which XLA's partitioner gets."""
        return {name for name in self.mesh.shape if name not in self.names}

    @property
    def ranks(self) -> int:
        return math.prod(self.mesh.shape[name] for name in self.names)

    def check_batch(self, batch: Any) -> None:
        """Refuses the arrays of one process where the mesh has several: jit would take them for the whole batch."""
        leaves = jax.tree_util.tree_flatten_with_path(batch)[0]
        check_spans("train.step", self.mesh, self.names, leaves=leaves)

    def shardings(self, specs: Any) -> Any:
        """A tree of PartitionSpecs as one of NamedShardings, spelled as jit spells those of results.

        Otherwise the second step, which gets the results of the first, would be compiled anew.
        """
        return jax.tree_util.tree_map(lambda spec: NamedSharding(self.mesh, _shortest(spec)), specs)

    def specs_of(self, params: Any) -> Any:
        """The PartitionSpecs of the parameters."""
        return jax.tree_util.tree_map(lambda _: P(), params) if self.param_specs is None else self.param_specs

    def shards(self, params: Any) -> Any:
        """The shapes of what a device has of the parameters."""
        shard = lambda x, sharding: jax.ShapeDtypeStruct(sharding.shard_shape(x.shape), x.dtype)
        return jax.tree_util.tree_map(shard, params, self.shardings(self.specs_of(params)))

    def init_per_rank(self, init: Callable[..., Any], params: Any) -> tuple[Callable[..., Any], Any]:
        """A transformation's `init`, called for the mesh with whole parameters; and the PartitionSpecs of its state."""
        specs = self.specs_of(params)
        found = specs_per_rank(jax.eval_shape(init, self.shards(params)), self.names, specs)
        return jax.shard_map(init, mesh=self.mesh, in_specs=(specs,), out_specs=found), found

    def optimizer_specs(self, optimizer: Any, params: Any, specs: Any) -> Any:
        """The PartitionSpecs of an optimizer's state for parameters of these specs: arrays like them have theirs."""
        found = jax.tree_util.tree_map(lambda _: P(), jax.eval_shape(optimizer.init, params))
        if self.param_specs is None:
            return found
        take = lambda _, spec: spec
        return import_optax(OP).tree_map_params(optimizer, take, found, specs, transform_non_params=lambda _: P())

    def update_shards(self, update: Callable[..., Any], grads: Any, state: Any, params: Any) -> Any:
        """A transformation's `update` inside a step of one rank, called for the shards over the other axes."""
        if self.param_specs is None:
            return update(grads, state, params)
        specs = self.param_specs, specs_per_rank(state, None, self.param_specs)
        on_shards = jax.shard_map(update, in_specs=(*specs, self.param_specs), out_specs=specs, axis_names=self.others)
        return on_shards(grads, state, params)


def _shortest(spec: P) -> P:
    """The spec without dimensions at its end that no axis shards."""
    parts = list(spec)
    while parts and parts[-1] in (None, ()):
        parts.pop()
    return P(*parts)
