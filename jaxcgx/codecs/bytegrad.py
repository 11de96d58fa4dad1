"""ByteGrad: 8-bit levels at whole multiples of a unit, with an exact 0 (Bagua's quantizer)."""

import dataclasses

import jax
import jax.numpy as jnp

from jaxcgx.checks import check_flag, set_field
from jaxcgx.codecs.attribute import Kind
from jaxcgx.codecs.grid import Grid, GridCodec, make_grid, unit_of
from jaxcgx.native import ieee


@dataclasses.dataclass(frozen=True)
class ByteGrad(GridCodec):
    """Bagua's ByteGrad: 256 levels at whole multiples of (max - min) / 255. 0 decodes to exactly 0.

    Each leaf has one minimum and one maximum in each chunk of a message. A message has one chunk per rank.

    Args:
      compatible: whether 1e-7 is added to the range, as in Bagua. This flattens small gradients.
    """

    compatible: bool = False

    meta = 2
    whole = True
    code_bits = 8
    kind = Kind.BYTEGRAD

    def __post_init__(self) -> None:
        set_field(self, "compatible", check_flag)

    def grid(self, lo: jax.Array, hi: jax.Array, x: jax.Array) -> Grid:
        scale = ieee.scale_of(ieee.largest(lo, hi))
        top = ieee.scaled(hi, scale)
        range_ = top - ieee.scaled(lo, scale)
        if self.compatible:
            range_ = range_ + jnp.float32(1e-7) * scale
        unit = jnp.where(range_ > 0, unit_of(range_, 255, scale), 0)
        grid = make_grid(lo, hi, unit=unit, steps=255, scale=scale)
        grid.origin = ieee.round_even(top * grid.inv) - 255
        grid.base = ieee.positive_zero(jnp.where(unit > 0, ieee.unscaled(grid.origin * unit, scale), lo))
        grid.finite &= jnp.isfinite(grid.base + grid.unit * 255)
        return grid

    def quantize(self, x: jax.Array, grid: Grid, noise: jax.Array | None) -> jax.Array:
        return jnp.clip(ieee.round_even(x * grid.inv) - grid.origin, 0, 255).astype(jnp.int32)
