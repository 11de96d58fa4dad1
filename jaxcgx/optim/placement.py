"""How a training step is placed on a mesh: batches are split over some axes, parameters are sharded over the others."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxcgx.checks import wrong
from jaxcgx.collectives.splitting import check_spans
from jaxcgx.optim.accumulation import OP
from jaxcgx.optim.specs import specs_per_rank
from jaxcgx.transports.axes import axis_names, check_axis_names


class Cut(NamedTuple):
    """For each leaf of the parameters, the dimension that is sharded over the ranks, or None."""

    structure: Any  # of the parameters; None where nothing is sharded
    dimensions: tuple[int | None, ...]

    def __bool__(self) -> bool:
        return any(d is not None for d in self.dimensions)

    @property
    def given(self) -> list[int]:
        """The dimensions of the leaves that are sharded."""
        return [d for d in self.dimensions if d is not None]

    @property
    def axis(self) -> Any:
        """The dimensions as a tree, with None for leaves that are whole."""
        return self.structure.unflatten(self.dimensions)

    def pick(self, tree: Any) -> Any:
        """A tree with None for leaves that are whole."""
        values = self.structure.flatten_up_to(tree)
        return self.structure.unflatten([None if d is None else x for d, x in zip(self.dimensions, values)])


@dataclasses.dataclass(frozen=True)
class Placement:
    """A mesh, and what is split over its axes. `make_train_step` explains the fields."""

    mesh: Any
    data_axis: Any
    param_specs: Any
    optimizer_specs: Any = None

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
        for argument in ("param_specs", "optimizer_specs"):
            for path, spec in _flatten(getattr(self, argument))[0]:
                self._check_spec(argument, path, spec)
        if self.optimizer_specs is not None:
            self._check_optimizer_specs()

    def _check_spec(self, argument: str, path: Any, spec: Any) -> None:
        if not isinstance(spec, P):
            raise wrong(OP, argument, "a jax.sharding.PartitionSpec", repr(spec), path=path, kind=TypeError)
        mixed = any(set(_names(part)) & set(self.names) and _names(part) != self.names for part in spec)
        if mixed or sum(_names(part) == self.names for part in spec) > 1:
            expected = f"{self.data_axis!r} for one dimension at most, and there alone"
            remedy = "" if len(self.names) == 1 else "a dimension is sharded over all of these axes, in their order"
            raise wrong(OP, argument, expected, spec, remedy, path=path)

    def _check_optimizer_specs(self) -> None:
        """Checks that the optimizer's state is sharded as its parameters are, or over the ranks beside."""
        found, tree = _flatten(self.optimizer_specs)
        params = [P()] * len(found) if self.param_specs is None else [spec for _, spec in _flatten(self.param_specs)[0]]
        if self.param_specs is not None and _flatten(self.param_specs)[1] != tree:
            raise wrong(OP, "optimizer_specs", f"a tree like param_specs, {_flatten(self.param_specs)[1]}", tree)
        for (path, spec), param in zip(found, params):
            if spec != param and (_dimension(param, self.names) is not None or self._whole(spec) != self._whole(param)):
                expected = f"that of the parameter, {param}, or that one with {self.data_axis!r}"
                raise wrong(OP, "optimizer_specs", expected, spec, path=path)

    def _whole(self, spec: P) -> P:
        """The spec over the other axes."""
        return _shortest(P(*(None if _names(part) == self.names else part for part in spec)))

    @property
    def whole_specs(self) -> Any:
        """The PartitionSpecs of parameters over the other axes; None where they are not sharded."""
        specs = self.state_specs
        return specs and jax.tree_util.tree_map(self._whole, specs, is_leaf=lambda x: isinstance(x, P))

    @property
    def state_specs(self) -> Any:
        """The PartitionSpecs of what an optimizer's state has for parameters; None where they are not sharded."""
        return self.param_specs if self.optimizer_specs is None else self.optimizer_specs

    @property
    def params(self) -> Cut:
        """How parameters are sharded over the ranks."""
        cut = self.state
        if self.param_specs is None:
            return cut._replace(dimensions=(None,) * len(cut.dimensions))
        return self._cut(self.param_specs)

    @property
    def state(self) -> Cut:
        """How the optimizer's state is sharded over the ranks."""
        return self._cut(self.state_specs)

    def _cut(self, specs: Any) -> Cut:
        found, structure = _flatten(specs)
        return Cut(structure, tuple(_dimension(spec, self.names) for _, spec in found))

    def over_ranks(self, cut: Cut) -> Any:
        """The specs of a shard_map over the ranks for a tree like the parameters."""
        if not cut:
            return P()
        of = lambda d: P() if d is None else P(*[None] * d, self.names)
        return cut.structure.unflatten(map(of, cut.dimensions))

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

    def init_per_rank(self, init: Callable[..., Any], params: Any) -> tuple[Callable[..., Any], Any]:
        """A transformation's `init`, called for the mesh with whole parameters; and the PartitionSpecs of its state."""
        specs = self.whole_specs or jax.tree_util.tree_map(lambda _: P(), params)
        shard = lambda x, sharding: jax.ShapeDtypeStruct(sharding.shard_shape(x.shape), x.dtype)
        shards = jax.tree_util.tree_map(shard, params, self.shardings(specs))
        found = specs_per_rank(jax.eval_shape(init, shards), self.names, specs)
        zeros = lambda x: jnp.zeros(x.shape, x.dtype)  # nothing reads them
        first = lambda: init(jax.tree_util.tree_map(zeros, shards))
        return jax.shard_map(first, mesh=self.mesh, in_specs=(), out_specs=found), found

    def specs_of_state(self, optimizer: Any, params: Any) -> Any:
        """The PartitionSpecs of an optimizer's state: arrays like a parameter, and at its path, have the parameter's.

        Any specs give right numbers, because the partitioner adds what an optimizer needs.
        """
        specs = self.state_specs or jax.tree_util.tree_map(lambda _: P(), params)
        known = {
            (path, x.shape): spec
            for (path, x), (_, spec) in zip(jax.tree_util.tree_flatten_with_path(params)[0], _flatten(specs)[0])
        }

        def spec_of(path: Any, x: Any) -> P:
            ends = ((path[i:], x.shape) for i in range(len(path) + 1))
            return next((known[end] for end in ends if end in known), P())

        return jax.tree_util.tree_map_with_path(spec_of, jax.eval_shape(optimizer.init, params))

    def by_partitioner(self, function: Callable[..., Any], specs: Any) -> Callable[..., Any]:
        """A function whose results are sharded as `specs` say. XLA's partitioner splits its work, and adds sums."""
        shardings = self.shardings(specs)
        if AxisType.Explicit in self.mesh.axis_types:
            return jax.sharding.auto_axes(function, out_sharding=shardings)
        return lambda *args: lax.with_sharding_constraint(function(*args), shardings)

    def update_shards(self, update: Callable[..., Any], grads: Any, state: Any, params: Any) -> Any:
        """A transformation's `update` inside a step of one rank, called for the shards over the other axes."""
        whole = self.whole_specs
        if whole is None or not self.others:
            return update(grads, state, params)
        specs = whole, specs_per_rank(state, None, whole)
        given = None if params is None else whole
        on_shards = jax.shard_map(update, in_specs=(*specs, given), out_specs=specs, axis_names=self.others)
        return on_shards(grads, state, params)


def _flatten(specs: Any) -> tuple[list[tuple[Any, Any]], Any]:
    return jax.tree_util.tree_flatten_with_path(specs, is_leaf=lambda x: isinstance(x, P))


def _names(part: Any) -> tuple[Any, ...]:
    """The axes of one dimension of a spec."""
    return () if part is None else part if isinstance(part, tuple) else (part,)


def _dimension(spec: P, names: tuple[Any, ...]) -> int | None:
    """The dimension that these axes shard, or None."""
    return next((d for d, part in enumerate(spec) if _names(part) == names), None)


def _shortest(spec: P) -> P:
    """The spec without dimensions at its end that no axis shards."""
    parts = list(spec)
    while parts and parts[-1] in (None, ()):
        parts.pop()
    return P(*parts)
