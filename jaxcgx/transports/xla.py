"""Ranks along named axes: XLA's own collectives move the bytes.

A transport is hashable, static under jit. What every one has:

- `names`: the named axes of JAX that it runs over; `effects`: the other effects that what it does has in a program;
- `size`, `rank`; `parts`: {name: transport} of the levels of a hierarchy, outermost first; `leaders()`: of its first
level,
  those that speak for the others;
- for rows of bytes, `all_to_all`, `all_gather` and `shift`;
- `allreduce`: None, or a way of its own to do a whole schedule, native/tcp.py's `allreduce`, with the same bits;
- for arrays that travel as they are, what `lax` has under the name: `plain_psum`, `plain_pmean`, `plain_psum_scatter`,
  `plain_all_gather` and `plain_all_to_all`.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxcgx import _compat


@dataclasses.dataclass(frozen=True)
class Axes:
    """The ranks of one named axis, or of several taken as one, outermost first."""

    names: tuple

    effects = frozenset()  # but for those of the names
    allreduce = None

    @property
    def parts(self):
        return {name: Axes((name,)) for name in self.names}

    def leaders(self):
        outer, *inner = self.names
        return Leaders(self, Axes((outer,)), Axes(tuple(inner)))

    @property
    def size(self):
        return math.prod(map(lax.axis_size, self.names))

    @property
    def rank(self):
        return lax.axis_index(self.names)

    def all_to_all(self, rows):
        """Row r goes to rank r; row r of the result came from rank r."""
        return lax.all_to_all(rows, self.names, 0, 0, tiled=True)

    @property
    def at_once(self):
        """Whether JAX takes the axes together: vmap(axis_name=...) knows how to gather over one axis, and to permute
        one."""
        return len(self.names) == 1 or set(self.names) <= set(jax.sharding.get_abstract_mesh().axis_names)

    def all_gather(self, row):
        """Every rank's row, in rank order."""
        rows = row
        for names in [self.names] if self.at_once else [(n,) for n in reversed(self.names)]:
            rows = lax.all_gather(rows, names)
        return rows.reshape(self.size, *row.shape)

    def permute(self, row, pairs):
        """The row of the rank that is paired with this one, (from, to)."""
        if self.at_once:
            return lax.ppermute(row, self.names, pairs)
        source = np.zeros(self.size, np.int32)
        for sender, receiver in pairs:
            source[receiver] = sender
        return jnp.take(self.all_gather(row), jnp.asarray(source)[self.rank], 0)

    def shift(self, row):
        """The row of the rank before; the last rank's for the first."""
        return self.permute(row, [(r, (r + 1) % self.size) for r in range(self.size)])

    def plain_psum(self, x):
        return lax.psum(x, self.names)

    def plain_pmean(self, x):
        return lax.pmean(x, self.names)

    def plain_psum_scatter(self, x, scatter_dimension, tiled):
        return lax.psum_scatter(x, self.names, scatter_dimension=scatter_dimension, tiled=tiled)

    def plain_all_gather(self, x, axis, tiled, to):
        return _compat.all_gather(x, self.names, axis=axis, tiled=tiled, to=to)

    def plain_all_to_all(self, x, split_axis, concat_axis, tiled):
        return lax.all_to_all(x, self.names, split_axis, concat_axis, tiled=tiled)


class Leaders:
    """The ranks of `outer`, of which only those speak that are first along `inner`. The others take part in the
    program,
    but what they compute between two gatherings goes nowhere. `everybody`: both together."""

    allreduce = None

    def __init__(self, everybody, outer, inner):
        self.everybody, self.outer, self.inner, self.size = everybody, outer, inner, outer.size

    @property
    def rank(self):
        return self.outer.rank

    @property
    def speaks(self):
        """Whether this rank is one of them."""
        return self.inner.rank == 0

    def _send(self, row, distance):
        """The row of the leader that many ranks before."""
        pairs = [(r * self.inner.size, (r + distance) % self.size * self.inner.size) for r in range(self.size)]
        return self.everybody.permute(row, pairs)

    def _collect(self, row_for):
        """[size, ...]: row_for(distance) from the leader that many ranks before, at its rank."""
        rows = [row_for(distance) for distance in range(self.size)]
        return jnp.roll(jnp.stack(rows[::-1]), self.rank + 1, 0)

    def all_to_all(self, rows):
        return self._collect(lambda d: self._send(jnp.take(rows, (self.rank + d) % self.size, 0), d))

    def all_gather(self, row):
        rows = self._collect(lambda d: self._send(row, d))
        return lax.psum(jnp.where(self.speaks, rows, 0).astype(row.dtype), self.inner.names)

    def shift(self, row):
        return self._send(row, 1)

    def plain_psum(self, x):
        return self.outer.plain_psum(x)
