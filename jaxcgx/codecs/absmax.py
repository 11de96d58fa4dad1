"""AbsMax: symmetric levels around an exact 0."""

import dataclasses

import jax
import jax.numpy as jnp

from jaxcgx.checks import MOST, check_flag, check_integer, set_field
from jaxcgx.codecs.attribute import Kind
from jaxcgx.codecs.grid import Grid, GridCodec, symmetric_grid
from jaxcgx.codecs.rotation import check_block
from jaxcgx.native import ieee
from jaxcgx.native.packing import unpack


@dataclasses.dataclass(frozen=True)
class AbsMax(GridCodec):
    """2^bits - 1 levels from -m to m, where m is the largest magnitude of the bucket. 0 decodes to exactly 0.

    Args:
      bits: the bits of an element, 2 to 8.
      bucket_size: the number of elements that share a scale.
      rotate: whether each bucket is rotated first, as in `MaxMin`.
    """

    bits: int = 8
    bucket_size: int = 256
    rotate: bool = False

    kind = Kind.ABSMAX

    def __post_init__(self) -> None:
        set_field(self, "bits", check_integer, 2, 8)
        set_field(self, "rotate", check_flag)
        if self.rotate:
            set_field(self, "bucket_size", check_block)
        set_field(self, "bucket_size", check_integer, 1, MOST)

    @property
    def code_bits(self) -> int:
        """The same as `bits`."""
        return self.bits

    @property
    def block(self) -> int | None:
        """The same as `bucket_size`; None with `rotate`."""
        return None if self.rotate else self.bucket_size

    @property
    def top(self) -> int:
        """The largest code on either side of 0."""
        return 2 ** (self.bits - 1) - 1

    def grid(self, lo: jax.Array, hi: jax.Array, x: jax.Array) -> Grid:
        return symmetric_grid(lo, hi, self.top)

    def quantize(self, x: jax.Array, grid: Grid, noise: jax.Array | None) -> jax.Array:
        return ieee.round_int(x * grid.inv) + self.top

    def parts(self, meta: jax.Array, codes: jax.Array, n: int) -> tuple[jax.Array, jax.Array, None]:
        return (unpack(codes, self.code_bits, n) - self.top).astype(jnp.int8), meta, None

    def value(self, codes: jax.Array) -> jax.Array:
        return (codes - self.top).astype(jnp.float32)
