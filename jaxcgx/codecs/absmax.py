"""AbsMax: symmetric levels around an exact 0."""

import dataclasses

import jax.numpy as jnp

from jaxcgx.checks import MOST, check_field, check_integer
from jaxcgx.codecs.base import Kind, native_codec
from jaxcgx.codecs.grid import GridCodec, symmetric_grid
from jaxcgx.native import ieee


@dataclasses.dataclass(frozen=True)
class AbsMax(GridCodec):
    """2^bits - 1 levels from -m to m, m the largest magnitude of the bucket. 0 decodes to exactly 0.

    bits: 2 to 8. bucket_size: elements that share a scale.
    """

    bits: int = 8
    bucket_size: int = 256

    def __post_init__(self):
        check_field(self, "bits", check_integer, 2, 8)
        check_field(self, "bucket_size", check_integer, 1, MOST)

    @property
    def native(self):
        return native_codec(Kind.ABSMAX, self.bits, self.bucket_size)

    @property
    def top(self):
        return 2 ** (self.bits - 1) - 1

    def grid(self, lo, hi, x):
        return symmetric_grid(lo, hi, self.top)

    def quantize(self, x, grid, noise):
        return ieee.round_int(x * grid.inv) + self.top

    def value(self, codes):
        return (codes - self.top).astype(jnp.float32)
