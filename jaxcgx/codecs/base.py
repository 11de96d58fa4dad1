"""The contract of a codec. CONTRIBUTING.md shows a codec from the first line to its test."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxcgx.checks import check_shape
from jaxcgx.native import ops
from jaxcgx.native.layout import Layout, check_dtype, layout_of
from jaxcgx.typing import DType, DTypeLike


class Codec:
    """How a vector becomes bytes and back. Subclass it as a frozen dataclass: codecs are static under jit.

    A codec sees buckets of float32. It never needs to know about messages, ranks or dtypes, and no code outside its
    file asks which codec it has: that code reads the traits below and calls the methods. Every trait is a class
    attribute, a field or a property.

    A codec must define `code_bytes`, `encode_buckets` and `decode_buckets`. Everything else has a default. A bucket
    with a NaN or an infinity should decode to NaN, and a constant bucket exactly.

    Attributes:
      bucket_size: elements that share metadata. None: there are no buckets, and the codec gets stretches of any length.
      meta: float32 numbers of metadata of a bucket.
      whole: a bucket is all of a leaf in a chunk; `bucket_size` is then None.
      stochastic: encoding draws noise, and needs a key.
      correlated: ranks draw shares of the same noise (exchange/keys.py), else noise of their own.
      skip_incomplete: the elements after the last whole bucket of a leaf travel as they are.
      rotate: buckets are rotated before they are quantized (rotation.py).
      raw: all elements travel as they are.
      skips: no element travels. Only plans have such a codec, and it is raw too: it encodes nothing.
      sparse: only some elements are sent; `indices` says which.
      low_rank: the codec makes no bytes. Sums add up its factors (low_rank.py).
      carrier: the codec whose chunks this one packs, without loss. It then defines `pack_chunk` and `unpack_chunk`
        instead of `encode_buckets` and `decode_buckets`, and has its carrier's `weight`.
      contracts: the error is smaller than the input (sums of squares, normally distributed numbers). Residuals stay
        bounded only then.
      most: elements of a leaf in a chunk, at most.
      state: what a sum can keep from call to call, by the names of compressed_psum's arguments.
      native: the attribute that tells the kernels their codec (attribute.py). None: jnp runs. A subclass of a codec
        with kernels has none, unless it sets `native` itself: the kernels don't know what it changes.
    """

    bucket_size: int | None = None
    meta: int = 0
    whole: bool = False
    stochastic: bool = False
    correlated: bool = False
    skip_incomplete: bool = False
    rotate: bool = False
    raw: bool = False
    skips: bool = False
    sparse: bool = False
    low_rank: bool = False
    carrier: "Codec | None" = None
    contracts: bool = True
    most: int = 2**40
    state: tuple[str, ...] = ("residuals",)
    native: dict[str, np.generic] | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "native" not in cls.__dict__:
            cls.native = None

    # What a codec defines

    def code_bytes(self, n: int, dtype: DType) -> int:
        """Bytes of the codes of n elements of one bucket, for a leaf of that dtype."""
        raise NotImplementedError(f"{type(self).__name__}.code_bytes")

    def encode_buckets(self, x: jax.Array, noise: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        """Metadata and codes: (float32[buckets, meta], uint8[buckets, code_bytes(n)]).

        Args:
          x: float32[buckets, n].
          noise: int32[buckets, n], uniform in [0, 65536), if the codec is stochastic, else None.
        """
        raise NotImplementedError(f"{type(self).__name__}.encode_buckets")

    def decode_buckets(self, meta: jax.Array, codes: jax.Array, n: int) -> jax.Array:
        """float32[buckets, n] from the results of `encode_buckets`. Any bytes must give defined values."""
        raise NotImplementedError(f"{type(self).__name__}.decode_buckets")

    def split_buckets(self, meta: jax.Array, codes: jax.Array, n: int) -> tuple[jax.Array, jax.Array]:
        """(base, value), where base + value is the decoded bucket. Sums over ranks add the bases first."""
        return jnp.zeros((codes.shape[0], 1), jnp.float32), self.decode_buckets(meta, codes, n)

    def pack_chunk(self, layout: Layout, c: int, chunk: jax.Array) -> jax.Array:
        """Chunk c of a message from the chunk that the carrier makes of it."""
        raise NotImplementedError(f"{type(self).__name__}.pack_chunk")

    def unpack_chunk(self, layout: Layout, c: int, chunk: jax.Array) -> jax.Array:
        """The carrier's chunk. Any bytes must give defined values."""
        raise NotImplementedError(f"{type(self).__name__}.unpack_chunk")

    def overflow_bytes(self, n: int, dtype: DType) -> int:
        """Bytes behind the codes of all pieces of a chunk, at most, for a piece of n elements.

        They are used from the first on, so a transport that can do so sends the used ones only.
        """
        return 0

    def indices(self, codes: jax.Array, n: int) -> jax.Array:
        """Which of the n elements of a bucket a sparse codec has sent: int32, ascending. Entries of n mean none."""
        raise NotImplementedError(f"{type(self).__name__}.indices")

    def weight(self, n: int, dtype: DType) -> int:
        """The weight of n elements. A message is cut into chunks of equal weight."""
        return self.code_bytes(n, dtype)

    def of_sum(self, ranks: int) -> "Codec":
        """The codec of the sum of what `ranks` ranks sent with this one."""
        return self

    def why_raw(self, shape: tuple[int, ...], dtype: DType) -> str | None:
        """Why an array of that shape and dtype travels as it is. None: this codec takes it."""
        return None

    def approximate(self, x: jax.Array, key: jax.Array | None) -> jax.Array:
        """What the other end gets of x; `key` is uint32[2] if the codec is stochastic."""
        return ops.roundtrip(self, x, key)

    # What follows from the traits

    @property
    def makes_codes(self) -> bool:
        """Whether leaves travel as codes, neither as they are nor as factors."""
        return not (self.raw or self.low_rank)

    @property
    def sums_grow(self) -> bool:
        """Whether a sum has another codec, with room for what every rank sent."""
        return self.of_sum(2) != self

    def bucket_of(self, n: int) -> int:
        """Elements of a bucket where a chunk has n elements of a leaf; 0 without buckets."""
        return n if self.whole else self.bucket_size or 0

    def raw_tail(self, n: int) -> int:
        """How many of the last of n elements, counted from the start of a bucket, travel as they are."""
        if self.raw:
            return n
        return n % self.bucket_size if self.skip_incomplete and self.bucket_size else 0

    def may_cut(self, n: int) -> bool:
        """Whether a leaf that is cut every n elements rounds to the same numbers, each part on its own.

        It doesn't if a bucket is cut, nor if noise depends on an element's place in the leaf.
        """
        return not (self.stochastic or self.whole or n % (self.bucket_size or 1))

    def wire_bytes(self, shape: tuple[int, ...], dtype: DTypeLike) -> int:
        """Bytes on the wire of an array of that shape and dtype."""
        name = f"{type(self).__name__}.wire_bytes"
        return layout_of(self, check_shape(name, "shape", shape), check_dtype(name, "dtype", dtype)).chunk_bytes

    def likely_bytes(self, shape: tuple[int, ...], dtype: DTypeLike) -> int:
        """The same without zeros at the end, which Tcp does not send; estimated where that depends on the numbers."""
        return self.wire_bytes(shape, dtype)
