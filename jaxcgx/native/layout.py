"""The position of every part of a message, which depends only on the codec and on the shapes and dtypes of the leaves.

xla_ffi/codec/layout.h is the same in C++. docs/wire-format.md describes the layout.
"""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxcgx.checks import wrong
from jaxcgx.typing import DType, DTypeLike

UNIT = 512  # chunks of a codec without buckets begin at a multiple of this
DTYPES = tuple(jnp.dtype(d) for d in ("float32", "bfloat16", "float16"))  # ordered by number on the FFI boundary


def align16(n: int) -> int:
    return -(-n // 16) * 16


def as_dtype(function: str, argument: str, dtype: Any) -> DType:
    """Checks that the leaves of a message may have this dtype, and returns it."""
    with contextlib.suppress(TypeError):
        dtype = jnp.dtype(dtype)
    if dtype not in DTYPES:
        raise wrong(function, argument, "float32, bfloat16 or float16", dtype, kind=TypeError)
    return dtype


def runs(n: int, size: int) -> list[tuple[int, int, int]]:
    """Returns (first element, number, size) of the whole parts of this size that n elements have, then of the rest."""
    whole, rest = divmod(n, size)
    return [(0, whole, size)] * bool(whole) + [(n - rest, 1, rest)] * bool(rest)


@dataclasses.dataclass(frozen=True)
class Piece:
    """The part of a leaf that is in one chunk. Positions are bytes from the start of the chunk."""

    leaf: int
    start: int  # the first element, counted in the leaf
    coded: int  # the number of elements that the codec sees
    raw: int  # the number of elements of the raw tail after them
    bucket: int  # the elements of a bucket (the last bucket may be short); 0 without buckets
    meta: int  # the position of the metadata
    codes: int  # the position of the codes
    tail: int  # the position of the raw tail

    def buckets(self) -> list[tuple[int, int, int]]:
        """Returns (first element, number, size) of the whole buckets, then of the short one. No buckets: of all."""
        return runs(self.coded, self.bucket or max(self.coded, 1))


@dataclasses.dataclass(frozen=True)
class Layout:
    """The layout of leaves of given shapes and dtypes as one message of chunks."""

    codec: Any  # the codec of all leaves, a jaxcgx.codecs.base.Codec, which is in a storey above this one
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[DType, ...]
    chunks: int = 1  # the number of chunks. A chunk has whole buckets
    # A number for each leaf, on which its noise depends (stochastic codecs). An id is the leaf's number in its tree, so
    # one key gives the same bits for any grouping of leaves into messages.
    ids: tuple[int, ...] | None = None
    # The message is cut into parts whose bytes have these proportions. Each part is cut into the same number of equal
    # chunks. None: all chunks are equal. Chunks are only as equal as whole buckets allow.
    shares: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtypes", tuple(map(jnp.dtype, self.dtypes)))
        if self.ids is None:
            object.__setattr__(self, "ids", tuple(range(len(self.shapes))))

    @classmethod
    def of(cls, codec: Any, leaves: Iterable[Any], chunks: int = 1, ids: Iterable[int] | None = None) -> "Layout":
        leaves = list(leaves)
        shapes, dtypes = tuple(tuple(x.shape) for x in leaves), tuple(x.dtype for x in leaves)
        return cls(codec, shapes, dtypes, chunks, None if ids is None else tuple(ids))

    def of_sum(self, ranks: int) -> "Layout":
        """Returns the layout of the sum of `ranks` ranks' messages. Its pieces have the same elements."""
        return dataclasses.replace(self, codec=self.codec.of_sum(ranks))

    @functools.cached_property
    def sizes(self) -> tuple[int, ...]:
        return tuple(map(math.prod, self.shapes))

    @functools.cached_property
    def _cuts(self) -> tuple[list[list[int]], int]:
        """A pair: the number of units before chunk c, [leaves][c = 0..chunks]; the number of elements of a unit."""
        codec = self.codec
        unit = codec.bucket_size or UNIT
        counted = 4 * codec.meta if codec.bucket_size else 0  # if a piece is one bucket, its metadata is ignored here
        rows, before = [], 0
        for size, dtype in zip(self.sizes, self.dtypes):
            full, rest = divmod(size, unit)
            weight = counted + codec.weight(unit, dtype)
            raw = codec.raw_tail(rest)
            last = raw * dtype.itemsize + (counted + codec.weight(rest - raw, dtype) if rest > raw else 0)
            rows.append((before, weight, full, full + (rest > 0)))
            before += full * weight + last
        total = before
        shares = self.shares or (1,)
        cuts = self.chunks // len(shares)  # the number of chunks of a part

        def cut(c: int, before: int, weight: int, full: int, count: int) -> int:
            if c == self.chunks:
                return count
            part, k = divmod(c, cuts)
            share = sum(shares[:part]) * cuts + k * shares[part]
            target = -(-share * total // (sum(shares) * cuts))
            wanted = -(-(target - before) // weight) if target > before else 0
            return wanted if wanted <= full else count

        return [[cut(c, *row) for c in range(self.chunks + 1)] for row in rows], unit

    @functools.cached_property
    def _placed(self) -> tuple[tuple[tuple[Piece, ...], ...], tuple[int, ...], tuple[int, ...]]:
        """For each chunk: (its pieces, the position where the pieces end, its bytes), as a tuple of three tuples."""
        codec, (cuts, unit) = self.codec, self._cuts
        chunks, overflows, ends = [], [], []
        for c in range(self.chunks):
            pieces, at = [], 0
            for i, (size, bounds) in enumerate(zip(self.sizes, cuts)):
                if bounds[c] >= bounds[c + 1]:
                    continue
                start, end = bounds[c] * unit, min(bounds[c + 1] * unit, size)
                raw = codec.raw_tail(end - start)
                coded = end - start - raw
                bucket = coded if codec.whole else codec.bucket_size or 0
                pieces.append(Piece(i, start, coded=coded, raw=raw, bucket=bucket, meta=at, codes=0, tail=0))
                if bucket:
                    at += -(-coded // bucket) * 4 * codec.meta
            at = align16(at)
            placed = []
            for p in pieces:
                dtype, codes = self.dtypes[p.leaf], at
                at += sum(n * codec.code_bytes(size, dtype) for _, n, size in p.buckets())
                tail = align16(at)
                at = align16(tail + p.raw * dtype.itemsize)
                placed.append(dataclasses.replace(p, codes=codes, tail=tail))
            chunks.append(tuple(placed))
            overflows.append(at)
            ends.append(align16(at + sum(codec.overflow_bytes(p.coded, self.dtypes[p.leaf]) for p in placed)))
        return tuple(chunks), tuple(overflows), tuple(ends)

    @property
    def pieces(self) -> tuple[tuple[Piece, ...], ...]:
        return self._placed[0]

    @property
    def overflows(self) -> tuple[int, ...]:
        """The position in each chunk where the overflow begins, after the pieces."""
        return self._placed[1]

    @property
    def ends(self) -> tuple[int, ...]:
        """The bytes of each chunk."""
        return self._placed[2]

    @property
    def carried(self) -> "Layout":
        """The layout of the same message with the codec's carrier. Its pieces have the same elements."""
        return dataclasses.replace(self, codec=self.codec.carrier)

    @property
    def chunk_bytes(self) -> int:
        """The bytes of the longest chunk."""
        return max(self.ends)

    @property
    def attributes(self) -> dict[str, Any]:
        return dict(
            codec=self.codec.native,
            sizes=np.array(self.sizes, np.int64),
            dtypes=np.array([DTYPES.index(d) for d in self.dtypes], np.int64),
            ids=np.array(self.ids, np.int64),
            shares=np.array(self.shares or (), np.int64),
            chunks=np.int64(self.chunks),
        )


@functools.lru_cache
def layout_of(codec: Any, shape: tuple[int, ...], dtype: DTypeLike) -> Layout:
    return Layout(codec, (shape,), (jnp.dtype(dtype),))
