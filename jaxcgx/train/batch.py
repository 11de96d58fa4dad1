"""How the arguments of a step are split: a batch over the ranks, and on each rank into micro-batches."""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.tree_util import KeyPath, keystr

from jaxcgx.checks import check_type, spell_array, wrong
from jaxcgx.transports.axes import as_axis_names
from jaxcgx.typing import ArrayLike, AxisName, Batch, Params, PyTree, Specs

OP = "make_train_step"
Names = tuple[Any, ...]  # the names of mesh axes
REMEDY = (
    "pass sharding=Sharding(batch=...) to make_train_step: a tree like the batch, with P() where every rank has the "
    "whole array"
)
FILL = "leave out the examples that are over, or fill up and give those the weight 0 (weighted=True)"


def as_specs(given: PyTree) -> Specs:
    """Returns a caller's tree of specs, with PartitionSpecs in place of NamedShardings."""
    spec = lambda x: x.spec if isinstance(x, NamedSharding) else x
    return jax.tree.map(spec, given)


def axes_of(part: Any) -> Names:
    return () if part is None else part if isinstance(part, tuple) else (part,)


def shortest(spec: P) -> P:
    parts = list(spec)
    while parts and parts[-1] in (None, ()):
        parts.pop()
    return P(*parts)


def check_axes(function: str, argument: str, names: Names, mesh: Any) -> None:
    if missing := [name for name in names if name not in mesh.shape]:
        expected = f"an axis of the mesh, {', '.join(map(repr, mesh.shape))}, or a tuple of them"
        raise wrong(function, argument, expected, repr(missing[0]))


def axes_over(function: str, mesh: Any, axis: AxisName, argument: str) -> Names:
    """Returns the names of the axes of the ranks, after a check of `mesh_or_comm`, which is no communicator."""
    check_type(function, "mesh_or_comm", mesh, Mesh, "a jax.sharding.Mesh or an MPI communicator")
    names = as_axis_names(function, axis, argument)
    check_axes(function, argument, names, mesh)
    return names


def broadcast(function: str, argument: str, given: PyTree, tree: PyTree, expected: str) -> list[Any]:
    """Returns the entry of a caller's tree, or of a prefix of it, for each leaf of `tree`: a spec, a text or None."""
    try:
        whole = jax.tree.broadcast(given, tree, is_leaf=lambda s: s is None or isinstance(s, P | str))
    except (TypeError, ValueError) as error:
        raise wrong(function, argument, expected, given) from error
    return jax.tree.structure(tree).flatten_up_to(whole)


def check_spec(
    function: str, argument: str, spec: object, x: ArrayLike, *, path: KeyPath[Any], among: Collection[Any] | None
) -> None:
    """Checks a caller's spec of an array. It may have only the axes `among`; None: any."""
    if not isinstance(spec, P):
        expected = "a PartitionSpec, or a tree of them like the arrays"
        raise wrong(function, argument, expected, repr(spec), path=path, kind=TypeError)
    if len(spec) > np.ndim(x):
        expected = f"a PartitionSpec of at most {np.ndim(x)} dimensions for {spell_array(x)}"
        raise wrong(function, argument, expected, spec, path=path)
    if other := [name for part in spec for name in axes_of(part) if among is not None and name not in among]:
        expected = f"PartitionSpecs over {', '.join(map(repr, among or ())) or 'no axis'}"
        remedy = "batches are split over the axes of the ranks, parameters over the other axes of the mesh"
        raise wrong(function, argument, expected, repr(other[0]), remedy, path=path)


class Words(NamedTuple):
    batch: tuple[str, str]  # the function and its argument
    specs: tuple[str, str]  # those of the caller's specs
    remedy: Callable[[], str]  # returns how to say how arrays are split

    def of_leaves(self, batch: Batch, specs: Specs) -> list[P | None]:
        return broadcast(*self.specs, specs, batch, expected="a PartitionSpec, or a tree of them like the batch")


TRAIN = Words(("train.step", "batch"), (OP, "sharding.batch"), lambda: REMEDY)


def split_batch(
    words: Words,
    leaves: Sequence[tuple[KeyPath[Any], ArrayLike]],
    given: Sequence[P | None],
    known: Sequence[P | None],
    sizes: Mapping[Any, int],
) -> list[P]:
    """Returns how the leaves of a batch are split over the ranks, and checks it. Scalars are whole.

    A leaf without a spec is split along its first dimension. It must have as many examples as the other leaves.

    Args:
      words: the words of errors.
      leaves: the leaves, with their paths.
      given: for each leaf, the caller's spec, or None.
      known: for each leaf, the spec that its sharding has over the ranks, or None if that isn't known.
      sizes: the number of ranks along each axis, outermost first; {}: the batch is this rank's own.
    """
    names, rows = tuple(sizes), P(tuple(sizes) or "ranks")
    given = [spec if np.ndim(x) else P() for (_, x), spec in zip(leaves, given)]
    said = [other if spec is None else spec for spec, other in zip(given, known)]
    specs = [rows if spec is None else spec for spec in said]
    for (path, x), spec in zip(leaves, given):
        if spec is not None:
            check_spec(*words.specs, spec, x, path=path, among=names or None)
    split = [i for i, spec in enumerate(specs) if any(spec)]
    if not split:
        return specs
    first = next((i for i in split if said[i] is not None), split[0])
    count = examples(leaves[first][1], specs[first])
    for i, ((path, x), spec) in enumerate(zip(leaves, specs)):
        if said[i] is None and examples(x, spec) != count:
            is_key = any(spell_array(leaf) == "uint32[2]" for leaf in (leaves[first][1], x))
            remedy = words.remedy() + "; for a random key, jax.random.key, which is a scalar" * is_key
            two = " and ".join(f"{keystr(of)} of {spell_array(each)}" for of, each in (leaves[first], (path, x)))
            raise wrong(*words.batch, "arrays with the same number of examples", f"leaves {two}", remedy)
        # Without this error, a rank's examples could be broadcast against the examples of all ranks, or could index
        # examples of other ranks.
        if given[i] is None and said[i] == P() and np.shape(x)[:1] == (count,) and math.prod(sizes.values()) > 1:
            expected = "arrays that are split, where they look like the examples of all ranks"
            got = f"{spell_array(x)}, which is whole on every rank"
            raise wrong(*words.batch, expected, got, f"shard it like the others, or {words.remedy()}", path=path)
        for length, part in zip(np.shape(x), spec if sizes else ()):
            axes = axes_of(part)
            if list(axes) != sorted(axes, key=names.index):
                remedy = "name the axes of the ranks in the order of the specs"
                raise wrong(*words.specs, f"axes in the order of {names}", spec, remedy, path=path)
            if length % (parts := math.prod(map(sizes.__getitem__, axes))):
                remedy = f"{FILL}; for an array that is not split, {words.remedy()}"
                raise wrong(*words.batch, f"arrays that {parts} ranks share evenly", spell_array(x), remedy, path=path)
    return specs


def dimensions(specs: Specs) -> list[int | None]:
    return list(map(dimension, jax.tree.leaves(specs)))


def dimension(spec: P) -> int | None:
    for d, part in enumerate(spec):
        if part:
            return d
    return None


def mesh_of(function: str, mesh: Any, names: Names, arrays: Sequence[Any]) -> Any:
    """Returns the mesh that has these axes: the caller's or, for None, that in context, or else that of the arrays."""
    context = jax.sharding.get_abstract_mesh()
    known = [context, *(sharding.mesh for x in arrays if (sharding := _sharding(x)) is not None)]
    found = mesh if mesh is not None else next((each for each in known if not each.empty), None)
    if found is None:
        remedy = "pass mesh=, or call it under jax.set_mesh(mesh), not `with mesh:`, or inside jax.shard_map"
        raise wrong(function, "mesh", "a mesh, where neither a context nor an argument has one", None, remedy)
    if not isinstance(found, Mesh | AbstractMesh):
        raise wrong(function, "mesh", "a jax.sharding.Mesh", repr(found), kind=TypeError)
    check_axes(function, "axis_name", names, found)
    return found


def spell_axes(names: Names) -> str:
    return repr(names[0] if len(names) == 1 else names)


def axes_beside(mesh: Any, names: Names) -> list[Any]:
    """Returns the axes of a mesh that are not axes of the ranks, `names`, and have several devices."""
    return [name for name, size in mesh.shape.items() if name not in names and size > 1]


def spec_of_batch(x: ArrayLike, names: Names) -> P | None:
    """Returns how an array that is no parameter is split over the ranks, or None if this isn't known."""
    if not np.ndim(x):
        return P()
    sharding = _sharding(x)
    return None if sharding is None or sharding.mesh.empty else _over(sharding.spec, names)


def specs_of_params(function: str, mesh: Any, names: Names, params: list[Params], given: Specs) -> list[Specs] | None:
    """Returns the specs of parameters over the axes of a mesh beside `names`, or None if there are no such axes.

    `given` are the caller's, or None.
    """
    others = axes_beside(mesh, names)
    if given is not None:
        among = [name for name in mesh.shape if name not in names]
        specs = _given_specs(function, params, given, among)
        return jax.tree.map(lambda spec: _over(spec, others), specs) if others else None

    def spec_of(path: KeyPath[Any], x: ArrayLike) -> P:
        sharding = _sharding(x)
        if sharding is None or sharding.mesh.empty:
            if others:
                spelled = ", ".join(sorted(map(repr, others)))
                expected = f"PartitionSpecs of the parameters over {spelled}, which their types don't say"
                remedy = "pass a tree of them, or P() where parameters are not sharded"
                raise wrong(function, "param_specs", expected, None, remedy, path=path)
            return P()
        if any(_over(sharding.spec, names)):
            expected = f"parameters that are whole on every rank of {spell_axes(names)}"
            remedy = "docs/fsdp.md shows how to train weights that are sharded over it"
            got = f"one sharded as {tuple(sharding.spec)}"
            raise wrong(function, "params", expected, got, remedy, path=path)
        return _over(sharding.spec, others)

    specs = jax.tree.map_with_path(spec_of, params)
    return specs if others else None


def _given_specs(function: str, params: list[Params], param_specs: Specs, among: list[Any]) -> list[Specs]:
    """Returns the caller's spec for every leaf of the parameters. It may have the axes `among`."""
    given = list(map(_by_path, param_specs, params))
    leaves, tree = jax.tree.flatten_with_path(params)
    try:  # a whole tree, in which a tuple may be the spec of a leaf
        specs = [P(*x) if type(x) is tuple else x for x in map(as_specs, tree.flatten_up_to(given))]
    except (TypeError, ValueError):
        expected = "a PartitionSpec, or a tree of them like the parameters"
        specs = broadcast(function, "param_specs", as_specs(given), params, expected=expected)
    for (path, x), spec in zip(leaves, specs):
        check_spec(function, "param_specs", spec, x, path=path, among=among)
    return tree.unflatten(specs)


def _over(spec: P, names: Collection[Any]) -> P:
    return shortest(P(*(tuple(name for name in axes_of(part) if name in names) or None for part in spec)))


def check_spans(function: str, mesh: Any, names: tuple[Any, ...], leaves: Iterable[tuple[Any, Any]]) -> None:
    """Refuses arrays, as (path, value), of one process of several: jit would take them for the whole batch."""
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


def _by_path(specs: Specs, params: Params) -> Specs:
    """Returns specs like the parameters. An nnx.State for a module has those of some paths; the others are whole."""
    if not hasattr(type(specs), "flat_state") or hasattr(type(params), "flat_state"):
        return specs
    names = lambda path: tuple(getattr(key, "name", getattr(key, "key", getattr(key, "idx", None))) for key in path)
    known = {names(path): spec for path, spec in jax.tree.leaves_with_path(specs)}
    found = jax.tree.map_with_path(lambda path, _: known.pop(names(path), P()), params)
    return specs if known else found


def _sharding(x: ArrayLike) -> NamedSharding | None:
    if isinstance(x, Tracer):
        sharding: Any = jax.typeof(x).sharding
        explicit = isinstance(sharding, NamedSharding) and AxisType.Explicit in sharding.mesh.axis_types
        return sharding if explicit else None
    sharding = getattr(x, "sharding", None)
    return sharding if isinstance(sharding, NamedSharding) else None


def examples(x: ArrayLike, spec: P) -> int | None:
    """Returns the number of examples in an array: the size of its first split dimension, or None if none is split."""
    d = dimension(spec)
    return None if d is None else np.shape(x)[d]


def filled(some: PyTree, others: PyTree) -> PyTree:
    """Returns the first tree, with leaves of the second tree in place of None."""
    return jax.tree.map(lambda x, y: y if x is None else x, some, others, is_leaf=lambda x: x is None)
