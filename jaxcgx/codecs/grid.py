"""Codecs whose buckets decode as base + unit * value(code): xla_ffi/codec/grid.h in jnp."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from jaxcgx.checks import unexpected
from jaxcgx.codecs.base import Codec
from jaxcgx.codecs.rotation import padded, rotate, rotate_back
from jaxcgx.native import ieee
from jaxcgx.native.packing import pack, packed_bytes, unpack
from jaxcgx.typing import ArrayLike, DType


@dataclasses.dataclass
class Grid:
    """The levels of each bucket, as float32[buckets, 1].

    Attributes:
      unit: the distance between two levels.
      base: the number to which the code of value 0 decodes.
      inv: 1 / unit, in the scaled bucket.
      origin: the level of code 0 in the scaled bucket; for ByteGrad in units.
      scale: the factor that brings tiny and huge buckets into the range of normal numbers.
      finite: bool; a bucket that isn't finite decodes to NaN.
    """

    unit: jax.Array
    base: jax.Array
    inv: jax.Array
    origin: jax.Array
    scale: jax.Array
    finite: jax.Array


def unit_of(range_: jax.Array, steps: ArrayLike, scale: jax.Array) -> jax.Array:
    """Returns the range / steps, rounded up to 16 significant bits, so that unit * code is exact."""
    unit = ieee.as_float((ieee.bits(ieee.divide(range_, steps)) + 0xFF) & ~0xFF)
    # Without its scale 2^80, a unit below 2^-53 is denormal. Then it must be a multiple of 2^-149, which is 2^-69 after
    # scaling.
    whole = jnp.ceil(unit * 2.0**69) * 2.0**-69
    return jnp.where((scale > 1) & (unit < 2.0**-53), whole, unit)


def make_grid(lo: jax.Array, hi: jax.Array, unit: jax.Array, steps: ArrayLike, scale: jax.Array) -> Grid:
    inv = jnp.where(unit > 0, 1 / unit, 0)
    real = ieee.unscaled(unit, scale)
    zero = jnp.zeros_like(lo)
    finite = jnp.isfinite(lo) & jnp.isfinite(hi) & jnp.isfinite(real * steps)
    return Grid(unit=real, base=zero, inv=inv, origin=zero, scale=scale, finite=finite)


def symmetric_grid(lo: jax.Array, hi: jax.Array, steps: ArrayLike, unit: jax.Array | None = None) -> Grid:
    """Returns a grid of this `unit`, by default the largest magnitude / steps. A constant bucket's is its magnitude."""
    largest = ieee.largest(lo, hi)
    scale = ieee.scale_of(largest)
    top = ieee.scaled(largest, scale)
    constant = ieee.bits(lo) == ieee.bits(hi)
    steps = jnp.where(constant, 1, jnp.float32(steps))
    unit = jnp.where(constant, top, unit_of(top, steps, scale) if unit is None else unit)
    return make_grid(lo, hi, unit=unit, steps=steps, scale=scale)


_SEED = np.zeros((1, 1), np.int32)  # the seed of all rotations; it is fixed, because rounding to nearest has no key


class GridCodec(Codec):
    """A codec whose codes are `code_bits` wide.

    Its metadata is the unit (meta = 1), or the unit and the base (meta = 2). A subclass sets `code_bits`, and defines
    `grid` and `quantize`. It defines `value` unless a code is its own value.

    - Codes are integers from 0 to 2^code_bits - 1. Larger ones would overwrite other codes.
    - Values are 0, or between 2^-16 and 2^16 in magnitude.
    - With `symmetric_grid`, there are codes of the values 1 and -1. The unit of a constant bucket is its magnitude.

    Attributes:
      code_bits: the number of bits of a code, from 1 to 15.
    """

    meta = 1

    code_bits: int = 0

    def code_bytes(self, n: int, dtype: DType) -> int:
        if not 1 <= self.code_bits <= 15:
            place = f"{type(self).__name__}.code_bits"
            raise unexpected(place, "the number of bits of a code, 1 to 15", self.code_bits, "set it in the class")
        return packed_bytes(padded(n) if self.rotate else n, self.code_bits)

    def grid(self, lo: jax.Array, hi: jax.Array, x: jax.Array) -> Grid:
        """Returns the levels of buckets x with the minima `lo` and the maxima `hi`."""
        raise NotImplementedError(f"{type(self).__name__}.grid")

    def quantize(self, x: jax.Array, grid: Grid, noise: jax.Array | None) -> jax.Array:
        """Returns the codes in this grid of the scaled buckets x, as int32, with the `noise` of `encode_buckets`."""
        raise NotImplementedError(f"{type(self).__name__}.quantize")

    def value(self, codes: jax.Array) -> jax.Array:
        """Returns the numbers that codes mean, in units."""
        return codes.astype(jnp.float32)

    def encode_buckets(self, x: jax.Array, noise: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        if self.rotate:
            rotated = rotate(x, _SEED)
            if noise is not None:
                noise = jnp.pad(noise, [(0, 0), (0, rotated.x.shape[1] - x.shape[1])], mode="wrap")
            meta, finite, codes = self._quantized(rotated.x, noise)
            meta = ieee.positive_zero(rotated.as_sent(meta))
            finite &= rotated.finite & jnp.isfinite(meta).all(-1, keepdims=True)
        else:
            meta, finite, codes = self._quantized(x, noise)
        return jnp.where(finite, meta, jnp.nan), pack(jnp.where(finite, codes, 0), self.code_bits)

    def _quantized(self, x: jax.Array, noise: jax.Array | None) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns (metadata, whether each bucket is finite, codes)."""
        lo, hi = (e[:, None] for e in ieee.extremes(x))
        bad = (ieee.magnitude_bits(x) >= 0x7F800000).any(-1, keepdims=True)
        grid = self.grid(lo, jnp.where(bad, jnp.inf, hi), x)
        codes = self.quantize(ieee.scaled(x, grid.scale), grid, noise)
        return jnp.concatenate([grid.unit, grid.base][: self.meta], -1), grid.finite, codes

    def split_buckets(self, meta: jax.Array, codes: jax.Array, n: int) -> tuple[jax.Array, jax.Array]:
        if self.rotate:
            return super().split_buckets(meta, codes, n)
        value = self.value(unpack(codes, self.code_bits, n))
        base = meta[:, 1:] if self.meta == 2 else jnp.zeros_like(meta)
        return base, ieee.multiply(meta[:, :1], value)

    def decode_buckets(self, meta: jax.Array, codes: jax.Array, n: int) -> jax.Array:
        if self.rotate:
            value = self.value(unpack(codes, self.code_bits, padded(n)))
            return rotate_back(value, _SEED, unit=meta[:, :1], base=meta[:, 1:] if self.meta == 2 else None, n=n)
        # Kernels add a base of +0, which makes -0 a +0. XLA drops such an addition.
        return ieee.positive_zero(ieee.add(*self.split_buckets(meta, codes, n)))
