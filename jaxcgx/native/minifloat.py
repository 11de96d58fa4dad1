"""Encodes small floating-point numbers: xla_ffi/codec/minifloat.h in jnp."""

import dataclasses

import jax
import jax.numpy as jnp

from jaxcgx.native import ieee


@dataclasses.dataclass(frozen=True)
class Minifloat:
    """A format with a sign and denormals, but without infinities.

    Attributes:
      exponent: the bits of the exponent. Its bias is as in IEEE 754.
      mantissa: the bits of the mantissa.
      largest: the largest number.
      top: the code of that number.
    """

    exponent: int
    mantissa: int
    largest: float
    top: int

    @property
    def bias(self) -> int:
        return 2 ** (self.exponent - 1) - 1

    @property
    def sign(self) -> int:
        """The position of the sign bit."""
        return self.exponent + self.mantissa

    def encode(self, y: jax.Array) -> jax.Array:
        """Returns the codes of the nearest numbers, ties to even."""
        drop = 23 - self.mantissa
        m = ieee.magnitude_bits(y)
        normal = ((m + (1 << (drop - 1)) - 1 + ((m >> drop) & 1)) >> drop) - ((127 - self.bias) << self.mantissa)
        denormal = ieee.round_int(ieee.as_float(m) * 2.0 ** (self.mantissa + self.bias - 1))
        code = jnp.minimum(jnp.where(m < ((128 - self.bias) << 23), denormal, normal), self.top)
        return code | (ieee.shr(ieee.bits(y), 31 - self.sign) & (1 << self.sign))

    def decode(self, codes: jax.Array) -> jax.Array:
        m = codes & ((1 << self.sign) - 1)
        normal = ieee.as_float((m << (23 - self.mantissa)) + ((127 - self.bias) << 23))
        denormal = m.astype(jnp.float32) * 2.0 ** -(self.mantissa + self.bias - 1)
        y = jnp.where(m < (1 << self.mantissa), denormal, normal)
        return jnp.where(codes & (1 << self.sign), -y, y)


E2M1 = Minifloat(2, 1, 6.0, 0x7)
E4M3 = Minifloat(4, 3, 448.0, 0x7E)
E5M2 = Minifloat(5, 2, 57344.0, 0x7B)
