"""Fragments of a tree of parameters: parts with about equal numbers of bytes that are exchanged in different steps."""

import itertools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxcgx.checks import wrong
from jaxcgx.typing import Params, PyTree


class Fragment(NamedTuple):
    """A part of a tree: for each leaf, the slice of its rows in this fragment, or None without rows."""

    rows: tuple[slice | None, ...]

    def take(self, tree: PyTree) -> PyTree:
        """Returns this part of a tree. Leaves without rows in this fragment are None."""
        leaves, structure = jax.tree.flatten(tree)
        rows = [None if at is None else x if at == _WHOLE else x[at] for x, at in zip(leaves, self.rows)]
        return structure.unflatten(rows)

    def put(self, tree: PyTree, part: PyTree) -> PyTree:
        leaves, structure = jax.tree.flatten(tree)
        new = structure.flatten_up_to(part)
        rows = [x if at is None else y if at == _WHOLE else x.at[at].set(y) for x, at, y in zip(leaves, self.rows, new)]
        return structure.unflatten(rows)


_WHOLE = slice(None)


class _Piece(NamedTuple):
    bytes: float
    leaf: int
    start: int
    rows: slice


def cut(op: str, params: Params, skipped: PyTree, number: int) -> tuple[Fragment, ...]:
    """Divides the parameters into `number` fragments. Each piece goes to the fragment with the fewest bytes so far."""
    # A leaf with more bytes than an equal share is cut into pieces along its first dimension. The result depends on
    # shapes and dtypes, not on values. Parameters that are `skipped` are in no fragment.
    leaves = jax.tree.leaves(params)
    frozen = jax.tree.leaves(skipped)
    sizes = [0 if skip else x.size * x.dtype.itemsize for x, skip in zip(leaves, frozen)]
    share = max(sum(sizes) / number, 1)
    pieces: list[_Piece] = []
    for i, (x, size, skip) in enumerate(zip(leaves, sizes, frozen)):
        if skip:
            continue
        parts = max(min(number, math.ceil(size / share), x.shape[0] if x.ndim else 1), 1)
        ends = [x.shape[0] * part // parts for part in range(parts + 1)] if parts > 1 else []
        pieces += [_Piece(size * (b - a) / ends[-1], i, a, slice(a, b)) for a, b in itertools.pairwise(ends)]
        pieces += [_Piece(size, i, 0, _WHOLE)] * (parts == 1)
    most = sum(piece.bytes > 0 for piece in pieces)  # nothing could be exchanged of a fragment without elements
    if not most:
        expected = "a plan that leaves parameters to train"
        raise wrong(op, "plan", expected, "none that it doesn't skip", "give fewer parameters jaxcgx.Skip()")
    if most < number:
        expected = f"at most as many fragments as parameters can be cut into, {most}"
        raise wrong(op, "fragments", expected, number, f"pass fragments={most}")
    found: list[list[slice | None]] = [[None] * len(leaves) for _ in range(number)]
    loads = [0.0] * number
    for piece in sorted(pieces, key=lambda piece: (-piece.bytes, piece.leaf, piece.start)):
        free = [p for p in range(number) if found[p][piece.leaf] is None]
        p = min(free, key=lambda p: loads[p])
        found[p][piece.leaf], loads[p] = piece.rows, loads[p] + piece.bytes
    return tuple(Fragment(tuple(rows)) for rows in found)


def wide(x: jax.Array) -> jax.Array:
    return x.astype(jnp.float32)


def wide_zeros(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), tree)


def finite(tree: PyTree) -> jax.Array:
    return jnp.stack([jnp.isfinite(x).all() for x in jax.tree.leaves(tree)]).all()
