"""How the arguments of a step are split: a batch over the ranks, and on each rank into micro-batches."""

import dataclasses
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.tree_util import KeyPath

from jaxcgx.checks import spell_array, wrong
from jaxcgx.transports.axes import check_axis_names
from jaxcgx.typing import ArrayLike, AxisName, Batch, Params, PyTree, Specs

OP, STEP = "make_train_step", "train.step"
Names = tuple[Any, ...]  # the names of mesh axes
REMEDY = (
    "pass sharding=Sharding(batch=...) to make_train_step: a tree like the batch, with P() where every rank has the "
    "whole array"
)
FILL = "leave out the examples that are over, or fill up and give those the weight 0 (weighted=True)"
ARGUMENT = "sharding.batch"


def is_spec(x: object) -> bool:
    return isinstance(x, P)


def flatten_specs(specs: Specs) -> tuple[list[tuple[Any, Any]], PyTree]:
    """Returns ([(path, spec)], structure) of a tree of specs."""
    return jax.tree_util.tree_flatten_with_path(specs, is_leaf=is_spec)


def axes_of(part: Any) -> Names:
    """Returns the axes in `part`, the entry of a spec for one dimension."""
    return () if part is None else part if isinstance(part, tuple) else (part,)


def shortest(spec: P) -> P:
    """Returns the spec without its last dimensions that no axis shards."""
    parts = list(spec)
    while parts and parts[-1] in (None, ()):
        parts.pop()
    return P(*parts)


def check_axes(function: str, argument: str, names: Names, mesh: Any) -> None:
    """Checks that these are axes of a mesh."""
    if missing := [name for name in names if name not in mesh.shape]:
        expected = f"an axis of the mesh, {', '.join(map(repr, mesh.shape))}, or a tuple of them"
        raise wrong(function, argument, expected, repr(missing[0]))


def axes_over(function: str, mesh: Any, axis: AxisName, argument: str) -> Names:
    """Returns the names of the axes of the ranks, after a check of `mesh_or_comm`, which is no communicator."""
    if not isinstance(mesh, Mesh):
        expected = "a jax.sharding.Mesh or an MPI communicator"
        raise wrong(function, "mesh_or_comm", expected, repr(mesh), kind=TypeError)
    names = check_axis_names(function, axis, argument)
    check_axes(function, argument, names, mesh)
    return names


def check_batch_specs(specs: Specs, names: Names) -> None:
    """Checks that `specs` are PartitionSpecs over the axes of the ranks, `names`.

    Over MPI, `names` is (), and any axes are allowed.
    """
    for path, spec in flatten_specs(specs)[0]:
        if not isinstance(spec, P):
            expected = "a PartitionSpec, or a tree of them like the batch"
            raise wrong(OP, ARGUMENT, expected, repr(spec), path=path, kind=TypeError)
        if other := [name for part in spec for name in axes_of(part) if names and name not in names]:
            expected = f"PartitionSpecs over {', '.join(map(repr, names))}, as other axes are the partitioner's"
            raise wrong(OP, ARGUMENT, expected, repr(other[0]), path=path)
        if any(list(axes_of(part)) != sorted(axes_of(part), key=names.index) for part in spec if names):
            raise wrong(OP, ARGUMENT, f"axes in the order of {names}", spec, path=path)


def split_batch(batch: Batch, given: Specs, rows: P, said: Callable[[Any], P | None]) -> Specs:
    """Returns the PartitionSpecs of a batch's leaves. Scalars are whole.

    Without `given`, the caller's specs, a leaf is split as its sharding says: `said(leaf)` returns a spec over the axes
    of the ranks, or None if its sharding isn't known. Such leaves are split along their first dimension, as `rows`
    says. If no sharding splits any leaf, all leaves are split along their first dimension.
    """
    leaves, tree = jax.tree_util.tree_flatten_with_path(batch)
    if given is not None:
        return _filled(batch, given)
    known = [said(x) for _, x in leaves]
    if not any(spec is not None and any(spec) for spec in known):
        known = [None] * len(leaves)
    known = [spec if np.ndim(x) else P() for (_, x), spec in zip(leaves, known)]
    split = [leaf for leaf, spec in zip(leaves, known) if spec is None or (any(spec) and spec[0])]
    specs: list[P] = []
    for (path, x), spec in zip(leaves, known):
        is_like_first = np.ndim(x) and split and np.shape(x)[0] == np.shape(split[0][1])[0]
        if (spec is None and not is_like_first) or (np.ndim(x) and spec == P() and is_like_first):
            expected = "arrays that share their first dimension, that of the examples, and how it is split"
            is_key = any(spell_array(leaf) == "uint32[2]" for leaf in (split[0][1], x))
            remedy = REMEDY + ("; for a random key, jax.random.key, which is a scalar" if is_key else "")
            raise wrong(STEP, "batch", expected, _leaves(split[0], (path, x)), remedy)
        specs.append(rows if spec is None or (any(spec) and not any(spec[1:])) else spec)
    return tree.unflatten(specs)


def _leaves(*found: tuple[Any, Any]) -> str:
    return "leaves " + " and ".join(f"{jax.tree_util.keystr(path)} of {spell_array(x)}" for path, x in found)


def check_even(batch: Batch, specs: Specs, sizes: Mapping[Any, int]) -> None:
    """Checks that all ranks get equal parts of a batch. `sizes` has the number of ranks along each axis."""
    for (path, x), (_, spec) in zip(jax.tree_util.tree_leaves_with_path(batch), flatten_specs(specs)[0]):
        if len(spec) > x.ndim:
            raise wrong(OP, ARGUMENT, f"a PartitionSpec of at most {x.ndim} dimensions", spec, path=path)
        if (count := _uneven(x, spec, sizes)) is not None:
            expected = f"arrays that {count} ranks share evenly"
            remedy = f"{FILL}; for an array that is not split, {REMEDY}"
            raise wrong(STEP, "batch", expected, spell_array(x), remedy, path=path)


def _uneven(x: ArrayLike, spec: P, sizes: Mapping[Any, int]) -> int | None:
    """Returns a number of ranks that doesn't divide the dimension that is split over them, or None."""
    for size, part in zip(np.shape(x), spec):
        if size % (count := math.prod(map(sizes.__getitem__, axes_of(part)))):
            return count
    return None


def dimensions(specs: Specs) -> list[int | None]:
    """Returns for each leaf of a batch the dimension of the examples, or None if the leaf is whole."""
    return list(map(dimension, jax.tree_util.tree_leaves(specs, is_leaf=is_spec)))


def dimension(spec: P) -> int | None:
    """Returns the first dimension that is split, or None."""
    for d, part in enumerate(spec):
        if part:
            return d
    return None


def _filled(batch: Batch, given: Specs) -> Specs:
    """Returns the caller's specs as a tree like the batch. Scalars are whole."""
    try:
        specs = jax.tree_util.tree_broadcast(given, batch, is_leaf=is_spec)
    except (TypeError, ValueError) as error:
        expected = "a PartitionSpec, or a tree of them like the batch"
        raise wrong(OP, ARGUMENT, expected, given) from error
    return jax.tree_util.tree_map(lambda x, spec: spec if np.ndim(x) else P(), batch, specs)


@dataclasses.dataclass(frozen=True)
class Ranks:
    """The ranks along some axes of a mesh. XLA's partitioner handles the other axes. `op` is for errors."""

    op: str
    mesh: Any
    names: tuple[Any, ...]

    @classmethod
    def of(cls, op: str, mesh: Any, names: tuple[Any, ...], arrays: Sequence[Any]) -> "Ranks":
        """Makes the ranks of a mesh. If `mesh` is None, takes the mesh in context, or else the mesh of the arrays."""
        context = jax.sharding.get_abstract_mesh()
        known = [context, *(sharding.mesh for x in arrays if (sharding := _sharding(x)) is not None)]
        found = mesh if mesh is not None else next((each for each in known if not each.empty), None)
        if found is None:
            remedy = "pass mesh=, or call it under jax.set_mesh(mesh)"
            raise wrong(op, "mesh", "a mesh, where neither a context nor an argument has one", None, remedy)
        if not isinstance(found, Mesh | AbstractMesh):
            raise wrong(op, "mesh", "a jax.sharding.Mesh", repr(found), kind=TypeError)
        check_axes(op, "axis_name", names, found)
        return cls(op, found, names)

    @property
    def size(self) -> int:
        return math.prod(self.mesh.shape[name] for name in self.names)

    @property
    def others(self) -> frozenset[Any]:
        """The axes of the mesh that are not axes of the ranks and have several devices."""
        return frozenset(name for name, size in self.mesh.shape.items() if name not in self.names and size > 1)

    @property
    def explicit(self) -> bool:
        return AxisType.Explicit in self.mesh.axis_types

    def place(self, x: ArrayLike, spec: P) -> Any:
        """Reshards x as shard_map requires on an Explicit mesh. On an Auto mesh the partitioner does it."""
        return jax.sharding.reshard(x, NamedSharding(self.mesh, spec)) if self.explicit else x

    def spec_of_batch(self, x: ArrayLike) -> P | None:
        """Returns how an array that is no parameter is split over the ranks, or None if this isn't known."""
        if not np.ndim(x):
            return P()
        sharding = _sharding(x)
        return None if sharding is None or sharding.mesh.empty else self._over(sharding.spec, self.names)

    def specs_of_params(self, params: Params, param_specs: Specs) -> Specs:
        """Returns a tree like `params` of their specs over the other axes of the mesh."""
        if param_specs is not None:
            return self._given_specs(params, param_specs)

        def spec_of(path: KeyPath[Any], x: ArrayLike) -> P:
            sharding = _sharding(x)
            if sharding is None or sharding.mesh.empty:
                if self.others:
                    others = ", ".join(sorted(map(repr, self.others)))
                    expected = f"PartitionSpecs of the parameters over {others}, which their types don't say"
                    remedy = "pass a tree of them, or P() where parameters are not sharded"
                    raise wrong(self.op, "param_specs", expected, None, remedy, path=path)
                return P()
            if any(self._over(sharding.spec, self.names)):
                expected = f"parameters that are whole on every rank of {self._spelled()}"
                remedy = "docs/fsdp.md shows how to train weights that are sharded over it"
                got = f"one sharded as {tuple(sharding.spec)}"
                raise wrong(self.op, "params", expected, got, remedy, path=path)
            return self._over(sharding.spec, self.others)

        return jax.tree_util.tree_map_with_path(spec_of, params)

    def _given_specs(self, params: Params, param_specs: Specs) -> Specs:
        """Returns the caller's spec for every leaf of the parameters."""
        others = [name for name in self.mesh.shape if name not in self.names]
        try:
            specs = jax.tree_util.tree_broadcast(param_specs, params, is_leaf=lambda x: isinstance(x, P))
        except (TypeError, ValueError) as error:
            expected = "a PartitionSpec, or a tree of them like the parameters"
            raise wrong(self.op, "param_specs", expected, param_specs) from error

        def check(path: KeyPath[Any], x: ArrayLike, spec: P) -> P:
            self._check_spec("param_specs", path, x, spec, among=others)
            return self._over(spec, self.others)

        return jax.tree_util.tree_map_with_path(check, params, specs)

    def _check_spec(
        self, argument: str, path: KeyPath[Any], x: ArrayLike, spec: object, *, among: Sequence[Any]
    ) -> None:
        """Checks a caller's spec of an array. The spec may have only the axes `among`."""
        if not isinstance(spec, P) or len(spec) > np.ndim(x):
            expected = f"a PartitionSpec of at most {np.ndim(x)} dimensions for {spell_array(x)}"
            raise wrong(self.op, argument, expected, repr(spec), path=path)
        if other := [name for part in spec for name in axes_of(part) if name not in among]:
            expected = f"PartitionSpecs over {', '.join(map(repr, among)) or 'no axis'}"
            remedy = "the axes of the ranks are for batch_specs, the other axes of the mesh for param_specs"
            raise wrong(self.op, argument, expected, repr(other[0]), remedy, path=path)

    def check_batch(self, leaves: Sequence[tuple[Any, Any, P | None]]) -> list[P]:
        """Returns the specs of arrays, and checks them. `leaves` has (path, array, the caller's spec or None) of each.

        An array without a known spec is split along its first dimension. It must have as many examples as the other
        arrays.
        """
        op, argument, ranks = self.op, "batch_specs", self._spelled()
        for path, x, given in leaves:
            if given is not None:
                self._check_spec(argument, path, x, given, among=self.names)
        known = [self.spec_of_batch(x) if given is None else given for _, x, given in leaves]
        specs = [P(self.names) if spec is None else spec for spec in known]
        split = [i for i, spec in enumerate(specs) if any(spec)]
        if self.size > 1 and not split:
            remedy = (
                "pass the batch as an argument, not by a closure, and shard it: "
                f"jax.device_put(batch, NamedSharding(mesh, P({ranks}))), or pass batch_specs"
            )
            expected = f"an argument that is split over {ranks}"
            raise wrong(op, argument, expected, "none: every rank would compute the same", remedy)
        first = next((i for i in split if known[i] is not None), split[0] if split else 0)
        for (path, x, given), spec, said in zip(leaves, specs, known):
            other, batch = leaves[first], examples(leaves[first][1], specs[first])
            if said is None and examples(x, spec) != batch:
                expected = f"one for an array that is not split over {ranks} like the others"
                got = f"none, and {_leaves(other[:2], (path, x))}, whose numbers of examples differ"
                raise wrong(op, argument, expected, got, self.remedy)
            # Without this error, a rank's examples could be broadcast against the examples of all ranks, or could index
            # examples of other ranks.
            if given is None and said == P() and self.size > 1 and any(specs[first]) and np.shape(x)[:1] == (batch,):
                expected = f"one for an array that looks like the examples of all ranks of {ranks}"
                got = f"{spell_array(x)}, which is whole on every rank, and the others are split"
                raise wrong(op, argument, expected, got, f"shard it like the others, or {self.remedy}", path=path)
            for part in spec:
                ranked = [name for name in axes_of(part) if name in self.names]
                if ranked != sorted(ranked, key=self.names.index):
                    expected = "axes in the order in which the batch is split over them"
                    got = f"{self.names} for an array that is sharded as {tuple(spec)}"
                    raise wrong(op, "axis_name", expected, got, f"pass axis_name={tuple(ranked)}", path=path)
            if (count := _uneven(x, spec, self.mesh.shape)) is not None:
                got = f"{spell_array(x)} for {count} ranks"
                remedy = f"{FILL}; pass batch_specs for arrays that are split otherwise, or not at all"
                raise wrong(op, argument, f"arrays that {ranks} splits evenly", got, remedy, path=path)
        return specs

    def local(self, x: ArrayLike, spec: P) -> jax.ShapeDtypeStruct:
        """Returns the shape and dtype of a rank's part of an array."""
        return jax.ShapeDtypeStruct(NamedSharding(self.mesh, spec).shard_shape(np.shape(x)), jnp.result_type(x))

    def _over(self, spec: P, names: Collection[Any]) -> P:
        """Returns a spec with only the axes `names`."""
        return shortest(P(*(tuple(name for name in axes_of(part) if name in names) or None for part in spec)))

    @property
    def remedy(self) -> str:
        """The remedy of an error: how to tell how the arguments are split."""
        return (
            f"pass batch_specs=(P({self._spelled()}), P()), a PartitionSpec for each argument that is not "
            "differentiated and {name: P()} behind them for those by keyword; P() is for one that every rank has whole"
        )

    def _spelled(self) -> str:
        return repr(self.names[0] if len(self.names) == 1 else self.names)


def check_spans(function: str, mesh: Any, names: tuple[Any, ...], leaves: Iterable[tuple[Any, Any]]) -> None:
    """Refuses arrays of a single process if the mesh has several: jit would take them for the whole batch.

    `leaves` are (path, value) pairs.
    """
    if not isinstance(mesh, Mesh) or len({device.process_index for device in mesh.devices.flat}) == 1:
        return
    for path, x in leaves:
        if not isinstance(x, Tracer) and getattr(x, "is_fully_addressable", True) and np.ndim(x):
            expected = "arrays over the devices of all processes"
            got = f"{spell_array(x)} of this process, which JAX would take for the batch of all processes"
            remedy = (
                "make it of every process's own part: jax.make_array_from_process_local_data(NamedSharding(mesh, "
                f"P({names!r})), array)"
            )
            raise wrong(function, "batch", expected, got, remedy, path=path)


def _sharding(x: ArrayLike) -> NamedSharding | None:
    """Returns the sharding of an array, or None if it isn't known, as under jit on an Auto mesh."""
    if isinstance(x, Tracer):
        sharding: Any = jax.typeof(x).sharding
        explicit = isinstance(sharding, NamedSharding) and AxisType.Explicit in sharding.mesh.axis_types
        return sharding if explicit else None
    sharding = getattr(x, "sharding", None)
    return sharding if isinstance(sharding, NamedSharding) else None


def examples(x: ArrayLike, spec: P) -> int | None:
    """Returns the number of examples in an array: the size of its first split dimension, or None if none is split."""
    return next((size for size, part in zip(np.shape(x), spec) if part), None)


def filled(some: PyTree, others: PyTree) -> PyTree:
    """Returns the first tree, with leaves of the second tree in place of None."""
    return jax.tree_util.tree_map(lambda x, y: y if x is None else x, some, others, is_leaf=lambda x: x is None)
