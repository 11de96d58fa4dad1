"""Cast: every element as bfloat16 or float16."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxcgx.checks import check_choice, set_field
from jaxcgx.codecs.attribute import Kind
from jaxcgx.codecs.base import Codec
from jaxcgx.native.layout import DTYPES
from jaxcgx.native.packing import from_bytes, to_bytes
from jaxcgx.native.reference import to_bits16, widen
from jaxcgx.typing import DType


@dataclasses.dataclass(frozen=True)
class Cast(Codec):
    """Sends every element as bfloat16 or float16. In float16, numbers that are too large become infinity.

    Args:
      dtype: "bfloat16" or "float16".
      rounding: "nearest", or "stochastic", which is unbiased and needs a key.
    """

    dtype: str = "bfloat16"
    rounding: str = "nearest"

    kind = Kind.CAST

    def __post_init__(self) -> None:
        if self.dtype in (jnp.bfloat16, jnp.float16):
            object.__setattr__(self, "dtype", jnp.dtype(self.dtype).name)
        set_field(self, "dtype", check_choice, ("bfloat16", "float16"))
        set_field(self, "rounding", check_choice, ("nearest", "stochastic"))

    @property
    def stochastic(self) -> bool:
        """Whether `rounding` needs a key."""
        return self.rounding == "stochastic"

    def _kernel_fields(self) -> dict[str, Any]:
        return dict(bits=DTYPES.index(jnp.dtype(self.dtype)), stochastic=self.stochastic)

    def code_bytes(self, n: int, dtype: DType) -> int:
        return 2 * n

    def encode_buckets(self, x: jax.Array, noise: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        bits = to_bits16(x, jnp.dtype(self.dtype), noise).astype(jnp.uint16)
        return jnp.zeros((x.shape[0], 0), jnp.float32), to_bytes(bits)

    def decode_buckets(self, meta: jax.Array, codes: jax.Array, n: int) -> jax.Array:
        return widen(from_bytes(codes, jnp.dtype(self.dtype)))
