"""The division of a batch: over the ranks, and on each rank into micro-batches."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from jaxcgx.checks import spell_array, wrong
from jaxcgx.typing import Batch, PyTree, Specs

OP, STEP = "make_train_step", "train.step"
Names = tuple[Any, ...]  # the names of mesh axes
REMEDY = (
    "pass sharding=Sharding(batch=...) to make_train_step: a tree like the batch, with P() where every rank has the "
    "whole array"
)
ARGUMENT = "sharding.batch"


def is_spec(x: object) -> bool:
    return isinstance(x, P)


def flatten_specs(specs: Specs) -> tuple[list[tuple[Any, Any]], PyTree]:
    """Returns ([(path, spec)], structure) of a tree of specs."""
    return jax.tree_util.tree_flatten_with_path(specs, is_leaf=is_spec)


def axes_of(part: Any) -> Names:
    """Returns the axes in `part`, the entry of a spec for one dimension."""
    return () if part is None else part if isinstance(part, tuple) else (part,)


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

    Without `given`, a leaf is split as its sharding says. Leaves without a known sharding are split along their first
    dimension. If no sharding splits any leaf, all leaves are split along their first dimension.

    Args:
      batch: the batch.
      given: the caller's specs, or None.
      rows: the PartitionSpec of a leaf that is split along its first dimension.
      said: a function from a leaf to its PartitionSpec over the axes of the ranks, or None if its sharding isn't known.
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
            got = [f"{jax.tree_util.keystr(at)} of {spell_array(leaf)}" for at, leaf in (split[0], (path, x))]
            is_key = any(spell_array(leaf) == "uint32[2]" for leaf in (split[0][1], x))
            remedy = REMEDY + ("; for a random key, jax.random.key, which is a scalar" if is_key else "")
            raise wrong(STEP, "batch", expected, f"leaves {' and '.join(got)}", remedy)
        specs.append(rows if spec is None or (any(spec) and not any(spec[1:])) else spec)
    return tree.unflatten(specs)


def check_even(batch: Batch, specs: Specs, sizes: Mapping[Any, int]) -> None:
    """Checks that all ranks get equal parts of a batch. `sizes` has the number of ranks along each axis."""
    for (path, x), (_, spec) in zip(jax.tree_util.tree_leaves_with_path(batch), flatten_specs(specs)[0]):
        if len(spec) > x.ndim:
            raise wrong(OP, ARGUMENT, f"a PartitionSpec of at most {x.ndim} dimensions", spec, path=path)
        for size, part in zip(x.shape, spec):
            count = math.prod(sizes[name] for name in axes_of(part))
            if size % count:
                expected = f"arrays that {count} ranks share evenly"
                remedy = (
                    "leave out the examples that are over, or fill up and give those the weight 0 (weighted=True); for "
                    "an array that is not split, " + REMEDY
                )
                raise wrong(STEP, "batch", expected, spell_array(x), remedy, path=path)


def dimensions(specs: Specs) -> list[int | None]:
    """Returns for each leaf of a batch the dimension of the examples, or None if the leaf is whole."""
    return [next((i for i, part in enumerate(spec) if part), None) for _, spec in flatten_specs(specs)[0]]


def _filled(batch: Batch, given: Specs) -> Specs:
    """Returns the caller's specs as a tree like the batch. Scalars are whole."""
    try:
        specs = jax.tree_util.tree_broadcast(given, batch, is_leaf=is_spec)
    except (TypeError, ValueError) as error:
        expected = "a PartitionSpec, or a tree of them like the batch"
        raise wrong(OP, ARGUMENT, expected, given) from error
    return jax.tree_util.tree_map(lambda x, spec: spec if np.ndim(x) else P(), batch, specs)
