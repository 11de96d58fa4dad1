"""IEEE arithmetic in jnp, for the reference implementation.

XLA on CPUs flushes denormals to zero, may fuse a product into the sum that uses it, and turns a division by a constant
into a product. So the wire format adds a product to a number only if the product is exact. Very small numbers are first
multiplied by 2^80 (`up`). That is exact and leaves no denormals.
"""

import jax
import jax.numpy as jnp
from jax import lax

from jaxcgx.typing import ArrayLike

TINY = 2.0**-60


def bits(x: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(x, jnp.int32)


def as_float(i: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(i, jnp.float32)


def magnitude_bits(x: jax.Array) -> jax.Array:
    return bits(x) & 0x7FFFFFFF


def shr(i: jax.Array, n: int) -> jax.Array:
    """Returns int32 numbers, shifted right logically."""
    return lax.shift_right_logical(i, jnp.full_like(i, n))


def round_even(x: jax.Array) -> jax.Array:
    """Returns the nearest integers, ties to even."""
    return lax.round(x, lax.RoundingMethod.TO_NEAREST_EVEN)


def round_int(x: jax.Array) -> jax.Array:
    return round_even(x).astype(jnp.int32)


def _with_sign(magnitude: jax.Array, x: jax.Array) -> jax.Array:
    """Returns the bits of a magnitude as a float with the sign of x."""
    return as_float(magnitude | (bits(x) & jnp.int32(-(2**31))))


def up(x: jax.Array) -> jax.Array:
    """Returns x * 2^80, also for denormals."""
    m = magnitude_bits(x)
    return _with_sign(bits(jnp.where(m < 0x800000, m.astype(jnp.float32) * 2.0**-69, as_float(m) * 2.0**80)), x)


def down(x: jax.Array) -> jax.Array:
    """Returns x * 2^-80. Denormal results are rounded to nearest even."""
    m = as_float(magnitude_bits(x))
    small = m < 2.0**-46
    steps = round_int(jnp.where(small, m, 0) * 2.0**69)
    return _with_sign(jnp.where(small, steps, bits(m * 2.0**-80)), x)


def add(a: jax.Array, b: jax.Array) -> jax.Array:
    both_small = (jnp.abs(a) < TINY) & (jnp.abs(b) < TINY)
    return jnp.where(both_small, down(up(a) + up(b)), a + b)


def subtract(a: jax.Array, b: jax.Array) -> jax.Array:
    return add(a, -b)


def multiply(unit: jax.Array, value: ArrayLike) -> jax.Array:
    """Returns unit * value. `value` must be 0, or between 2^-16 and 2^16 in magnitude."""
    return jnp.where(jnp.abs(unit) < TINY, down(up(unit) * value), unit * value)


def divide(a: jax.Array, b: ArrayLike) -> jax.Array:
    """Returns the quotient a / b, never a product with the reciprocal, even if b is a constant."""
    b = jnp.where(a == a, jnp.float32(b), 1)
    return jnp.where(jnp.abs(a) < TINY, down(up(a) / b), a / b)


def extremes(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns (smallest, largest) of finite numbers along the last axis. Denormals are compared, not flushed."""
    i = bits(x)
    order = i ^ ((i >> 31) & 0x7FFFFFFF)
    undo = lambda o: as_float(o ^ ((o >> 31) & 0x7FFFFFFF))
    return undo(order.min(-1)), undo(order.max(-1))


def largest(a: jax.Array, b: jax.Array) -> jax.Array:
    """Returns the larger magnitude of two numbers. Denormals are compared, not flushed."""
    return as_float(jnp.maximum(magnitude_bits(a), magnitude_bits(b)))


def positive_zero(x: jax.Array) -> jax.Array:
    """Returns x with +0 in place of -0."""
    return as_float(jnp.where(bits(x) == -(2**31), 0, bits(x)))
