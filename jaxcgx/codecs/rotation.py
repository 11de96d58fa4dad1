"""The rotation of buckets, random signs and a Hadamard transform: xla_ffi/codec/rotation.h in jnp."""

import dataclasses

import jax
import jax.numpy as jnp

from jaxcgx.checks import check_integer, wrong
from jaxcgx.native import ieee
from jaxcgx.native.packing import BLOCK, LANES, ROWS
from jaxcgx.native.rng import philox
from jaxcgx.typing import ArrayLike

MOST = 4096  # the most elements of a rotated bucket
_DRAWN = 128 * LANES  # the signs in one draw of all lanes


def check_block(function: str, argument: str, value: int) -> int:
    """Checks the size of a rotated bucket, and returns it."""
    size = check_integer(function, argument, value)
    if size.bit_count() != 1 or not BLOCK <= size <= MOST:
        raise wrong(function, argument, f"a power of two from {BLOCK} to {MOST}, because buckets are rotated", size)
    return size


def padded(n: int) -> int:
    """Returns the number of elements of a rotated bucket of n: the next power of two, at least a block."""
    return max(BLOCK, 1 << (n - 1).bit_length()) if n else 0


def _halvings(n: int) -> tuple[int, int]:
    """Returns (a, b), where n = 2^(a + b). 2^a and 2^b are the powers of two around the square root of n."""
    bits = n.bit_length() - 1
    return bits - bits // 2, bits // 2


@dataclasses.dataclass
class Rotated:
    """Buckets after the rotation. Before, the largest magnitude of a bucket is brought into [1, 2)."""

    x: jax.Array  # float32[buckets, padded(n)]
    scale: jax.Array  # float32[buckets, 1], the power of two from `scale_of`
    exponent: jax.Array  # int32[buckets, 1], the biased exponent of the largest magnitude times `scale`
    finite: jax.Array  # bool[buckets, 1], whether all elements of the bucket are finite

    def as_sent(self, meta: jax.Array) -> jax.Array:
        """Returns metadata of `x` for the wire, divided by the factors of `x`, and by 2^a of `_halvings`."""
        down, _ = _halvings(self.x.shape[1])
        return ieee.unscaled(meta * 2.0**-down * ieee.as_float(self.exponent << 23), self.scale)


def rotate(x: jax.Array, seed: ArrayLike) -> Rotated:
    """Rotates buckets float32[buckets, n] with the signs of a seed, int32[buckets or 1, 1]."""
    n = padded(x.shape[1])
    largest = ieee.largest(*(e[:, None] for e in ieee.extremes(x)))
    scale = ieee.scale_of(largest)
    exponent = ieee.magnitude_bits(ieee.scaled(largest, scale)) >> 23
    y = ieee.scaled(x, scale) * ieee.as_float((254 - exponent) << 23)
    y = jnp.where(jnp.abs(y) < 2.0**-30, 0, y)  # so that no sum is denormal
    y = jnp.pad(y, [(0, 0), (0, n - x.shape[1])])
    finite = (ieee.magnitude_bits(x) < 0x7F800000).all(-1, keepdims=True)
    return Rotated(_hadamard(_flip(y, seed)), scale, exponent, finite)


def rotate_back(value: jax.Array, seed: ArrayLike, unit: jax.Array, base: jax.Array | None, n: int) -> jax.Array:
    """Returns the first n elements of buckets that are base + unit * value after the rotation."""
    # Values are whole multiples of 2^-10 up to 3, of 2^-9 below 4, or whole numbers below 256. So their sums are exact.
    down, up = _halvings(value.shape[1])
    sums = _hadamard(value) * 2.0**-up
    x = ieee.multiply(unit, sums)
    if base is not None:  # the transform of a constant is 0 except in the first element
        first = ieee.add(x[:, :1], ieee.multiply(base, 2.0**down))
        # Both terms may be many times the element, with opposite signs. Large ones are scaled down, or they overflow.
        reduced = ieee.multiply(unit * 2.0**-40, sums[:, :1]) + base * 2.0 ** (down - 40)
        x = x.at[:, :1].set(jnp.where(jnp.abs(base) >= 2.0**100, reduced * 2.0**40, first))
    return ieee.positive_zero(_flip(x, seed)[:, :n])


def drawn_seed(noise: jax.Array) -> jax.Array:
    """Returns seeds of 23 bits, int32[buckets, 1], from the noise of each bucket's first two elements."""
    second = min(1, noise.shape[1] - 1)
    return noise[:, :1] | (noise[:, second : second + 1] & 0x7F) << 16


def sent_seed(meta: jax.Array) -> jax.Array:
    """Returns the seeds in the metadata of `unbiased`."""
    return ieee.bits(meta[:, 1:]) & 0x7FFFFF


def unbiased(rotated: Rotated, seed: jax.Array, magnitudes: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns metadata, (unit, seed), and whether each bucket is finite.

    `magnitudes` are those of the numbers that are sent in place of the rotated ones. Any such numbers have no bias if
    the unit makes <x, decoded> = |x|^2, because all rotations of the rest are equally likely (EDEN).
    """
    y = jnp.abs(rotated.x)
    square = sum_in_order(product(y, y))
    unit = ieee.divide(square, sum_in_order(product(y, magnitudes)))
    unit = rotated.as_sent(jnp.where(square > 0, unit, 0))
    finite = rotated.finite & jnp.isfinite(unit)
    meta = jnp.concatenate([unit, ieee.as_float(0x3F800000 | seed)], -1)  # the seed as a float in [1, 2)
    return jnp.where(finite, meta, jnp.nan), finite


def sum_in_order(x: jax.Array) -> jax.Array:
    """Returns the sum of each bucket: float32[buckets, 1] from float32[buckets, padded(n)]."""
    # Rows are added in order, then neighbouring blocks, neighbouring pairs and so on, then lanes by halves.
    blocks = x.reshape(len(x), -1, ROWS, LANES)
    lanes = blocks[:, :, 0]
    for row in range(1, ROWS):
        lanes = lanes + blocks[:, :, row]
    while lanes.shape[1] > 1:
        lanes = lanes[:, ::2] + lanes[:, 1::2]
    while lanes.shape[2] > 1:
        half = lanes.shape[2] // 2
        lanes = lanes[..., :half] + lanes[..., half:]
    return lanes.squeeze(1)


def product(a: jax.Array, b: jax.Array) -> jax.Array:
    """Returns a * b without its last eight bits. The product can't be fused with a later sum."""
    return ieee.as_float(ieee.bits(a * b) & ~0xFF)


def _flip(x: jax.Array, seed: ArrayLike) -> jax.Array:
    n = x.shape[1]
    draws = -(-n // _DRAWN)
    counter = jnp.arange(draws * LANES, dtype=jnp.uint32).reshape(draws, LANES)
    zero = jnp.zeros_like(counter)
    key = jnp.asarray(seed).astype(jnp.uint32)[:, :, None]
    words = jnp.stack(philox((counter, zero, zero, zero), (key, jnp.zeros_like(key))), 2)  # [seeds, draws, 4, lanes]
    signs = words[:, :, :, None] << jnp.arange(32, dtype=jnp.uint32)[:, None] & jnp.uint32(1 << 31)
    signs = signs.reshape(len(key), -1)[:, :n]
    return ieee.as_float(ieee.bits(x) ^ jax.lax.bitcast_convert_type(signs, jnp.int32))


def _hadamard(x: jax.Array) -> jax.Array:
    """Returns the unscaled transform of each bucket: sums and differences of elements n/2 apart, then n/4, ..."""
    half = x.shape[1] // 2

    def step(_: int, x: jax.Array) -> jax.Array:
        # The results of a pair become neighbours. So every step has the same form, and the last one restores the order.
        a, b = x[:, :half], x[:, half:]
        return jnp.stack([a + b, a - b], -1).reshape(x.shape)

    return jax.lax.fori_loop(0, half.bit_length(), step, x)
