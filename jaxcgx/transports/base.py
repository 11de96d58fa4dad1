"""The contract of a transport, which moves the bytes of an exchange among ranks.

A transport is static under jit. It is hashable, and equal to any other transport that moves bytes among the same ranks
in the same way. It moves rows of bytes and uncompressed arrays, and reads no codec.

A new transport subclasses `Transport` and defines `names`, `effects`, `size`, `rank`, `all_to_all`, `all_gather` and
`plain_psum`. The other members have defaults.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxcgx._compat import Primitive
from jaxcgx.native.layout import Layout
from jaxcgx.native.processes import exchange
from jaxcgx.native.rules import add
from jaxcgx.native.tcp import Inside

Pairs = Sequence[tuple[int, int]]  # (sender, receiver); a rank sends at most once, and receives at most once


class PiecewiseSum(NamedTuple):
    """A sum that a transport computes itself, piece by piece, with the same bits as a schedule."""

    # With a stage `inside`, `leaves` are whole, and the layout and the residuals are of this rank's share.
    layout: Layout  # with one chunk for each tree, or one chunk for one_shot; only passed on to `native`
    leaves: list[jax.Array]
    residuals: list[jax.Array] | None
    first_key: jax.Array | None  # the key for the encoding of a rank's own leaves
    sum_key: jax.Array | None  # the key for the encoding of a root's sum
    hop_key: jax.Array | None  # the key for the encodings of other sums
    parents: tuple[tuple[int, ...], ...]  # for each tree, the parent of each rank; () for one_shot
    own: str
    divisor: float
    inside: Inside | None = None  # ranks that add their leaves first


class Transport:
    """The ranks of an exchange, and how bytes get from one to another."""

    names: tuple[Any, ...]  # the named axes of JAX that it runs over; () for processes that JAX doesn't know as ranks
    effects: frozenset[Any]  # the effects of its operations in a program, besides those of the names
    size: Any  # the number of ranks: an int
    rank: Any  # this rank: an int, or a traced one

    begin_sum: Any = None
    """None, or a method that begins a `PiecewiseSum`, which overlaps kernels with the exchange. Its result is a pytree.

    `end_sum` takes it, in the same program or a later one.
    """

    @property
    def mover(self) -> str:
        """The name in transports/network.py of the code that moves the bytes: "gloo", "tcp" or "duplex"."""
        return "duplex"

    @property
    def parts(self) -> Mapping[Any, "Transport"]:
        """The levels of a hierarchy by name, outermost first. A transport without levels has none."""
        return {}

    def leaders(self) -> "Leaders":
        """Returns the transport over the ranks that exchange for their nodes. Only those with levels have one."""
        raise NotImplementedError(f"{type(self).__name__}.leaders")

    def labelled(self, label: int) -> Any:
        """Returns this transport for an exchange whose bytes are described by the digest `label`.

        A transport that can do so compares the labels of all ranks, which would otherwise misread the bytes.
        """
        return self

    def sliced(self, elements: int) -> Any:
        """Returns this transport for sums that travel in slices of `elements` elements.

        Slices of later sums may overtake slices of earlier ones. A transport without slices moves whole messages, one
        after another.
        """
        return self

    def until(self, deadline: float) -> Any:
        """Returns this transport for sums by trees that give up pieces, which then go back to the residuals.

        These are pieces that have not begun to leave `deadline` seconds after the begin. Only `TcpAxes` does so.
        """
        return self

    def end_sum(self, begun: Any, later: bool = False) -> tuple[list[Any], list[Any] | None]:
        """Returns (sums, new residuals or None). `later`: the program may be later than the one that began the sum."""
        raise NotImplementedError(f"{type(self).__name__}.end_sum")

    def begin_exchange(self, operation: str, x: jax.Array) -> Any:
        """Begins an "all_to_all" or "all_gather" of x. Only a transport with `begin_sum` doesn't wait for its end."""
        return getattr(self, operation)(x)

    def end_exchange(self, begun: Any, shape: tuple[int, ...], later: bool = False) -> jax.Array:
        """Returns the result of `begin_exchange`, uint8 of this shape. `later`: as for `end_sum`."""
        return begun

    def all_to_all(self, rows: jax.Array) -> jax.Array:
        """Sends row r of [ranks, ...] to rank r. Row r of the result came from rank r."""
        raise NotImplementedError(f"{type(self).__name__}.all_to_all")

    def all_gather(self, row: jax.Array) -> jax.Array:
        """Returns every rank's row, [ranks, ...], in rank order."""
        raise NotImplementedError(f"{type(self).__name__}.all_gather")

    def shift(self, row: jax.Array) -> jax.Array:
        """Returns the row of the previous rank. The first rank gets the row of the last rank."""
        return self.permute(row, [(rank, (rank + 1) % self.size) for rank in range(self.size)])

    def permute(self, row: jax.Array, pairs: Pairs) -> jax.Array:
        """Returns the row of the rank that sends to this rank. A rank to which no rank sends gets any row."""
        source = [0] * self.size
        for sender, receiver in pairs:
            source[receiver] = sender
        return jnp.take(self.all_gather(row), jnp.asarray(source)[self.rank], 0)

    def broadcast(self, x: jax.Array, root: int) -> jax.Array:
        """Returns the array of rank `root`. Every rank gets a part of it, and passes the part on to all."""
        mine = jnp.where(self.rank == root, x, jnp.zeros_like(x)).reshape(-1)
        parts = jnp.pad(mine, (0, -mine.size % self.size)).reshape(self.size, -1)
        return self.all_gather(self.all_to_all(parts)[root]).reshape(-1)[: mine.size].reshape(x.shape)

    # Collectives of uncompressed arrays, like the collectives of `lax` without "plain_" in the name.

    def plain_psum(self, x: jax.Array) -> jax.Array:
        """Returns the sum over all ranks.

        As with `lax.psum`, the type of the result must not vary over `names`, because results that shard_map takes as
        replicated (out_specs P()) may contain it.
        """
        raise NotImplementedError(f"{type(self).__name__}.plain_psum")

    def plain_pmean(self, x: jax.Array) -> jax.Array:
        return self.plain_psum(x) / self.size

    def plain_psum_scatter(self, x: jax.Array, scatter_dimension: int, tiled: bool) -> jax.Array:
        return add(self.all_to_all(split_rows(countable(x), scatter_dimension, size=self.size, tiled=tiled)))

    def plain_all_gather(self, x: jax.Array, axis: int, tiled: bool, to: str) -> jax.Array:
        return join_rows(self.all_gather(x), axis, tiled)

    def plain_all_to_all(self, x: jax.Array, split_axis: int, concat_axis: int, tiled: bool) -> jax.Array:
        return join_rows(self.all_to_all(split_rows(x, split_axis, size=self.size, tiled=tiled)), concat_axis, tiled)

    def plain_pbroadcast(self, x: jax.Array, source: int, to: str) -> jax.Array:
        return self.broadcast(x, source)

    def plain_ppermute(self, x: jax.Array, pairs: Pairs) -> jax.Array:
        return self.where_received(self.permute(x, pairs), pairs)

    def where_received(self, x: jax.Array, pairs: Pairs) -> jax.Array:
        if len(pairs) == self.size:
            return x
        receives = np.zeros(self.size, bool)
        receives[[receiver for _, receiver in pairs]] = True
        return jnp.where(jnp.asarray(receives)[self.rank], x, jnp.zeros_like(x))


class ProcessRanks(Transport):
    """Ranks that are processes with one device each. Each compiles its own program, so its rank and size are ints."""

    # Subclasses also define `lower`, which lowers an exchange (native/processes.py).
    names: tuple[Any, ...] = ()
    primitive: ClassVar[Primitive]

    def all_to_all(self, rows: jax.Array) -> jax.Array:
        return exchange("all_to_all", rows, self)

    def all_gather(self, row: jax.Array) -> jax.Array:
        return exchange("all_gather", row, self)

    def broadcast(self, x: jax.Array, root: int) -> jax.Array:
        return exchange("broadcast", x, self, argument=root)


class Leaders(Transport):
    """The ranks that exchange for their nodes. The other ranks run the same program, and get their leader's results."""

    speaks: Any
    """Whether this rank is one of them: a bool, or a traced one."""


def countable(x: jax.Array) -> jax.Array:
    """Returns x as a type that can be added: bools become int32, as in lax."""
    return x.astype(jnp.int32) if x.dtype == jnp.bool_ else x


def split_rows(x: jax.Array, dimension: int, size: int, tiled: bool) -> jax.Array:
    """Returns x cut along `dimension` into a row for each rank, [ranks, ...]. With `tiled`, rows keep the dimension."""
    if tiled:
        x = x.reshape(*x.shape[:dimension], size, x.shape[dimension] // size, *x.shape[dimension + 1 :])
    return jnp.moveaxis(x, dimension, 0)


def join_rows(rows: jax.Array, dimension: int, tiled: bool) -> jax.Array:
    """Returns rows [ranks, ...], stacked along a new `dimension` or, with `tiled`, joined along an existing one."""
    x = jnp.moveaxis(rows, 0, dimension)
    if not tiled:
        return x
    joined = -1 if x.size else math.prod(x.shape[dimension : dimension + 2])
    return x.reshape(*x.shape[:dimension], joined, *x.shape[dimension + 2 :])
