"""Ranks along named axes: XLA's own collectives move the bytes."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxcgx import _compat
from jaxcgx.transports import base


@dataclasses.dataclass(frozen=True)
class Axes(base.Transport):
    """The ranks of one named axis, or of several axes together, outermost first."""

    names: tuple[Any, ...]

    effects: ClassVar[frozenset[Any]] = frozenset()

    @property
    def mover(self) -> str:
        between_cpus = jax.default_backend() == "cpu" and jax.process_count() > 1
        return "gloo" if between_cpus else "duplex"

    @property
    def parts(self) -> Mapping[Any, "Axes"]:
        return {name: Axes((name,)) for name in self.names}

    def leaders(self) -> "AxesLeaders":
        outer, inner = split(self.names)
        return AxesLeaders(self, Axes((outer,)), Axes(inner))

    @property
    def size(self) -> int:
        return math.prod(map(jax.lax.axis_size, self.names))

    @property
    def rank(self) -> jax.Array:
        return jax.lax.axis_index(self.names)

    def all_to_all(self, rows: jax.Array) -> jax.Array:
        return jax.lax.all_to_all(rows, self.names, 0, 0, tiled=True)

    @property
    def at_once(self) -> bool:
        """Whether JAX can gather, scatter and permute over all axes at once. Under vmap, it takes one at a time."""
        return len(self.names) == 1 or self.on_mesh

    @property
    def on_mesh(self) -> bool:
        """Whether the axes are those of a mesh that shard_map has made manual, and not of vmap."""
        return set(self.names) <= set(jax.sharding.get_abstract_mesh().manual_axes)

    def all_gather(self, row: jax.Array) -> jax.Array:
        rows = row
        for names in [self.names] if self.at_once else [(n,) for n in reversed(self.names)]:
            rows = jax.lax.all_gather(rows, names)
        return rows.reshape(self.size, *row.shape)

    def permute(self, row: jax.Array, pairs: base.Pairs) -> jax.Array:
        # Under vmap(axis_name=...), JAX permutes only if every rank sends.
        if not self.at_once or not (self.on_mesh or len(pairs) == self.size):
            return super().permute(row, pairs)
        if len(self.names) == 1:
            return jax.lax.ppermute(row, self.names, list(pairs))
        # ppermute numbers the ranks of several axes in the order of the mesh, whatever the order of the names. All
        # other collectives number them in the order of the names.
        order = jax.sharding.get_abstract_mesh().axis_names
        names = tuple(sorted(self.names, key=order.index))
        ranks = np.arange(self.size).reshape([jax.lax.axis_size(name) for name in self.names])
        place = np.argsort(ranks.transpose([self.names.index(name) for name in names]).reshape(-1)).tolist()
        return jax.lax.ppermute(row, names, [(place[sender], place[receiver]) for sender, receiver in pairs])

    def plain_psum(self, x: jax.Array) -> jax.Array:
        return jax.lax.psum(x, self.names)

    def plain_pmean(self, x: jax.Array) -> jax.Array:
        return jax.lax.pmean(x, self.names)

    def plain_psum_scatter(self, x: jax.Array, scatter_dimension: int, tiled: bool) -> jax.Array:
        if tiled and x.shape[scatter_dimension] == 0:  # XLA scatters no slices without elements
            return _compat.vary_over(x, self.names)
        if _compat.reduce_scatter_is_wrong() or not self.at_once:
            # An all_to_all of XLA, also over Tcp, because it has derivatives
            return base.Transport.plain_psum_scatter(Axes(self.names), x, scatter_dimension, tiled)
        return jax.lax.psum_scatter(x, self.names, scatter_dimension=scatter_dimension, tiled=tiled)

    def plain_all_gather(self, x: jax.Array, axis: int, tiled: bool, to: str) -> jax.Array:
        if tiled and x.shape[axis] == 0:  # XLA gathers no slices without elements
            return _compat.vary_over(x, self.names) if to == "varying" else jax.lax.psum(x, self.names)
        if not self.at_once:
            return base.join_rows(self.all_gather(x), axis, tiled)
        if to == "varying" and _compat.reduce_scatter_is_wrong():  # the transpose of a gather
            rows = Axes(self.names).all_to_all(jnp.broadcast_to(x, (self.size, *x.shape)))
            return base.join_rows(rows, axis, tiled)
        return _compat.all_gather(x, self.names, axis=axis, tiled=tiled, to=to)

    def plain_all_to_all(self, x: jax.Array, split_axis: int, concat_axis: int, tiled: bool) -> jax.Array:
        if not tiled and split_axis != concat_axis:  # jax.lax.all_to_all fails in its derivative
            return base.Transport.plain_all_to_all(Axes(self.names), x, split_axis, concat_axis, tiled=tiled)
        return jax.lax.all_to_all(x, self.names, split_axis, concat_axis, tiled=tiled)

    def plain_pbroadcast(self, x: jax.Array, source: int, to: str) -> jax.Array:
        # jax.lax.pbroadcast is for GPUs alone. This is what its documentation says that it is equivalent to.
        total = jax.lax.psum(jnp.where(self.rank == source, x, jnp.zeros_like(x)), self.names).astype(x.dtype)
        return total if to == "invarying" else _compat.vary_over(total, self.names)

    def plain_ppermute(self, x: jax.Array, pairs: base.Pairs) -> jax.Array:
        return base.Transport.plain_ppermute(Axes(self.names), x, pairs)  # over Tcp, too, because it has derivatives


def split(names: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
    """Returns (the outermost axis with several ranks, all others)."""
    outer = next((name for name in names if jax.lax.axis_size(name) > 1), names[0])
    return outer, tuple(name for name in names if name != outer)


class AxesLeaders(base.Leaders):
    """The leaders are the ranks of `outer` that are first along `inner`."""

    # The other ranks run the same operations, but the next gather discards their results. `everybody` is the transport
    # over `outer` and `inner` together.
    def __init__(self, everybody: Axes, outer: Axes, inner: Axes):
        self.everybody: Axes = everybody
        self.outer: Axes = outer
        self.inner: Axes = inner
        self.size: Any = outer.size

    def labelled(self, label: int) -> "AxesLeaders":
        return AxesLeaders(self.everybody.labelled(label), self.outer.labelled(label), self.inner)

    @property
    def rank(self) -> jax.Array:
        return self.outer.rank

    @property
    def speaks(self) -> jax.Array:
        return self.inner.rank == 0

    def _send(self, row: jax.Array, distance: int) -> jax.Array:
        pairs = [(r * self.inner.size, (r + distance) % self.size * self.inner.size) for r in range(self.size)]
        return self.everybody.permute(row, pairs)

    def _collect(self, row_for: Callable[[int], jax.Array]) -> jax.Array:
        """Returns the rows of all leaders, from row_for(distance): the row of the leader so many ranks before."""
        rows = [row_for(distance) for distance in range(self.size)]
        return jnp.roll(jnp.stack(rows[::-1]), self.rank + 1, 0)

    def all_to_all(self, rows: jax.Array) -> jax.Array:
        return self._collect(lambda d: self._send(jnp.take(rows, (self.rank + d) % self.size, 0), d))

    def all_gather(self, row: jax.Array) -> jax.Array:
        rows = self._collect(lambda d: self._send(row, d))
        return jax.lax.psum(jnp.where(self.speaks, rows, 0).astype(row.dtype), self.inner.names)

    def shift(self, row: jax.Array) -> jax.Array:
        return self._send(row, 1)

    def plain_psum(self, x: jax.Array) -> jax.Array:
        return self.outer.plain_psum(x)
