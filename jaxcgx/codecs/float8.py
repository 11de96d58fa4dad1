"""Float8: e4m3 or e5m2 with a scale per bucket."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxcgx.checks import MOST, check_choice, check_integer, set_field
from jaxcgx.codecs.attribute import Kind
from jaxcgx.codecs.grid import Grid, GridCodec, symmetric_grid
from jaxcgx.native.ieee import E4M3, E5M2, Minifloat
from jaxcgx.native.packing import unpack

_FORMATS = {"e4m3": E4M3, "e5m2": E5M2}
_DTYPES = {"e4m3": jnp.float8_e4m3fn, "e5m2": jnp.float8_e5m2}


@dataclasses.dataclass(frozen=True)
class Float8(GridCodec):
    """8-bit floating-point numbers. A scale per bucket maps its largest magnitude to the largest number of the format.

    Args:
      format: "e4m3" (3 bits of mantissa, up to 448) or "e5m2" (2 bits of mantissa, up to 57344).
      bucket_size: the number of elements that share a scale.
    """

    format: str = "e4m3"
    bucket_size: int = 128

    code_bits = 8
    kind = Kind.FLOAT8

    def __post_init__(self) -> None:
        set_field(self, "format", check_choice, tuple(_FORMATS))
        set_field(self, "bucket_size", check_integer, 1, MOST)

    def _kernel_fields(self) -> dict[str, Any]:
        return dict(bits=self._elements.exponent, bucket_size=self.bucket_size)

    @property
    def block(self) -> int:
        """The same as `bucket_size`."""
        return self.bucket_size

    @property
    def _elements(self) -> Minifloat:
        return _FORMATS[self.format]

    def grid(self, lo: jax.Array, hi: jax.Array, x: jax.Array) -> Grid:
        return symmetric_grid(lo, hi, self._elements.largest)

    def quantize(self, x: jax.Array, grid: Grid, noise: jax.Array | None) -> jax.Array:
        return self._elements.encode(x * grid.inv)

    def parts(self, meta: jax.Array, codes: jax.Array, n: int) -> tuple[jax.Array, jax.Array, None]:
        bits = unpack(codes, self.code_bits, n).astype(jnp.uint8)
        return jax.lax.bitcast_convert_type(bits, _DTYPES[self.format]), meta, None

    def value(self, codes: jax.Array) -> jax.Array:
        return self._elements.decode(codes)
