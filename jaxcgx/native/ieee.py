"""IEEE arithmetic in jnp, for the reference implementation, also of small floating-point numbers.

XLA on CPUs flushes denormals to zero, may fuse a product into the sum that uses it, and turns a division by a constant
into a product. So the wire format adds a product to a number only if the product is exact. Very small numbers are first
multiplied by 2^80 (`up`). That is exact and leaves no denormals.
"""

import dataclasses

import jax
import jax.numpy as jnp

from jaxcgx.typing import ArrayLike

TINY = 2.0**-60


def bits(x: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(x, jnp.int32)


def as_float(i: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(i, jnp.float32)


def magnitude_bits(x: jax.Array) -> jax.Array:
    return bits(x) & 0x7FFFFFFF


def shr(i: jax.Array, n: int) -> jax.Array:
    """Returns int32 numbers, shifted right logically."""
    return jax.lax.shift_right_logical(i, jnp.full_like(i, n))


def round_even(x: jax.Array) -> jax.Array:
    """Returns the nearest integers, ties to even."""
    return jax.lax.round(x, jax.lax.RoundingMethod.TO_NEAREST_EVEN)


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


# The power of two that brings tiny and huge buckets into the range of normal numbers


def scale_of(largest: jax.Array) -> jax.Array:
    """Returns the scale of buckets with this largest magnitude."""
    # 0 < largest < 2^-60 is one comparison of integers. LLVM would turn `m > 0` into a comparison of floats, which
    # flushes denormals.
    tiny = (magnitude_bits(largest) - 1).astype(jnp.uint32) < ((127 - 60) << 23) - 1
    power = jnp.where(tiny, jnp.float32(2.0**80), jnp.float32(1))
    return jnp.where(largest >= 2.0**100, jnp.float32(2.0**-40), power)


def scaled(x: jax.Array, scale: jax.Array) -> jax.Array:
    return jnp.where(scale > 1, up(x), x * jnp.minimum(scale, 1))


def unscaled(x: jax.Array, scale: jax.Array) -> jax.Array:
    return jnp.where(scale > 1, down(x), x / jnp.minimum(scale, 1))


@dataclasses.dataclass(frozen=True)
class Minifloat:
    """A format with a sign and denormals, but without infinities: xla_ffi/codec/minifloat.h in jnp."""

    exponent: int  # the bits of the exponent; its bias is as in IEEE 754
    mantissa: int  # the bits of the mantissa
    largest: float  # the largest number
    top: int  # the code of that number

    @property
    def bias(self) -> int:
        return 2 ** (self.exponent - 1) - 1

    @property
    def sign(self) -> int:
        """The position of the sign bit."""
        return self.exponent + self.mantissa

    def encode(self, y: jax.Array, noise: jax.Array | int | None = None) -> jax.Array:
        """Returns the codes of the nearest numbers, ties to even, or with noise those of one of the two neighbours.

        `noise` is uniform in [0, 65536). With 65535, the code is that of the neighbour with the larger magnitude.
        """
        drop = 23 - self.mantissa
        m = magnitude_bits(y)
        denormal = as_float(m) * 2.0 ** (self.mantissa + self.bias - 1)
        if noise is None:
            normal = (m + (1 << (drop - 1)) - 1 + ((m >> drop) & 1)) >> drop
            denormal = round_int(denormal)
        else:
            drawn = jnp.int32(noise)
            normal = (m + (drawn << (drop - 16)) + (1 << (drop - 17))) >> drop
            denormal = (round_int(denormal * 65536) + drawn) >> 16
        normal -= (127 - self.bias) << self.mantissa
        code = jnp.minimum(jnp.where(m < ((128 - self.bias) << 23), denormal, normal), self.top)
        return code | (shr(bits(y), 31 - self.sign) & (1 << self.sign))

    def decode(self, codes: jax.Array) -> jax.Array:
        m = codes & ((1 << self.sign) - 1)
        normal = as_float((m << (23 - self.mantissa)) + ((127 - self.bias) << 23))
        denormal = m.astype(jnp.float32) * 2.0 ** -(self.mantissa + self.bias - 1)
        y = jnp.where(m < (1 << self.mantissa), denormal, normal)
        return jnp.where(codes & (1 << self.sign), -y, y)


E2M1 = Minifloat(2, 1, 6.0, 0x7)
E4M3 = Minifloat(4, 3, 448.0, 0x7E)
E5M2 = Minifloat(5, 2, 57344.0, 0x7B)
