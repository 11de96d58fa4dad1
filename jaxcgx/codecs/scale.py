"""The power of two that keeps tiny and huge buckets in the range of normal numbers."""

import jax
import jax.numpy as jnp

from jaxcgx.native import ieee


def scale_of(largest: jax.Array) -> jax.Array:
    """Returns the scale of buckets with this largest magnitude."""
    # 0 < largest < 2^-60 is one comparison of integers. LLVM would turn `m > 0` into a comparison of floats, which
    # flushes denormals.
    tiny = (ieee.magnitude_bits(largest) - 1).astype(jnp.uint32) < ((127 - 60) << 23) - 1
    power = jnp.where(tiny, jnp.float32(2.0**80), jnp.float32(1))
    return jnp.where(largest >= 2.0**100, jnp.float32(2.0**-40), power)


def scaled(x: jax.Array, scale: jax.Array) -> jax.Array:
    return jnp.where(scale > 1, ieee.up(x), x * jnp.minimum(scale, 1))


def unscaled(x: jax.Array, scale: jax.Array) -> jax.Array:
    return jnp.where(scale > 1, ieee.down(x), x / jnp.minimum(scale, 1))
