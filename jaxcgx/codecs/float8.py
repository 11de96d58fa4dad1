"""Float8: e4m3 or e5m2 with a scale per bucket."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from jaxcgx.checks import MOST, check_choice, check_field, check_integer
from jaxcgx.codecs.attribute import Kind, native_codec
from jaxcgx.codecs.grid import Grid, GridCodec, symmetric_grid
from jaxcgx.native import ieee

_EXPONENT_BITS = {"e4m3": 4, "e5m2": 5}


@dataclasses.dataclass(frozen=True)
class Float8(GridCodec):
    """8-bit floating point times a scale per bucket, which maps the largest magnitude to the format's largest number.

    Args:
      format: "e4m3" (3 bits of mantissa, up to 448) or "e5m2" (2 bits, up to 57344).
      bucket_size: elements that share a scale.
    """

    format: str = "e4m3"
    bucket_size: int = 128

    code_bits = 8

    def __post_init__(self) -> None:
        check_field(self, "format", check_choice, tuple(_EXPONENT_BITS))
        check_field(self, "bucket_size", check_integer, 1, MOST)

    @property
    def native(self) -> dict[str, np.generic]:
        return native_codec(Kind.FLOAT8, bits=_EXPONENT_BITS[self.format], bucket_size=self.bucket_size)

    @property
    def _shape(self) -> tuple[int, int, int, float]:
        """(bits of the mantissa, exponent bias, code of the largest number, largest number)."""
        return (3, 7, 0x7E, 448.0) if self.format == "e4m3" else (2, 15, 0x7B, 57344.0)

    def grid(self, lo: jax.Array, hi: jax.Array, x: jax.Array) -> Grid:
        return symmetric_grid(lo, hi, self._shape[3])

    def quantize(self, x: jax.Array, grid: Grid, noise: jax.Array | None) -> jax.Array:
        mantissa, bias, largest, _ = self._shape
        drop = 23 - mantissa
        y = x * grid.inv
        m = ieee.magnitude_bits(y)
        normal = ((m + (1 << (drop - 1)) - 1 + ((m >> drop) & 1)) >> drop) - ((127 - bias) << mantissa)
        denormal = ieee.round_int(ieee.as_float(m) * 2.0 ** (mantissa + bias - 1))
        code = jnp.minimum(jnp.where(m < ((128 - bias) << 23), denormal, normal), largest)
        return code | (ieee.shr(ieee.bits(y), 24) & 0x80)

    def value(self, codes: jax.Array) -> jax.Array:
        mantissa, bias, _, _ = self._shape
        m = codes & 0x7F
        normal = ieee.as_float((m << (23 - mantissa)) + ((127 - bias) << 23))
        denormal = m.astype(jnp.float32) * 2.0 ** -(mantissa + bias - 1)
        y = jnp.where(m < (1 << mantissa), denormal, normal)
        return jnp.where(codes & 0x80, -y, y)
