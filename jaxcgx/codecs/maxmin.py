"""MaxMin: levels from the bucket's minimum to its maximum (CGX's quantizer)."""

import dataclasses
import statistics

import jax
import jax.numpy as jnp

from jaxcgx.checks import MOST, check_choice, check_flag, check_integer, set_field
from jaxcgx.codecs.attribute import Kind
from jaxcgx.codecs.grid import Grid, GridCodec, make_grid, unit_of
from jaxcgx.codecs.rotation import check_block
from jaxcgx.native import ieee


@dataclasses.dataclass(frozen=True)
class MaxMin(GridCodec):
    """2^bits levels from each bucket's minimum to its maximum.

    Args:
      bits: the bits of an element, 1 to 8.
      bucket_size: the number of elements that share a minimum and a maximum.
      rounding: "nearest", "stochastic" or "correlated". "stochastic" is unbiased and needs a key. "correlated" is also
        stochastic, and the errors of the ranks of an exchange cancel in their sum, if their numbers are alike.
      skip_incomplete: whether the elements after the last whole bucket travel raw.
      rotate: whether each bucket is rotated first, with fixed random signs and a Hadamard transform. The error is then
        the same as for normally distributed numbers, unless a few elements have most of a bucket's norm. `bucket_size`
        must be a power of two from 128 to 4096.
    """

    bits: int = 4
    bucket_size: int = 512
    rounding: str = "nearest"
    skip_incomplete: bool = False
    rotate: bool = False

    meta = 2
    kind = Kind.MAXMIN

    def __post_init__(self) -> None:
        set_field(self, "bits", check_integer, 1, 8)
        set_field(self, "rotate", check_flag)
        if self.rotate:
            set_field(self, "bucket_size", check_block)
        set_field(self, "bucket_size", check_integer, 1, MOST)
        set_field(self, "rounding", check_choice, ("nearest", "stochastic", "correlated"))
        set_field(self, "skip_incomplete", check_flag)

    @property
    def stochastic(self) -> bool:
        """Whether `rounding` needs a key."""
        return self.rounding != "nearest"

    @property
    def correlated(self) -> bool:
        """Whether `rounding` is "correlated"."""
        return self.rounding == "correlated"

    @property
    def contracts(self) -> bool:
        """Whether the error is smaller than the input, for normally distributed numbers."""
        # For numbers of variance 1, the squared error of rounding is unit^2 / 12, and twice that for stochastic
        # rounding. The range of a bucket of n numbers is about twice their largest number, which is near the quantile
        # 0.5264^(1/n) (from Blom's approximation).
        range_ = 2 * statistics.NormalDist().inv_cdf(0.5264 ** (1 / max(self.bucket_size, 2)))
        return (range_ / (2**self.bits - 1)) ** 2 / (6 if self.stochastic else 12) < 1

    @property
    def code_bits(self) -> int:
        """The same as `bits`."""
        return self.bits

    def grid(self, lo: jax.Array, hi: jax.Array, x: jax.Array) -> Grid:
        scale, steps = ieee.scale_of(ieee.largest(lo, hi)), 2**self.bits - 1
        origin = ieee.scaled(lo, scale)
        range_ = ieee.scaled(hi, scale) - origin
        grid = make_grid(lo, hi, unit=jnp.where(range_ > 0, unit_of(range_, steps, scale), 0), steps=steps, scale=scale)
        grid.base, grid.origin = ieee.positive_zero(lo), origin
        grid.finite &= jnp.isfinite(grid.base + grid.unit * steps)
        return grid

    def quantize(self, x: jax.Array, grid: Grid, noise: jax.Array | None) -> jax.Array:
        if noise is None:
            return ieee.round_int((x - grid.origin) * grid.inv)
        fixed = ieee.round_int((x - grid.origin) * (grid.inv * 65536))
        return jnp.minimum(ieee.shr(fixed + noise, 16), 2**self.bits - 1)
