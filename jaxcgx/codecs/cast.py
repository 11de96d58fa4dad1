"""Cast: every element as bfloat16 or float16."""

import dataclasses

import jax.numpy as jnp

from jaxcgx.checks import check_choice, check_field
from jaxcgx.codecs.base import Codec, Kind, native_codec
from jaxcgx.native.layout import DTYPES
from jaxcgx.native.packing import from_bytes, to_bytes
from jaxcgx.native.reference import to_bits16, widen


@dataclasses.dataclass(frozen=True)
class Cast(Codec):
    """Every element as bfloat16 or float16. rounding: "nearest", or "stochastic", which is unbiased and needs a key.

    What lies past float16's largest number becomes infinity.
    """

    dtype: str = "bfloat16"
    rounding: str = "nearest"

    def __post_init__(self):
        if self.dtype in (jnp.bfloat16, jnp.float16):
            object.__setattr__(self, "dtype", jnp.dtype(self.dtype).name)
        check_field(self, "dtype", check_choice, ("bfloat16", "float16"))
        check_field(self, "rounding", check_choice, ("nearest", "stochastic"))

    @property
    def stochastic(self):
        return self.rounding == "stochastic"

    @property
    def native(self):
        return native_codec(Kind.CAST, DTYPES.index(jnp.dtype(self.dtype)), stochastic=self.stochastic)

    def code_bytes(self, n, dtype):
        return 2 * n

    def encode_buckets(self, x, noise):
        bits = to_bits16(x, jnp.dtype(self.dtype), noise).astype(jnp.uint16)
        return jnp.zeros((x.shape[0], 0), jnp.float32), to_bytes(bits)

    def decode_buckets(self, meta, codes, n):
        return widen(from_bytes(codes, jnp.dtype(self.dtype)))
