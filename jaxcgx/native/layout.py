"""Where everything of a message lies: xla_ffi/codec/layout.h for shapes. docs/wire-format.md says it in words."""

import dataclasses
import functools
import math

import jax.numpy as jnp
import numpy as np

UNIT = 512  # where chunks of a codec without buckets may begin: a multiple of this
DTYPES = tuple(jnp.dtype(d) for d in ("float32", "bfloat16", "float16"))  # by their number on the FFI boundary


def align16(n: int) -> int:
    return -(-n // 16) * 16


@dataclasses.dataclass(frozen=True)
class Piece:
    """What of a leaf falls into a chunk. Positions are bytes from the chunk's beginning."""

    leaf: int
    start: int  # first element in the leaf
    coded: int  # elements that the codec sees
    raw: int  # elements of the raw tail behind them
    bucket: int  # elements of a bucket (the last may be short); 0 without buckets
    meta: int
    codes: int
    tail: int

    def buckets(self):
        """(first element, number, size) of the whole buckets and of the short one; one stretch without buckets."""
        if not self.bucket:
            return [(0, 1, self.coded)] if self.coded else []
        whole, rest = divmod(self.coded, self.bucket)
        short = [(whole * self.bucket, 1, rest)] if rest else []
        return ([(0, whole, self.bucket)] if whole else []) + short


@dataclasses.dataclass(frozen=True)
class Layout:
    """Leaves of some shapes and dtypes as one message of `chunks` equal chunks.

    `ids` key the random numbers of each leaf (stochastic codecs): the number of the leaf in its tree, so that the
    same key gives the same bits however leaves are grouped into messages.
    """

    codec: "jaxcgx.Codec"  # noqa: F821  (codecs are above this module)
    shapes: tuple
    dtypes: tuple
    chunks: int = 1
    ids: tuple = None

    def __post_init__(self):
        object.__setattr__(self, "dtypes", tuple(jnp.dtype(d) for d in self.dtypes))
        if self.ids is None:
            object.__setattr__(self, "ids", tuple(range(len(self.shapes))))

    @classmethod
    def of(cls, codec, leaves, chunks=1, ids=None):
        leaves = list(leaves)
        return cls(
            codec,
            tuple(tuple(x.shape) for x in leaves),
            tuple(x.dtype for x in leaves),
            chunks,
            None if ids is None else tuple(ids),
        )

    def of_sum(self, ranks):
        """Of a sum of so many ranks' messages, in pieces of the same elements."""
        return dataclasses.replace(self, codec=self.codec.of_sum(ranks))

    @functools.cached_property
    def sizes(self):
        return tuple(math.prod(s) for s in self.shapes)

    @functools.cached_property
    def _cuts(self):
        """For each leaf the units in chunks before c, for c = 0..chunks; and its unit."""
        codec = self.codec
        unit = codec.bucket_size or UNIT
        counted = 4 * codec.meta if codec.bucket_size else 0  # a bucket per piece: not in the balance
        rows, before = [], 0
        for size, dtype in zip(self.sizes, self.dtypes):
            full, rest = divmod(size, unit)
            weight = counted + codec.weight(unit, dtype)
            last = 0
            if rest:
                last = rest * dtype.itemsize if codec.skip_incomplete else counted + codec.weight(rest, dtype)
            rows.append((before, weight, full, full + (rest > 0)))
            before += full * weight + last
        total = before

        def cut(c, before, weight, full, count):
            if c == self.chunks:
                return count
            target = -(-c * total // self.chunks)
            wanted = -(-(target - before) // weight) if target > before else 0
            return wanted if wanted <= full else count

        return [[cut(c, *row) for c in range(self.chunks + 1)] for row in rows], unit

    @functools.cached_property
    def _placed(self):
        codec, (cuts, unit) = self.codec, self._cuts
        chunks, ends = [], []
        for c in range(self.chunks):
            pieces, at = [], 0
            for i, (size, bounds) in enumerate(zip(self.sizes, cuts)):
                if bounds[c] >= bounds[c + 1]:
                    continue
                start, end = bounds[c] * unit, min(bounds[c + 1] * unit, size)
                raw = end % unit if codec.skip_incomplete else 0
                coded = end - start - raw
                bucket = coded if codec.whole else codec.bucket_size or 0
                pieces.append(Piece(i, start, coded, raw, bucket, at, 0, 0))
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
            ends.append(at)
        return tuple(chunks), max(ends)

    @property
    def pieces(self):
        """The pieces of each chunk."""
        return self._placed[0]

    @property
    def chunk_bytes(self) -> int:
        return self._placed[1]

    @property
    def attributes(self) -> dict:
        """What every native operation is told about the message."""
        return dict(
            codec=self.codec.native,
            sizes=np.array(self.sizes, np.int64),
            dtypes=np.array([DTYPES.index(d) for d in self.dtypes], np.int64),
            ids=np.array(self.ids, np.int64),
            chunks=np.int64(self.chunks),
        )
