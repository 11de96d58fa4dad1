"""IEEE arithmetic in jnp where XLA's is not quite: on CPUs XLA flushes denormals to zero, may fuse a product into the
sum that uses it, and turns a division by a constant into a product. Used by the reference implementation only.

The wire avoids all of these but at the edges: a product is never added to something unless it is exact, and very
small numbers are handled after an exact multiplication by 2^80 (`up`), where nothing is denormal.
"""

import jax.numpy as jnp
from jax import lax

TINY = 2.0**-60


def bits(x):
    return lax.bitcast_convert_type(x, jnp.int32)


def as_float(i):
    return lax.bitcast_convert_type(i, jnp.float32)


def magnitude_bits(x):
    return bits(x) & 0x7FFFFFFF


def shr(i, n):
    """Logical shift right of int32."""
    return lax.shift_right_logical(i, jnp.full_like(i, n))


def round_even(x):
    """Nearest integer, ties to even."""
    return lax.round(x, lax.RoundingMethod.TO_NEAREST_EVEN)


def round_int(x):
    return round_even(x).astype(jnp.int32)


def _with_sign(magnitude, x):
    return as_float(magnitude | (bits(x) & jnp.int32(-(2**31))))


def up(x):
    """x * 2^80, denormals included."""
    m = magnitude_bits(x)
    return _with_sign(bits(jnp.where(m < 0x800000, m.astype(jnp.float32) * 2.0**-69, as_float(m) * 2.0**80)), x)


def down(x):
    """x * 2^-80, rounded to nearest even where that is denormal."""
    m = as_float(magnitude_bits(x))
    small = m < 2.0**-46
    steps = round_int(jnp.where(small, m, 0) * 2.0**69)
    return _with_sign(jnp.where(small, steps, bits(m * 2.0**-80)), x)


def add(a, b):
    both_small = (jnp.abs(a) < TINY) & (jnp.abs(b) < TINY)
    return jnp.where(both_small, down(up(a) + up(b)), a + b)


def subtract(a, b):
    return add(a, -b)


def multiply(unit, value):
    """unit * value for a `value` that is 0 or between 2^-16 and 2^16."""
    return jnp.where(jnp.abs(unit) < TINY, down(up(unit) * value), unit * value)


def divide(a, b):
    """a / b: the quotient, not a product with the reciprocal, also where b is a constant."""
    b = jnp.where(a == a, jnp.float32(b), 1)
    return jnp.where(jnp.abs(a) < TINY, down(up(a) / b), a / b)


def extremes(x):
    """(smallest, largest) along the last axis, of finite numbers; denormals compared, not flushed."""
    i = bits(x)
    order = i ^ ((i >> 31) & 0x7FFFFFFF)
    undo = lambda o: as_float(o ^ ((o >> 31) & 0x7FFFFFFF))
    return undo(order.min(-1)), undo(order.max(-1))


def largest(a, b):
    """The larger magnitude of two numbers, denormals compared."""
    return as_float(jnp.maximum(magnitude_bits(a), magnitude_bits(b)))


def positive_zero(x):
    """x, with +0 for -0."""
    return as_float(jnp.where(bits(x) == -(2**31), 0, bits(x)))
