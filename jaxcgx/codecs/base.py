"""The contract of a codec. docs/extend-codec.md shows a codec from the first line to its test."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxcgx.checks import as_shape
from jaxcgx.codecs.attribute import DENSE, Kind, attribute
from jaxcgx.native import ops
from jaxcgx.native.layout import Layout, as_dtype, layout_of
from jaxcgx.typing import DType, DTypeLike


class Codec:
    """Turns vectors into bytes and back. Subclass it as a frozen dataclass, because codecs are static under jit.

    A codec sees buckets of float32. It doesn't need to know about messages, ranks or dtypes. Code outside codecs/
    doesn't ask for its type (tests/test_house.py has two exceptions). That code reads the traits below and calls the
    methods. Every trait is a class attribute, a field or a property.

    A codec must define `code_bytes`, `encode_buckets` and `decode_buckets`. Everything else has a default. A bucket
    with a NaN or an infinity should decode to NaN. A constant bucket should decode exactly.

    Attributes:
      bucket_size: the number of elements that share metadata. None: there are no buckets, and the codec gets stretches
        of any length.
      meta: the number of float32 values of metadata per bucket.
      whole: whether all elements of a leaf in a chunk are one bucket. `bucket_size` is then None.
      stochastic: whether encoding draws noise, and so needs a key.
      correlated: whether ranks draw shares of common noise (exchange/message.py). Otherwise their noise is independent.
      skip_incomplete: whether the elements after the last whole bucket of a leaf travel raw.
      rotate: whether buckets are rotated before they are quantized (rotation.py).
      raw: whether all elements travel raw.
      skips: whether no element is sent. Only plans have such a codec. It is raw, too, because it encodes nothing.
      sparse: whether only some elements are sent. `indices` returns their indices.
      low_rank: whether the codec makes no bytes, and sums add up its factors (`PowerSGD`).
      carrier: the codec whose chunks this codec packs without loss. This codec then defines `pack_chunk` and
        `unpack_chunk` in place of `encode_buckets` and `decode_buckets`, and has the same `weight` as the carrier.
      contracts: whether the error is smaller than the input, as sums of squares of normally distributed numbers. Only
        then residuals stay bounded.
      diverges: whether training with plain feedback may diverge, although residuals stay bounded (docs/feedback.md).
      alone: whether leaves are compressed even if there is one rank.
      block: the number of consecutive elements that share a scale, if `parts` has the elements and scales. None: the
        codec has no such parts.
      most: the largest number of elements of a leaf in a chunk.
      state: the state that a sum can keep from call to call, by the names of compressed_psum's arguments.
      kind: the `Kind` that the kernels know the codec by (attribute.py). Without it, jnp runs in place of kernels.
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
    diverges: bool = False
    alone: bool = False
    block: int | None = None
    most: int = 2**40
    state: tuple[str, ...] = ("residuals",)
    kind: Kind

    # Methods that a codec may define

    def code_bytes(self, n: int, dtype: DType) -> int:
        """Returns the bytes of the codes of n elements of one bucket, for a leaf of this dtype."""
        raise NotImplementedError(f"{type(self).__name__}.code_bytes")

    def encode_buckets(self, x: jax.Array, noise: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        """Returns (metadata, codes): float32[buckets, meta] and uint8[buckets, code_bytes(n)].

        Args:
          x: float32[buckets, n].
          noise: int32[buckets, n], uniform in [0, 65536), if the codec is stochastic; else None.
        """
        raise NotImplementedError(f"{type(self).__name__}.encode_buckets")

    def decode_buckets(self, meta: jax.Array, codes: jax.Array, n: int) -> jax.Array:
        """Returns float32[buckets, n] from the `meta` and `codes` of `encode_buckets`.

        Any bytes must give defined values.
        """
        raise NotImplementedError(f"{type(self).__name__}.decode_buckets")

    def parts(self, meta: jax.Array, codes: jax.Array, n: int) -> tuple[jax.Array, jax.Array, jax.Array | None]:
        """Returns (values, scales, factors), from the arguments of `decode_buckets`: `meta`, `codes` and `n`.

        values[buckets, n] have a dtype that matrix multiplications take. value * scale * factor is the decoded element.
        scales[buckets, n / block] are for each block, and factors float32[buckets] for each bucket, or None.
        """
        raise NotImplementedError(f"{type(self).__name__}.parts")

    def split_buckets(self, meta: jax.Array, codes: jax.Array, n: int) -> tuple[jax.Array, jax.Array]:
        """Returns (base, value), from the arguments of `decode_buckets`: `meta`, `codes` and `n`.

        base + value is the decoded bucket. Sums over ranks add the bases first.
        """
        return jnp.zeros((codes.shape[0], 1), jnp.float32), self.decode_buckets(meta, codes, n)

    def pack_chunk(self, layout: Layout, c: int, chunk: jax.Array) -> jax.Array:
        """Returns chunk c of a message with this layout, from the carrier's chunk c."""
        raise NotImplementedError(f"{type(self).__name__}.pack_chunk")

    def unpack_chunk(self, layout: Layout, c: int, chunk: jax.Array) -> jax.Array:
        """Returns the carrier's chunk c, from chunk c of this layout. Any bytes must give defined values."""
        raise NotImplementedError(f"{type(self).__name__}.unpack_chunk")

    def overflow_bytes(self, n: int, dtype: DType) -> int:
        """Returns the most bytes that a piece of n elements of this dtype takes in the overflow of its chunk.

        The overflow comes after the codes of all pieces. Its used bytes come first, so a transport that can do so sends
        only these.
        """
        return 0

    def indices(self, codes: jax.Array, n: int) -> jax.Array:
        """Returns the indices of the elements that a sparse codec has sent of buckets of n: int32, ascending.

        `codes` are those of `encode_buckets`. Entries equal to n mean no element.
        """
        raise NotImplementedError(f"{type(self).__name__}.indices")

    def weight(self, n: int, dtype: DType) -> int:
        """Returns the weight of n elements of this dtype. A message is cut into chunks of equal weight."""
        return self.code_bytes(n, dtype)

    def of_sum(self, ranks: int) -> "Codec":
        """Returns the codec of the sum of messages that `ranks` ranks encoded with this codec."""
        return self

    def why_raw(self, shape: tuple[int, ...], dtype: DType) -> str | None:
        """Returns the reason why an array of this shape and dtype travels raw, or None if this codec can take it."""
        return None

    def approximate(self, x: jax.Array, key: jax.Array | None) -> jax.Array:
        """Returns x as it is decoded after encoding. `key` is uint32[2] if the codec is stochastic."""
        return ops.roundtrip(self, x, key)

    # Properties and methods that follow from the traits

    @property
    def native(self) -> dict[str, np.generic] | None:
        """The attribute that describes the codec to the kernels, or None without kernels.

        A subclass of a codec with kernels has none unless it sets `kind` itself: they don't know its changes.
        """
        fields = self._kernel_fields() if "kind" in vars(type(self)) else None
        return fields and attribute(fields | dict(kind=self.kind))

    def _kernel_fields(self) -> dict[str, Any] | None:
        """Returns fields of `native`, or None if the kernels can't do what these ask for.

        It takes every attribute of the codec that has the name of a field (`DENSE`). A codec whose attribute of such a
        name means something else overrides it.
        """
        return {name: getattr(self, name) or 0 for name in DENSE if hasattr(self, name)}

    @property
    def makes_codes(self) -> bool:
        """Whether leaves travel as codes, neither raw nor as factors."""
        return not (self.raw or self.low_rank)

    @property
    def sums_grow(self) -> bool:
        """Whether a sum has another codec, with room for the elements of all ranks."""
        return self.of_sum(2) != self

    @property
    def trims_sums(self) -> bool:
        """Whether a sum keeps only as many elements as one message. Then summing drops some of them."""
        return self.sparse and not self.sums_grow

    def raw_tail(self, n: int) -> int:
        """Returns how many of n elements travel raw: the last ones. The first of the n elements begins a bucket."""
        if self.raw:
            return n
        return n % self.bucket_size if self.skip_incomplete and self.bucket_size else 0

    def may_cut(self, n: int) -> bool:
        """Returns whether cutting a leaf every n elements leaves its rounded numbers unchanged.

        It doesn't if a bucket is cut, or if noise depends on the position of an element in the leaf.
        """
        return not (self.stochastic or self.whole or n % (self.bucket_size or 1))

    def wire_bytes(self, shape: tuple[int, ...], dtype: DTypeLike) -> int:
        """Returns the bytes on the wire of an array of this shape and dtype."""
        name = f"{type(self).__name__}.wire_bytes"
        return layout_of(self, as_shape(name, "shape", shape), as_dtype(name, "dtype", dtype)).chunk_bytes

    def likely_bytes(self, shape: tuple[int, ...], dtype: DTypeLike) -> int:
        """Returns `wire_bytes` of this shape and dtype without the zeros at the end, which Tcp does not send.

        If their number depends on the elements, it is estimated.
        """
        return self.wire_bytes(shape, dtype)


def spell(value: Any) -> str:
    """Returns a codec, or a value with codecs, as a user would write it: the first field, and others that were set."""
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key!r}: {spell(v)}' for key, v in value.items())}}}"
    if not isinstance(value, Codec) and not dataclasses.is_dataclass(value):
        return repr(value)
    fields = dataclasses.fields(value) if dataclasses.is_dataclass(value) else ()
    said = [f for i, f in enumerate(fields) if i == 0 or getattr(value, f.name) != f.default]
    return f"{type(value).__name__}({', '.join(f'{f.name}={spell(getattr(value, f.name))}' for f in said)})"
