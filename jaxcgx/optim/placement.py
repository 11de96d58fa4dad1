"""The placement of a training step on a mesh: how batches, parameters and the optimizer's state are split over axes."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxcgx.checks import wrong
from jaxcgx.collectives.splitting import Ranks, check_spans
from jaxcgx.optim.accumulation import OP
from jaxcgx.optim.alone import Alone
from jaxcgx.optim.batch import REMEDY, STEP, check_batch_specs, check_even, split_batch
from jaxcgx.optim.cut import Cut, axes_of, beside, check_optimizer_specs, check_specs, flatten_specs, shortest
from jaxcgx.optim.frozen import part
from jaxcgx.optim.specs import specs_per_rank, state_specs
from jaxcgx.transports.axes import axis_names, check_axis_names, crosses, is_communicator


@dataclasses.dataclass(frozen=True)
class Placement:
    """A mesh, and the arrays that are split over its axes. `make_train_step` explains the fields."""

    mesh: Any
    data_axis: Any
    param_specs: Any
    optimizer_specs: Any = None
    batch_specs: Any = None

    def __post_init__(self) -> None:
        mesh = self.mesh
        if not isinstance(mesh, Mesh):
            expected = "a jax.sharding.Mesh, or none with an MPI communicator as 'data_axis'"
            raise wrong(OP, "mesh", expected, repr(mesh), kind=TypeError)
        names = self.names and check_axis_names(OP, self.data_axis, "data_axis")
        if not names or any(name not in mesh.shape for name in names):
            expected = f"an axis of the mesh, {', '.join(map(repr, mesh.shape))}, or a tuple of them"
            raise wrong(OP, "data_axis", expected, repr(self.data_axis))
        wide = [name for name in mesh.shape if name in self.others and mesh.shape[name] > 1]
        if wide and crosses(self.data_axis):  # XLA crashes on ordered effects in a shard_map over the other axes
            plain = names[0] if len(names) == 1 else names
            expected = f"names of axes on a mesh with another axis, {wide[0]!r}"
            raise wrong(OP, "data_axis", expected, repr(self.data_axis), f"write {plain!r}")
        if wide and self.param_specs is None:
            raise wrong(
                OP,
                "param_specs",
                "a tree of PartitionSpecs like the parameters for a mesh with other axes than "
                f"{self.data_axis!r}, which says how they are sharded over them",
                None,
            )
        check_specs("param_specs", self.param_specs, names)
        if self.optimizer_specs is not None:
            check_specs("optimizer_specs", self.optimizer_specs, names)
            check_optimizer_specs(self.optimizer_specs, self.param_specs, names)
        for path, spec in flatten_specs(self.state_specs)[0] if self._explicit else ():
            if auto := self._auto(spec):
                expected = (
                    "a mesh whose axes are all Auto, or all Explicit, where parameters or state are sharded over it"
                )
                remedy = f"make it with axis_types=(jax.sharding.AxisType.Explicit,) * {len(mesh.shape)}"
                raise wrong(OP, "mesh", expected, f"one with {auto[0]!r} Auto and others Explicit", remedy, path=path)
        check_batch_specs(self.batch_specs, names)

    @property
    def state_specs(self) -> Any:
        """The PartitionSpecs of the optimizer's state, a tree like the parameters. None: nothing is sharded."""
        return self.param_specs if self.optimizer_specs is None else self.optimizer_specs

    @property
    def whole_specs(self) -> Any:
        """The PartitionSpecs of parameters over the axes that are not the ranks'. None: nothing is sharded."""
        specs, whole = self.state_specs, lambda spec: beside(spec, self.names)
        return None if specs is None else jax.tree_util.tree_map(whole, specs, is_leaf=lambda x: isinstance(x, P))

    @property
    def params(self) -> Cut:
        """The cut of the parameters into shards for the ranks."""
        return Cut.of(self.whole_specs if self.param_specs is None else self.param_specs, self.names)

    @property
    def state(self) -> Cut:
        """The cut of gradients, updates and the optimizer's state into shards for the ranks."""
        return Cut.of(self.state_specs, self.names)

    @property
    def names(self) -> tuple[Any, ...]:
        """The axes of the ranks, over which batches are split, outermost first."""
        return axis_names(self.data_axis)

    @property
    def others(self) -> set[Any]:
        """The other axes of the mesh, which are left to XLA's partitioner."""
        return {name for name in self.mesh.shape if name not in self.names}

    @property
    def ranks(self) -> int:
        return math.prod(self.mesh.shape[name] for name in self.names)

    def check_batch(self, batch: Any) -> None:
        """Refuses arrays that jit would misread.

        If the mesh has several processes, jit would take arrays of one process for the whole batch. On an Auto mesh, a
        traced step can't see shardings, so it would split every array along the first dimension.
        """
        leaves = jax.tree_util.tree_flatten_with_path(batch)[0]
        check_spans(STEP, self.mesh, self.names, leaves=leaves)
        if self.batch_specs is not None or self._explicit:
            return
        for (path, x), (_, spec) in zip(leaves, flatten_specs(self._specs_of_batch(batch))[0]):
            if np.ndim(x) and spec != self.rows:
                expected = "arrays that are split along their first dimension, where batch_specs don't say otherwise"
                raise wrong(STEP, "batch", expected, f"one sharded as {x.sharding.spec}", REMEDY, path=path)

    def shardings(self, specs: Any) -> Any:
        """Returns a tree of NamedShardings for a tree of PartitionSpecs.

        They are spelled like the shardings of jit's results. Otherwise the second step, which gets the results of the
        first, would be compiled again.
        """
        return jax.tree_util.tree_map(lambda spec: NamedSharding(self.mesh, shortest(spec)), specs)

    def specs_of(self, params: Any) -> Any:
        """Returns the PartitionSpecs of the parameters, a tree like them."""
        return jax.tree_util.tree_map(lambda _: P(), params) if self.param_specs is None else self.param_specs

    @property
    def rows(self) -> P:
        """The PartitionSpec of arrays with a row for each rank."""
        return P(self.names)

    @property
    def params_of_rank(self) -> Any:
        """The PartitionSpecs of the parameters, in a shard_map over the axes of the ranks."""
        return self.params.specs(self.names) if self.params else P()

    def gradients_of_rank(self, skipped: Any) -> Any:
        """Returns the PartitionSpecs of the mean gradients that a rank gets back, in a shard_map over the ranks' axes.

        `skipped` says for each parameter whether it is frozen.
        """
        return part(self.state.specs(self.names), skipped)[0] if self.state else P()

    def specs_of_rows(self, sent: Any) -> Any:
        """Returns the PartitionSpecs of `sent`, the state of the transformation that exchanges gradients."""
        return state_specs(sent, self.data_axis)

    def place_batch(self, batch: Any, accumulate: int) -> tuple[Any, Any]:
        """Returns (the batch, placed as the ranks need it; its PartitionSpecs).

        `accumulate` is the number of micro-batches.
        """
        batch = jax.tree_util.tree_map(jnp.asarray, batch)
        specs = self._specs_of_batch(batch)
        check_even(batch, specs, self.mesh.shape)
        if self._explicit:  # over Explicit axes, shard_map doesn't move arrays
            placed = jax.tree_util.tree_map(lambda spec: P() if self._auto(spec) else spec, specs)
            batch = jax.tree_util.tree_map(jax.sharding.reshard, batch, self.shardings(placed))
        return batch, specs

    def _specs_of_batch(self, batch: Any) -> Any:
        said = Ranks(OP, self.mesh, self.names).spec_of_batch
        return split_batch(batch, self.batch_specs, self.rows, said=said)

    @property
    def _explicit(self) -> bool:
        return AxisType.Explicit in self.mesh.axis_types

    def _auto(self, spec: P) -> list[Any]:
        """Returns the axes of a spec that are Auto."""
        types = dict(zip(self.mesh.axis_names, self.mesh.axis_types))
        return [name for part in spec for name in axes_of(part) if types[name] == AxisType.Auto]

    def over_ranks(
        self, function: Callable[..., Any], *, in_specs: Any, out_specs: Any, check_vma: bool = True
    ) -> Callable[..., Any]:
        """Returns a function that runs a function of one rank on all ranks."""
        return jax.shard_map(
            function,
            mesh=self.mesh,
            axis_names=set(self.names),
            in_specs=in_specs,
            out_specs=out_specs,
            check_vma=check_vma,
        )

    def specs_of_updates(self, params: Any) -> Any:
        """Returns the PartitionSpecs of the updates that an optimizer makes from gradients."""
        return jax.tree_util.tree_map(lambda _: P(), params) if self.state_specs is None else self.state_specs

    def freeze(self, skipped: Any) -> "Placement":
        """Returns the placement with frozen parameters, which have no optimizer state to shard.

        `skipped` says for each parameter whether it is frozen.
        """
        if self.optimizer_specs is None:
            return self
        specs = self.specs_of(skipped)
        choose = lambda skip, spec, own: own if skip else spec
        return dataclasses.replace(
            self, optimizer_specs=jax.tree_util.tree_map(choose, skipped, self.optimizer_specs, specs)
        )

    def shards(self, params: Any) -> Any:
        """Returns the shapes of a device's shards of the gradients before the exchange, a tree like the parameters."""
        specs = jax.tree_util.tree_map(lambda _: P(), params) if self.whole_specs is None else self.whole_specs
        shard = lambda x, sharding: jax.ShapeDtypeStruct(sharding.shard_shape(x.shape), x.dtype)
        return jax.tree_util.tree_map(shard, params, self.shardings(specs))

    def init_per_rank(self, init: Callable[..., Any], params: Any) -> Any:
        """Returns the state from a transformation's `init`, which must depend only on the shapes of parameters."""
        shards = self.shards(params)
        found = specs_per_rank(jax.eval_shape(init, shards), self.names, self.whole_specs)
        zeros = lambda: jax.tree_util.tree_map(lambda x: jnp.zeros(x.shape, x.dtype), shards)
        return jax.shard_map(lambda: init(zeros()), mesh=self.mesh, in_specs=(), out_specs=found)()

    def specs_of_state(self, optimizer: Any, params: Any, specs: Any) -> Any:
        """Returns the PartitionSpecs of an optimizer's state.

        An array gets the spec of a parameter if it has the parameter's shape, and its path ends with the parameter's
        path. Other arrays are whole. The specs don't affect the results, because XLA's partitioner adds the collectives
        that an optimizer needs.

        Args:
          optimizer: the optimizer.
          params: the parameters that the optimizer gets.
          specs: the PartitionSpecs of the updates of these parameters.
        """
        found = jax.tree_util.tree_flatten_with_path(params)[0]
        known = {(path, x.shape): spec for (path, x), (_, spec) in zip(found, flatten_specs(specs)[0])}

        def spec_of(path: Any, x: Any) -> P:
            ends = ((path[i:], x.shape) for i in range(len(path) + 1))
            return next((known[end] for end in ends if end in known), P())

        return jax.tree_util.tree_map_with_path(spec_of, jax.eval_shape(optimizer.init, params))

    def by_partitioner(self, function: Callable[..., Any], specs: Any) -> Callable[..., Any]:
        """Returns the function, but with results that are sharded by `specs`.

        XLA's partitioner divides its work among the devices, and adds the collectives.
        """
        shardings = self.shardings(specs)
        if self._explicit:
            return jax.sharding.auto_axes(function, out_sharding=shardings)
        return lambda *args: lax.with_sharding_constraint(function(*args), shardings)

    def in_place(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the function, such that XLA can write its results in place of the arrays that a step gets."""
        return function

    def update_shards(
        self, update: Callable[..., Any], grads: Any, state: Any, params: Any, extra: dict[str, Any]
    ) -> Any:
        """Calls a transformation's `update` for the shards over the other axes, inside a step of one rank.

        `extra` are the extra arguments of `update`, which are the same for all shards.
        """
        whole = self.whole_specs
        if whole is None or not self.others:
            return update(grads, state, params, **extra)
        specs = whole, specs_per_rank(state, None, whole)
        given = None if params is None else whole
        on_shards = jax.shard_map(
            lambda grads, state, params, extra: update(grads, state, params, **extra),
            in_specs=(*specs, given, P()),
            out_specs=specs,
            axis_names=self.others,
        )
        return on_shards(grads, state, params, extra)


def check_placement(
    mesh: Any, data_axis: Any, *, param_specs: Any, optimizer_specs: Any, batch_specs: Any
) -> Placement | Alone:
    """Returns the placement on a mesh, or in a process of a communicator."""
    if not is_communicator(data_axis):
        return Placement(mesh, data_axis, param_specs, optimizer_specs=optimizer_specs, batch_specs=batch_specs)
    for argument, given in {"mesh": mesh, "param_specs": param_specs, "optimizer_specs": optimizer_specs}.items():
        if given is not None:
            expected = "none with a communicator as 'data_axis', whose processes have a device each"
            raise wrong(OP, argument, expected, repr(given), "leave it out, or pass the mesh's axis as 'data_axis'")
    return Alone(data_axis, batch_specs)
