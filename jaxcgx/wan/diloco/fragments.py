"""Fragments of a tree of parameters: parts with about equal numbers of bytes that are exchanged in different steps."""

import itertools
import math
from typing import Any, NamedTuple

import jax

from jaxcgx.checks import wrong


class Fragment(NamedTuple):
    """A part of a tree: for each leaf, the slice of its rows in this fragment, or None without rows."""

    rows: tuple[slice | None, ...]

    def take(self, tree: Any) -> Any:
        """Returns this part of a tree. Leaves without rows in this fragment are None."""
        leaves, structure = jax.tree_util.tree_flatten(tree)
        return structure.unflatten([None if at is None else _rows(x, at) for x, at in zip(leaves, self.rows)])

    def put(self, tree: Any, part: Any) -> Any:
        """Returns the tree in which `part` replaces this fragment."""
        leaves, structure = jax.tree_util.tree_flatten(tree)
        new = structure.flatten_up_to(part)
        return structure.unflatten(
            [x if at is None else y if at == _WHOLE else x.at[at].set(y) for x, at, y in zip(leaves, self.rows, new)]
        )


_WHOLE = slice(None)


def _rows(x: Any, at: slice) -> Any:
    return x if at == _WHOLE else x[at]


class _Piece(NamedTuple):
    """Some or all rows of a leaf."""

    bytes: float
    leaf: int
    start: int
    rows: slice


def cut(op: str, params: Any, skipped: Any, number: int) -> tuple[Fragment, ...]:
    """Divides the parameters into fragments. Each piece goes to the fragment that has the fewest bytes so far.

    A leaf with more bytes than an equal share is cut into pieces along its first dimension. The result depends on
    shapes and dtypes, not on values.

    Args:
      op: the function that errors name.
      params: the parameters.
      skipped: for each parameter, whether it is frozen. Frozen parameters are in no fragment.
      number: the number of fragments.
    """
    leaves = jax.tree_util.tree_leaves(params)
    frozen = jax.tree_util.tree_leaves(skipped)
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
