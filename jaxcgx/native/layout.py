"""The place of every part of a message, from its shapes alone.

The same in C++ is xla_ffi/codec/layout.h. docs/wire-format.md describes it.
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

Codec = Any  # jaxcgx.codecs.base.Codec, in a storey above this one
UNIT = 512  # chunks of a codec without buckets begin at a multiple of this
DTYPES = tuple(jnp.dtype(d) for d in ("float32", "bfloat16", "float16"))  # by their number on the FFI boundary


def align16(n: int) -> int:
    return -(-n // 16) * 16


def check_dtype(function: str, argument: str, dtype: Any) -> DType:
    """The dtype, if the leaves of a message may have it."""
    with contextlib.suppress(TypeError):
        dtype = jnp.dtype(dtype)
    if dtype not in DTYPES:
        raise wrong(function, argument, "float32, bfloat16 or float16", dtype, kind=TypeError)
    return dtype


@dataclasses.dataclass(frozen=True)
class Piece:
    """The part of a leaf that is in one chunk. Positions are bytes from the start of the chunk."""

    leaf: int
    start: int  # first element in the leaf
    coded: int  # elements that the codec sees
    raw: int  # elements of the raw tail after them
    bucket: int  # elements of a bucket (the last may be short); 0 without buckets
    meta: int  # position of the metadata
    codes: int
    tail: int

    def buckets(self) -> list[tuple[int, int, int]]:
        """(first element, number, size) of the whole buckets, then of the short one. Without buckets, one stretch."""
        if not self.bucket:
            return [(0, 1, self.coded)] if self.coded else []
        whole, rest = divmod(self.coded, self.bucket)
        short = [(whole * self.bucket, 1, rest)] if rest else []
        return ([(0, whole, self.bucket)] if whole else []) + short


@dataclasses.dataclass(frozen=True)
class Layout:
    """Leaves of given shapes and dtypes as one message of equal chunks.

    Attributes:
      codec: the codec of all leaves.
      shapes: the shapes of the leaves.
      dtypes: the dtypes of the leaves.
      chunks: the number of chunks. A chunk has whole buckets.
      ids: a number for each leaf, on which its noise depends (stochastic codecs). An id is the leaf's number in its
        tree, so one key gives the same bits however leaves are grouped into messages.
      shares: the message is cut into parts whose bytes have these proportions. Each part is cut into the same number of
        equal chunks. None: all chunks are equal.
    """

    codec: Codec
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[DType, ...]
    chunks: int = 1
    ids: tuple[int, ...] | None = None
    shares: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtypes", tuple(jnp.dtype(d) for d in self.dtypes))
        if self.ids is None:
            object.__setattr__(self, "ids", tuple(range(len(self.shapes))))

    @classmethod
    def of(
        cls: Any, codec: Codec, leaves: Iterable[Any], chunks: int = 1, ids: Iterable[int] | None = None
    ) -> "Layout":
        leaves = list(leaves)
        return cls(
            codec,
            tuple(tuple(x.shape) for x in leaves),
            tuple(x.dtype for x in leaves),
            chunks,
            None if ids is None else tuple(ids),
        )

    def of_sum(self, ranks: int) -> "Layout":
        """The layout of the sum of `ranks` ranks' messages. Its pieces have the same elements."""
        return dataclasses.replace(self, codec=self.codec.of_sum(ranks))

    @functools.cached_property
    def sizes(self) -> tuple[int, ...]:
        return tuple(math.prod(s) for s in self.shapes)

    @functools.cached_property
    def _cuts(self) -> tuple[list[list[int]], int]:
        """(the units of each leaf that are in chunks before c, for c = 0..chunks; the elements of a unit)."""
        codec = self.codec
        unit = codec.bucket_size or UNIT
        counted = 4 * codec.meta if codec.bucket_size else 0  # metadata of one bucket per piece is not balanced
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
        cuts = self.chunks // len(shares)  # chunks of a part

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
        """(the pieces of each chunk, where its pieces end, its bytes)."""
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
                bucket = codec.bucket_of(coded)
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
        """The pieces of each chunk."""
        return self._placed[0]

    @property
    def overflows(self) -> tuple[int, ...]:
        """Where the overflow of each chunk begins, behind its pieces."""
        return self._placed[1]

    @property
    def ends(self) -> tuple[int, ...]:
        """The bytes of each chunk."""
        return self._placed[2]

    @property
    def carried(self) -> "Layout":
        """The layout of the same message in the codec's carrier. Its pieces have the same elements."""
        return dataclasses.replace(self, codec=self.codec.carrier)

    @property
    def chunk_bytes(self) -> int:
        """The bytes of the longest chunk."""
        return max(self.ends)

    @property
    def attributes(self) -> dict[str, Any]:
        """The attributes that every native operation gets about its message."""
        return dict(
            codec=self.codec.native,
            sizes=np.array(self.sizes, np.int64),
            dtypes=np.array([DTYPES.index(d) for d in self.dtypes], np.int64),
            ids=np.array(self.ids, np.int64),
            shares=np.array(self.shares or (), np.int64),
            chunks=np.int64(self.chunks),
        )


@functools.lru_cache
def layout_of(codec: Codec, shape: tuple[int, ...], dtype: DTypeLike) -> Layout:
    """The layout of a message of one array."""
    return Layout(codec, (shape,), (jnp.dtype(dtype),))
