"""Sign: one bit per element, and the mean magnitude of each bucket."""

import dataclasses

import jax
import jax.numpy as jnp

from jaxcgx.checks import MOST, check_integer, set_field
from jaxcgx.codecs.attribute import Kind
from jaxcgx.codecs.grid import Grid, GridCodec, symmetric_grid, unit_of
from jaxcgx.native import ieee
from jaxcgx.native.packing import BLOCK, LANES, ROWS

_GROUP = 256  # the blocks of a group: the sums of its blocks are added in order, and then the sums of the groups


@dataclasses.dataclass(frozen=True)
class Sign(GridCodec):
    """The sign of each element, times the bucket's mean magnitude.

    Args:
      bucket_size: the number of elements that share the mean.
    """

    bucket_size: int = 512

    code_bits = 1
    kind = Kind.SIGN
    diverges = True

    def __post_init__(self) -> None:
        set_field(self, "bucket_size", check_integer, 1, MOST)

    def grid(self, lo: jax.Array, hi: jax.Array, x: jax.Array) -> Grid:
        scale = ieee.scale_of(ieee.largest(lo, hi))
        total = sum_of_magnitudes(ieee.scaled(x, scale))
        return symmetric_grid(lo, hi, 1, unit=unit_of(total, x.shape[-1], scale))

    def quantize(self, x: jax.Array, grid: Grid, noise: jax.Array | None) -> jax.Array:
        return ieee.shr(ieee.bits(x), 31) ^ 1

    def value(self, codes: jax.Array) -> jax.Array:
        return (2 * codes - 1).astype(jnp.float32)


def _add_in_order(x: jax.Array) -> jax.Array:
    """Returns the sum over axis 1, added from first to last."""
    return jax.lax.fori_loop(1, x.shape[1], lambda i, total: total + x[:, i], x[:, 0])


def sum_of_magnitudes(x: jax.Array) -> jax.Array:
    """Returns the sum of magnitudes of each bucket: float32[buckets, 1] from float32[buckets, n]."""
    # Magnitudes are added in the order of xla_ffi/codec/grid.h: rows, lanes by halves, blocks, groups of blocks.
    buckets, n = x.shape
    x = jnp.abs(x)
    whole, rest = divmod(n, BLOCK)
    blocks = x[:, : whole * BLOCK].reshape(buckets, whole, ROWS, LANES)
    if rest:
        lanes = -(-rest // ROWS)
        last = jnp.pad(x[:, whole * BLOCK :], [(0, 0), (0, lanes * ROWS - rest)]).reshape(buckets, 1, ROWS, lanes)
        blocks = jnp.concatenate([blocks, jnp.pad(last, [(0, 0)] * 3 + [(0, LANES - lanes)])], 1)
    lanes = blocks[:, :, 0]
    for row in range(1, ROWS):
        lanes = lanes + blocks[:, :, row]
    while lanes.shape[-1] > 1:
        half = lanes.shape[-1] // 2
        lanes = lanes[..., :half] + lanes[..., half:]
    sums = lanes[..., 0]
    groups = -(-sums.shape[1] // _GROUP)
    if groups == 1:
        return _add_in_order(sums)[:, None]
    sums = jnp.pad(sums, [(0, 0), (0, groups * _GROUP - sums.shape[1])]).reshape(buckets * groups, _GROUP)
    return _add_in_order(_add_in_order(sums).reshape(buckets, groups))[:, None]
