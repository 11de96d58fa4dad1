"""Micro: small floating-point numbers in blocks that share a scale of 8 bits."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxcgx.checks import check_choice, set_field
from jaxcgx.codecs.attribute import Kind
from jaxcgx.codecs.grid import GridCodec, make_grid, scale_of, scaled, unit_of
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


@dataclasses.dataclass(frozen=True)
class Micro(GridCodec):
    """Floats of 4 or 8 bits in blocks that share a scale of 8 bits: NVIDIA's NVFP4, and two formats of OCP's MX.

    Args:
      format: "nvfp4" (e2m1, a scale in e4m3 for 16 elements, and a float32 scale for each leaf in each chunk of a
        message), "mxfp4" (e2m1, a power of two for 32 elements) or "mxfp8" (e4m3, a power of two for 32 elements).
    """

    format: str = "nvfp4"

    kind = Kind.MICRO

    def __post_init__(self) -> None:
        set_field(self, "format", check_choice, tuple(_FORMATS))

    @property
    def _format(self) -> _Format:
        return _FORMATS[self.format]

    @property
    def whole(self) -> bool:
        """Whether all elements of a leaf in a chunk share a scale, as with "nvfp4"."""
        return self.format == "nvfp4"

    @property
    def bucket_size(self) -> int | None:
        """None with "nvfp4", where all elements of a leaf in a chunk are one bucket."""
        return None if self.whole else 512  # blocks are independent: buckets only decide where messages may be cut

    @property
    def block(self) -> int:
        """The elements that share a scale of 8 bits."""
        return self._format.block

    @property
    def meta(self) -> int:
        """1 with "nvfp4", and 0 otherwise."""
        return 1 if self.whole else 0

    def _kernel_fields(self) -> dict[str, Any]:
        return dict(bits=self._format.number, bucket_size=self.bucket_size or 0)

    def code_bytes(self, n: int, dtype: DType) -> int:
        return -(-n // BLOCK) * (BLOCK // 8 * self._format.bits + BLOCK // self._format.block)

    def encode_buckets(self, x: jax.Array, noise: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        of = self._format
        count, n = x.shape
        blocks = jnp.pad(x, [(0, 0), (0, -n % BLOCK)]).reshape(count, -1, of.block)
        if self.whole:
            meta, scales, y = self._tensor_scaled(blocks)
        else:
            meta = jnp.zeros((count, 0), jnp.float32)
            scales, y = self._power_scaled(blocks)
        codes = pack(of.elements.encode(y).reshape(count, -1, BLOCK), of.bits)
        scales = scales.astype(jnp.uint8).reshape(count, -1, BLOCK // of.block)
        coded = jnp.concatenate([codes, scales], -1).reshape(count, -1)
        return meta, jnp.where(jnp.isfinite(meta).all(1, keepdims=True), coded, 0)

    def _tensor_scaled(self, blocks: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns, for NVFP4, (scales of buckets, codes of the scales of blocks, elements divided by both scales)."""
        top = ieee.as_float(ieee.magnitude_bits(blocks).max((1, 2)))[:, None]
        scale, steps = scale_of(top), E4M3.largest * self._format.elements.largest
        grid = make_grid(top, top, unit=unit_of(scaled(top, scale), steps, scale), steps=steps, scale=scale)
        y = scaled(blocks, scale[..., None]) * grid.inv[..., None]
        scales = E4M3.encode(ieee.divide(jnp.abs(y).max(-1), self._format.elements.largest))
        value = E4M3.decode(scales)
        inverse = jnp.where(value > 0, 1 / value, 0)
        return jnp.where(grid.finite, grid.unit, jnp.nan), scales, y * inverse[..., None]

    def _power_scaled(self, blocks: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns, for MX, (biased exponents of the scales of blocks, elements divided by these scales)."""
        exponent = ieee.magnitude_bits(blocks).max(-1) >> 23
        above = math.frexp(self._format.elements.largest)[1] - 1
        finite = exponent < 255
        scales = jnp.where(finite, jnp.maximum(exponent - above, 0), 255)
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
            values = lax.bitcast_convert_type(values.astype(jnp.uint4), jnp.float4_e2m1fn)
        else:
            values = lax.bitcast_convert_type(values, jnp.float8_e4m3fn)
        of_scales = jnp.float8_e4m3fn if self.whole else jnp.float8_e8m0fnu
        scales = lax.bitcast_convert_type(scales[:, : n // self.block, 0], of_scales)
        return values, scales, meta[:, 0] if self.whole else None

    def split_buckets(self, meta: jax.Array, codes: jax.Array, n: int) -> tuple[jax.Array, jax.Array]:
        of, count = self._format, len(codes)
        elements, scales = (x.astype(jnp.int32) for x in self._unpacked(codes))
        elements = of.elements.decode(elements)
        if self.whole:
            value = ieee.multiply(meta[..., None], elements * E4M3.decode(scales))
        else:
            power = jnp.where(scales == 0, 0x400000, jnp.where(scales == 255, 0x7FC00000, scales << 23))
            value = ieee.multiply(ieee.as_float(power), elements)
        return jnp.zeros((count, 1), jnp.float32), value.reshape(count, -1)[:, :n]
