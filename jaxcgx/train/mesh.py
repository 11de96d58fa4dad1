"""The devices along axes of a mesh as the ranks of a step. Every rank has whole parameters."""

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
from jaxcgx.exchange.resolve import check_axes
from jaxcgx.train.batch import OP, REMEDY, STEP, axes_of, check_batch_specs, check_even, flatten_specs, split_batch
from jaxcgx.train.cut import shortest
from jaxcgx.train.division import Division, Function, row
from jaxcgx.train.splitting import Ranks, check_spans
from jaxcgx.train.state import ExchangeState, Sharding
from jaxcgx.transports.axes import axis_names, check_axis_names, crosses
from jaxcgx.transports.base import Transport
from jaxcgx.typing import AxisName, Batch, Params, Specs


class OverMesh(Division):
    """The ranks along axes of a mesh. `Division` documents the members."""

    names: tuple[Any, ...]
    rows: P
    size: int
    crosses: bool
    mesh: Any
    axis: AxisName
    others: set[Any]  # the axes that are left to XLA's partitioner
    explicit: bool

    def __init__(self, mesh: Any, axis: AxisName, batch_specs: Specs = None) -> None:
        super().__init__(batch_specs)
        self.mesh, self.axis = mesh, axis
        self.names, self.crosses = axis_names(axis), crosses(axis)
        self.rows = P(self.names)
        self.size = math.prod(mesh.shape[name] for name in self.names)
        self.others = {name for name in mesh.shape if name not in self.names}
        self.explicit = AxisType.Explicit in mesh.axis_types

    @property
    def remedy(self) -> str:
        return f"shard the state over {self.axis!r}; a state of another number of ranks is for jaxcgx.reshard_state"

    def net(self) -> Transport:
        return check_axes(OP, self.axis)

    def numbers(self) -> jax.Array:
        return jnp.arange(self.size)

    def guesses(self, parts: int) -> bool:
        return False

    def check_batch(self, batch: Batch) -> None:
        """Refuses arrays that jit would misread.

        If the mesh has several processes, jit would take arrays of one process for the whole batch. On an Auto mesh, a
        traced step can't see shardings, so it would split every array along the first dimension.
        """
        leaves = jax.tree_util.tree_flatten_with_path(batch)[0]
        check_spans(STEP, self.mesh, self.names, leaves=leaves)
        if self.batch_specs is not None or self.explicit:
            return
        for (path, x), (_, spec) in zip(leaves, flatten_specs(self._specs_of_batch(batch))[0]):
            if np.ndim(x) and spec != self.rows:
                expected = "arrays that are split along their first dimension, where no specs say otherwise"
                raise wrong(STEP, "batch", expected, f"one sharded as {x.sharding.spec}", REMEDY, path=path)

    def place(self, batch: Batch, parts: int) -> tuple[Batch, Specs]:
        batch = jax.tree_util.tree_map(jnp.asarray, batch)
        specs = self._specs_of_batch(batch)
        check_even(batch, specs, self.mesh.shape)
        if self.explicit:  # over Explicit axes, shard_map doesn't move arrays
            placed = jax.tree_util.tree_map(lambda spec: P() if self.auto(spec) else spec, specs)
            batch = jax.tree_util.tree_map(jax.sharding.reshard, batch, self.shardings(placed))
        return batch, specs

    def _specs_of_batch(self, batch: Batch) -> Specs:
        said = Ranks(OP, self.mesh, self.names).spec_of_batch
        return split_batch(batch, self.batch_specs, self.rows, said=said)

    def auto(self, spec: P) -> list[Any]:
        """Returns the axes of a spec that are Auto."""
        types = dict(zip(self.mesh.axis_names, self.mesh.axis_types))
        return [name for part in spec for name in axes_of(part) if types[name] == AxisType.Auto]

    def over(self, function: Function, in_specs: Specs, out_specs: Specs) -> Function:
        # Without check_vma, which refuses loops that start from zeros in a loss.
        return jax.shard_map(
            function,
            mesh=self.mesh,
            axis_names=set(self.names),
            in_specs=in_specs,
            out_specs=out_specs,
            check_vma=False,
        )

    def shardings(self, specs: Specs) -> Any:
        # They are spelled like the shardings of jit's results. Otherwise the second step, which gets the results of the
        # first, would be compiled again.
        return jax.tree_util.tree_map(lambda spec: NamedSharding(self.mesh, shortest(spec)), specs)

    def by_partitioner(self, function: Function, specs: Specs) -> Function:
        shardings = self.shardings(specs)
        if self.explicit:
            return jax.sharding.auto_axes(function, out_sharding=shardings)
        return lambda *args: lax.with_sharding_constraint(function(*args), shardings)

    def over_devices(self, function: Function, specs: Callable[[], Specs]) -> Function:
        return self.by_partitioner(function, specs()) if self.explicit else function

    def specs_of_state(self, state: Any, params: Params, specs: Specs) -> Specs:
        """Returns the specs of an optimizer's state.

        An array gets the spec of a parameter if it has the parameter's shape, and its path ends with the parameter's
        path. Other arrays are whole. The specs don't affect the results, because XLA's partitioner adds the collectives
        that an optimizer needs.
        """
        known = like(params, specs)
        return jax.tree_util.tree_map_with_path(lambda path, x: known(path, x.shape) or P(), state)

    def init_exchange(self, init: Any, params: Params) -> ExchangeState:
        shards = self.shards(params)
        zeros = lambda: jax.tree_util.tree_map(lambda x: jnp.zeros(x.shape, x.dtype), shards)

        def fresh() -> ExchangeState:
            sent = init(zeros())
            return ExchangeState(row(sent.own), sent.shared)

        specs = self.specs_of_exchange(fresh, shards)
        return jax.shard_map(fresh, mesh=self.mesh, in_specs=(), out_specs=specs, check_vma=False)()

    def specs_of_exchange(self, fresh: Callable[[], ExchangeState], params: Params) -> Specs:
        """Returns the specs of the state that `fresh` makes for shards of parameters."""
        return ExchangeState(self.rows, P())


def like(params: Params, specs: Specs) -> Any:
    """Returns a function (path, shape) -> the spec of the parameter with this shape whose path is the path's end."""
    leaves = jax.tree_util.tree_flatten_with_path(params)[0]
    known = {(path, x.shape): spec for (path, x), (_, spec) in zip(leaves, flatten_specs(specs)[0])}
    return lambda path, shape: next(
        (known[end] for end in ((path[i:], shape) for i in range(len(path) + 1)) if end in known), None
    )


def check_mesh(mesh: Any, sharding: Sharding) -> None:
    """Checks a mesh, and the axes and the specs of a batch over it."""
    if not isinstance(mesh, Mesh):
        raise wrong(OP, "mesh_or_comm", "a jax.sharding.Mesh or an MPI communicator", repr(mesh), kind=TypeError)
    names = axis_names(sharding.axis) and check_axis_names(OP, sharding.axis, "sharding.axis")
    if not names or any(name not in mesh.shape for name in names):
        expected = f"an axis of the mesh, {', '.join(map(repr, mesh.shape))}, or a tuple of them"
        raise wrong(OP, "sharding.axis", expected, repr(sharding.axis))
    other = [name for name in mesh.shape if name not in names and mesh.shape[name] > 1]
    if other and crosses(sharding.axis):  # XLA crashes on ordered effects in a shard_map over the other axes
        plain = names[0] if len(names) == 1 else names
        expected = f"names of axes on a mesh with another axis, {other[0]!r}"
        raise wrong(OP, "sharding.axis", expected, repr(sharding.axis), f"write {plain!r}")
    if other and sharding.params is None:
        expected = (
            "a tree of PartitionSpecs like the parameters for a mesh with other axes than "
            f"{sharding.axis!r}, which says how they are sharded over them"
        )
        raise wrong(OP, "sharding.params", expected, None)
    check_batch_specs(sharding.batch, names)
