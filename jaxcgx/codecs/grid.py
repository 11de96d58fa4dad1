"""Codecs whose buckets decode as base + unit * value(code): xla_ffi/codec/grid.h in jnp."""

import dataclasses

import jax.numpy as jnp

from jaxcgx.codecs.base import Codec
from jaxcgx.native import ieee
from jaxcgx.native.packing import pack, packed_bytes, unpack


@dataclasses.dataclass
class Grid:
    """Per bucket; see xla_ffi/codec/grid.h."""

    unit: object
    base: object
    inv: object
    origin: object
    scale: object
    finite: object


def scale_of(largest):
    # 0 < largest < 2^-60 as one comparison of integers: LLVM would make `m > 0` one of floats, and flush.
    tiny = (ieee.magnitude_bits(largest) - 1).astype(jnp.uint32) < ((127 - 60) << 23) - 1
    power = jnp.where(tiny, jnp.float32(2.0**80), jnp.float32(1))
    return jnp.where(largest >= 2.0**100, jnp.float32(2.0**-40), power)


def scaled(x, scale):
    return jnp.where(scale > 1, ieee.up(x), x * jnp.minimum(scale, 1))


def unscaled(x, scale):
    return jnp.where(scale > 1, ieee.down(x), x / jnp.minimum(scale, 1))


def unit_of(range_, steps, scale):
    unit = ieee.as_float((ieee.bits(ieee.divide(range_, steps)) + 0xFF) & ~0xFF)
    whole = jnp.ceil(unit * 2.0**69) * 2.0**-69
    return jnp.where((scale > 1) & (unit < 2.0**-53), whole, unit)


def make_grid(lo, hi, unit, steps, scale):
    inv = jnp.where(unit > 0, 1 / unit, 0)
    real = unscaled(unit, scale)
    zero = jnp.zeros_like(lo)
    finite = jnp.isfinite(lo) & jnp.isfinite(hi) & jnp.isfinite(real * steps)
    return Grid(real, zero, inv, zero, scale, finite)


def symmetric_grid(lo, hi, steps, unit=None):
    """A grid whose unit is the largest magnitude / steps, or `unit`; of a constant bucket the constant itself."""
    largest = ieee.largest(lo, hi)
    scale = scale_of(largest)
    top = scaled(largest, scale)
    constant = ieee.bits(lo) == ieee.bits(hi)
    steps = jnp.where(constant, 1, jnp.float32(steps))
    return make_grid(
        lo, hi, jnp.where(constant, top, unit_of(top, steps, scale) if unit is None else unit), steps, scale
    )


class GridCodec(Codec):
    """`code_bits` wide codes; meta 2: unit and base, meta 1: unit."""

    meta = 1

    @property
    def code_bits(self) -> int:
        return self.bits

    def code_bytes(self, n, dtype):
        return packed_bytes(n, self.code_bits)

    def grid(self, lo, hi, x) -> Grid:
        raise NotImplementedError

    def quantize(self, x, grid, noise):
        raise NotImplementedError

    def value(self, codes):
        return codes.astype(jnp.float32)

    def encode_buckets(self, x, noise):
        lo, hi = (e[:, None] for e in ieee.extremes(x))
        bad = (ieee.magnitude_bits(x) >= 0x7F800000).any(-1, keepdims=True)
        lo, hi = jnp.where(bad, -jnp.inf, lo), jnp.where(bad, jnp.inf, hi)
        grid = self.grid(lo, hi, x)
        codes = self.quantize(scaled(x, grid.scale), grid, noise)
        meta = jnp.concatenate([grid.unit, grid.base][: self.meta], -1)
        return jnp.where(grid.finite, meta, jnp.nan), pack(jnp.where(grid.finite, codes, 0), self.code_bits)

    def split_buckets(self, meta, codes, n):
        value = self.value(unpack(codes, self.code_bits, n))
        base = meta[:, 1:] if self.meta == 2 else jnp.zeros_like(meta)
        return base, ieee.multiply(meta[:, :1], value)

    def decode_buckets(self, meta, codes, n):
        # Kernels add to a base of +0; XLA drops such an addition, and with it the end of -0.
        return ieee.positive_zero(ieee.add(*self.split_buckets(meta, codes, n)))
