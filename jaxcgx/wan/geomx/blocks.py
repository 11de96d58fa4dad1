"""Cuts leaves into blocks of equal size, so that some blocks of a leaf can be sent without the others."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxcgx import _compat
from jaxcgx.exchange.routes import Routes
from jaxcgx.plan.leaves import why_unfit

T = TypeVar("T")
Arrays = Sequence[jax.Array | None]  # an entry for each leaf


@dataclasses.dataclass(frozen=True)
class Blocks:
    """The blocks that a leaf is cut into. The last block is padded with zeros."""

    shape: tuple[int, ...]
    size: int  # the number of elements in a block

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def count(self) -> int:
        return -(-self.elements // self.size)

    def share(self, k: float) -> int:
        """Returns the number of blocks in the share `k` of all blocks. It is at least one."""
        return max(1, round(k * self.count))

    def split(self, x: jax.Array) -> jax.Array:
        """Returns the blocks of an array, [count, size]."""
        flat = x.reshape(-1)
        if missing := self.count * self.size - self.elements:
            flat = jnp.pad(flat, (0, missing))
        return flat.reshape(self.count, self.size)

    def join(self, blocks: jax.Array) -> jax.Array:
        """Returns the array that has these blocks: the inverse of `split`."""
        return blocks.reshape(-1)[: self.elements].reshape(self.shape)

    def magnitudes(self, blocks: jax.Array) -> jax.Array:
        """Returns the mean magnitude of each block, float32[count]. The padding doesn't count."""
        sizes = np.full(self.count, self.size, np.float32)
        sizes[-1] -= self.count * self.size - self.elements
        return jnp.abs(blocks.astype(jnp.float32)).sum(1) / sizes


Cut = Sequence[Blocks | None]  # the blocks of each leaf; None for a leaf that is sent whole


def cut(routes: Routes, block_bytes: int, share: float) -> Cut:
    """Returns the blocks of each leaf, or None for one that is sent whole: skipped, unfit, or with too few blocks."""
    found: list[Blocks | None] = []
    for route in routes.leaves:
        blocks = None if route.skipped or why_unfit(route) else Blocks(route.shape, block_bytes // route.dtype.itemsize)
        found.append(blocks if blocks and blocks.share(share) < blocks.count else None)
    return found


def each(function: Callable[..., T], *values: Sequence[Any]) -> list[T | None]:
    """Calls the function with the entries of each leaf. The result is None where the first list has None."""
    return [None if entries[0] is None else function(*entries) for entries in zip(*values)]


def take(places: Arrays, values: Arrays) -> list[jax.Array | None]:
    """Returns the blocks at these places. Whole leaves, which have None as places, stay as they are."""
    at = lambda where, x: x.at[where].get(mode="promise_in_bounds", unique_indices=True)
    return [x if where is None or x is None else at(where, x) for where, x in zip(places, values)]


def head(cut: Cut, share: float, values: Arrays) -> list[jax.Array | None]:
    """Returns the first blocks of each leaf, its share. Whole leaves stay as they are."""
    return [x if b is None or x is None else x[: b.share(share)] for b, x in zip(cut, values)]


def tail(cut: Cut, share: float, values: Arrays) -> list[jax.Array | None]:
    """Returns the blocks of each leaf that `head` leaves out. Whole leaves stay as they are."""
    return [x if b is None or x is None else x[b.share(share) :] for b, x in zip(cut, values)]


def select(cut: Cut, counts: Sequence[Any], first: Arrays, rest: Arrays) -> list[jax.Array | None]:
    """Returns the first blocks of `first`, as many as counts say, and the others of `rest`. Whole leaves: `first`."""

    def of_leaf(b: Blocks, x: jax.Array, y: jax.Array, count: Any) -> jax.Array:
        return jnp.where(jnp.arange(b.count)[:, None] < count, x, y)

    four = zip(cut, first, rest, counts)
    return [x if b is None or x is None or y is None else of_leaf(b, x, y, count) for b, x, y, count in four]


def line(cut: Cut, first: Arrays, rest: Arrays) -> list[jax.Array | None]:
    """Returns the blocks of `first` followed by those of `rest`. None stands for zeros. Whole leaves are in `first`."""

    def join(b: Blocks, x: jax.Array | None, y: jax.Array | None) -> jax.Array | None:
        given = x if y is None else y
        if given is None:
            return None
        zeros = jnp.zeros((b.count - len(given), b.size), given.dtype)
        return jnp.concatenate(_compat.match_varying(zeros if x is None else x, zeros if y is None else y))

    return [x if b is None else join(b, x, y) for b, x, y in zip(cut, first, rest)]


def add(some: Arrays, more: Arrays) -> list[jax.Array | None]:
    """Returns the sum of two values for each leaf. A None in `more` counts as zeros."""
    return [x if y is None or x is None else x + y for x, y in zip(some, more)]
