"""Micro: small floating-point numbers in blocks that share a scale of 8 bits."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxcgx.checks import check_choice, set_field
from jaxcgx.codecs.attribute import Kind
from jaxcgx.codecs.grid import GridCodec, make_grid, unit_of
from jaxcgx.codecs.rotation import MOST, drawn_seed, padded, rotate, rotate_back, sent_seed, unbiased
from jaxcgx.native import ieee
from jaxcgx.native.ieee import E2M1, E4M3, Minifloat
from jaxcgx.native.packing import BLOCK, pack, unpack
from jaxcgx.typing import DType


@dataclasses.dataclass(frozen=True)
class _Format:
    number: int  # MicroFormat in xla_ffi/codec/traits.h
    elements: Minifloat
    block: int  # the elements that share a scale
    bits: int  # the bits of an element


_FORMATS = {"nvfp4": _Format(1, E2M1, 16, 4), "mxfp4": _Format(2, E2M1, 32, 4), "mxfp8": _Format(3, E4M3, 32, 8)}
_UP = 0xFFFF  # the noise with which Minifloat.encode rounds away from 0
_ROTATED = 0.5  # the largest scale of a rotated bucket, so that sums of its values are exact (rotate_back)


@dataclasses.dataclass(frozen=True)
class Micro(GridCodec):
    """Floats of 4 or 8 bits in blocks that share a scale of 8 bits: NVIDIA's NVFP4, and two formats of OCP's MX.

    Args:
      format: "nvfp4" (e2m1, a scale in e4m3 for 16 elements, and a float32 scale for each leaf in each chunk of a
        message), "mxfp4" (e2m1, a power of two for 32 elements) or "mxfp8" (e4m3, a power of two for 32 elements).
      rounding: "nearest", "stochastic" or "eden". The last two are unbiased and need a key. "eden", only for "nvfp4",
        has less than half of the squared error of "stochastic": buckets of 4096 elements are rotated with random signs
        and a Hadamard transform, and rounded to nearest. The float32 scale of each bucket corrects the bias, as in EDEN
        and MS-EDEN. If a few elements have most of a bucket's norm, a bias remains (docs/error-bounds.md).
    """

    format: str = "nvfp4"
    rounding: str = "nearest"

    kind = Kind.MICRO

    def __post_init__(self) -> None:
        set_field(self, "format", check_choice, tuple(_FORMATS))
        choices = ("nearest", "stochastic", *["eden"] * (self.format == "nvfp4"))
        set_field(self, "rounding", check_choice, choices)

    @property
    def _format(self) -> _Format:
        return _FORMATS[self.format]

    @property
    def stochastic(self) -> bool:
        """Whether `rounding` needs a key."""
        return self.rounding != "nearest"

    @property
    def rotate(self) -> bool:
        """Whether `rounding` is "eden"."""
        return self.rounding == "eden"

    @property
    def whole(self) -> bool:
        """Whether all elements of a leaf in a chunk share a scale, as with "nvfp4" except with "eden"."""
        return self.format == "nvfp4" and not self.rotate

    @property
    def bucket_size(self) -> int | None:
        """None with "nvfp4", where all elements of a leaf in a chunk are one bucket, and 4096 with "eden"."""
        if self.rotate:
            return MOST
        return None if self.whole else 512  # blocks are independent: buckets only decide where messages may be cut

    @property
    def block(self) -> int | None:
        """The elements that share a scale of 8 bits; None with "eden"."""
        return None if self.rotate else self._format.block

    @property
    def meta(self) -> int:
        """1 with "nvfp4", 2 with "eden", and 0 otherwise."""
        return 2 if self.rotate else int(self.whole)

    def _kernel_fields(self) -> dict[str, Any]:
        fields = dict(stochastic=self.stochastic, rotate=self.rotate)
        return dict(bits=self._format.number, bucket_size=self.bucket_size or 0) | fields

    def code_bytes(self, n: int, dtype: DType) -> int:
        blocks = -(-(padded(n) if self.rotate else n) // BLOCK)
        return blocks * (BLOCK // 8 * self._format.bits + BLOCK // self._format.block)

    def encode_buckets(self, x: jax.Array, noise: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        of, count = self._format, len(x)
        if self.rotate:
            assert noise is not None
            seed = drawn_seed(noise)
            rotated = rotate(x, seed)
            _, scales, elements = self._rounded(rotated.x, None)
            values = jnp.abs(of.elements.decode(elements)) * E4M3.decode(scales)[..., None]
            meta, finite = unbiased(rotated, seed, values.reshape(rotated.x.shape))
        else:
            meta, scales, elements = self._rounded(x, noise)
            finite = jnp.isfinite(meta).all(1, keepdims=True)
        codes = pack(elements.reshape(count, -1, BLOCK), of.bits)
        scales = scales.astype(jnp.uint8).reshape(count, -1, BLOCK // of.block)
        return meta, jnp.where(finite, jnp.concatenate([codes, scales], -1).reshape(count, -1), 0)

    def _rounded(self, x: jax.Array, noise: jax.Array | None) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns (metadata, codes of the scales of blocks, codes of their elements)."""
        of, (count, n) = self._format, x.shape
        in_blocks = lambda y: jnp.pad(y, [(0, 0), (0, -n % BLOCK)]).reshape(count, -1, of.block)
        if self.format == "nvfp4":
            meta, scales, y = self._tensor_scaled(in_blocks(x), up=noise is not None)
        else:
            meta = jnp.zeros((count, 0), jnp.float32)
            scales, y = self._power_scaled(in_blocks(x), up=noise is not None)
        return meta, scales, of.elements.encode(y, None if noise is None else in_blocks(noise))

    def _tensor_scaled(self, blocks: jax.Array, up: bool) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns, for NVFP4, (scales of buckets, codes of the scales of blocks, elements divided by both scales).

        With `up`, scales are rounded up, so that no element is larger than the format's largest number.
        """
        top = ieee.as_float(ieee.magnitude_bits(blocks).max((1, 2)))[:, None]
        scale, steps = ieee.scale_of(top), (_ROTATED if self.rotate else E4M3.largest) * self._format.elements.largest
        grid = make_grid(top, top, unit=unit_of(ieee.scaled(top, scale), steps, scale), steps=steps, scale=scale)
        y = ieee.scaled(blocks, scale[..., None]) * grid.inv[..., None]
        scales = E4M3.encode(ieee.divide(jnp.abs(y).max(-1), self._format.elements.largest), _UP if up else None)
        value = E4M3.decode(scales)
        inverse = jnp.where(value > 0, 1 / value, 0)
        return jnp.where(grid.finite, grid.unit, jnp.nan), scales, y * inverse[..., None]

    def _power_scaled(self, blocks: jax.Array, up: bool) -> tuple[jax.Array, jax.Array]:
        """Returns, for MX, (biased exponents of the scales of blocks, elements divided by these scales).

        `up` is that of `_tensor_scaled`. Without it, scales are those of OCP's specification.
        """
        top, largest = ieee.magnitude_bits(blocks).max(-1), self._format.elements.largest
        finite = top < 0x7F800000
        above = math.frexp(largest)[1] - 1
        if up:  # the next power of two, if `top` has a larger mantissa than `largest`
            top += 0x7FFFFF - (np.float32(largest).view(np.int32) & 0x7FFFFF)
        scales = jnp.where(finite, jnp.maximum((top >> 23) - above, 0), 255)
        power = lambda e: ieee.as_float(jnp.clip(e, 1, 254) << 23)[..., None]
        # XLA flushes denormals, so blocks with a small scale are multiplied by 2^80 first. In other blocks, denormals
        # become 0 anyway.
        small = scales < 30
        y = jnp.where(small[..., None], ieee.up(blocks) * power(174 - scales), blocks * power(254 - scales))
        return scales, jnp.where(finite[..., None], y, 0)

    def _unpacked(self, codes: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the codes of elements and of scales: uint8[buckets, blocks, block] and uint8[buckets, blocks, 1]."""
        of, count = self._format, len(codes)
        rows = codes.reshape(count, -1, self.code_bytes(1, jnp.dtype("float32")))
        elements, scales = unpack(rows[..., : 16 * of.bits], of.bits, BLOCK), rows[..., 16 * of.bits :]
        return elements.astype(jnp.uint8).reshape(count, -1, of.block), scales.reshape(count, -1, 1)

    def parts(self, meta: jax.Array, codes: jax.Array, n: int) -> tuple[jax.Array, jax.Array, jax.Array | None]:
        elements, scales = self._unpacked(codes)
        values = elements.reshape(len(codes), -1)[:, :n]
        if self._format.bits == 4:
            values = jax.lax.bitcast_convert_type(values.astype(jnp.uint4), jnp.float4_e2m1fn)
        else:
            values = jax.lax.bitcast_convert_type(values, jnp.float8_e4m3fn)
        of_scales = jnp.float8_e4m3fn if self.whole else jnp.float8_e8m0fnu
        scales = jax.lax.bitcast_convert_type(scales[:, : n // self._format.block, 0], of_scales)
        return values, scales, meta[:, 0] if self.whole else None

    def decode_buckets(self, meta: jax.Array, codes: jax.Array, n: int) -> jax.Array:
        if not self.rotate:
            return super().decode_buckets(meta, codes, n)
        elements, scales = (x.astype(jnp.int32) for x in self._unpacked(codes))
        most = _ROTATED * E2M1.largest  # no encoder writes larger values
        values = jnp.clip(E2M1.decode(elements) * E4M3.decode(scales), -most, most)
        return rotate_back(values.reshape(len(codes), -1), sent_seed(meta), unit=meta[:, :1], base=None, n=n)

    def split_buckets(self, meta: jax.Array, codes: jax.Array, n: int) -> tuple[jax.Array, jax.Array]:
        if self.rotate:
            return super().split_buckets(meta, codes, n)
        of, count = self._format, len(codes)
        elements, scales = (x.astype(jnp.int32) for x in self._unpacked(codes))
        elements = of.elements.decode(elements)
        if self.whole:
            value = ieee.multiply(meta[..., None], elements * E4M3.decode(scales))
        else:
            power = jnp.where(scales == 0, 0x400000, jnp.where(scales == 255, 0x7FC00000, scales << 23))
            value = ieee.multiply(ieee.as_float(power), elements)
        return jnp.zeros((count, 1), jnp.float32), value.reshape(count, -1)[:, :n]
