"""AbsMax: symmetric levels around an exact 0."""
import dataclasses

import jax.numpy as jnp

from jaxcgx.codecs.base import check_integer, native_codec
from jaxcgx.codecs.grid import GridCodec, make_grid, scale_of, scaled, unit_of
from jaxcgx.native import ieee


@dataclasses.dataclass(frozen=True)
class AbsMax(GridCodec):
    """2^bits - 1 levels from -m to m, m the largest magnitude of the bucket. 0 decodes to exactly 0.

    bits: 2 to 8. bucket_size: elements that share a scale.
    """

    bits: int = 8
    bucket_size: int = 256

    def __post_init__(self):
        check_integer(self, "bits", 2, 8)
        check_integer(self, "bucket_size", 1)

    @property
    def native(self):
        return native_codec(3, self.bits, self.bucket_size)

    @property
    def top(self):
        return 2 ** (self.bits - 1) - 1

    def grid(self, lo, hi, x):
        return symmetric_grid(lo, hi, self.top)

    def quantize(self, x, grid, noise):
        return ieee.round_int(x * grid.inv) + self.top

    def value(self, codes):
        return (codes - self.top).astype(jnp.float32)


def symmetric_grid(lo, hi, steps, unit=None):
    """A grid whose unit is the largest magnitude / steps, or `unit`; of a constant bucket the constant itself."""
    largest = ieee.largest(lo, hi)
    scale = scale_of(largest)
    top = scaled(largest, scale)
    constant = ieee.bits(lo) == ieee.bits(hi)
    steps = jnp.where(constant, 1, jnp.float32(steps))
    return make_grid(lo, hi, jnp.where(constant, top, unit_of(top, steps, scale) if unit is None else unit), steps, scale)
