"""Eden: the best levels for normally distributed numbers, after a random rotation (EDEN, DRIVE; Vargaftik et al.)."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxcgx.checks import check_integer, set_field
from jaxcgx.codecs import rotation
from jaxcgx.codecs.attribute import Kind
from jaxcgx.codecs.base import Codec
from jaxcgx.native import ieee
from jaxcgx.native.packing import pack, packed_bytes, unpack
from jaxcgx.typing import DType

# The positive levels, times 512, for 1 to 6 bits: Lloyd and Max's quantizer of the standard normal distribution.
# fmt: off
LEVELS = (
    (409,),
    (232, 773),
    (125, 387, 688, 1102),
    (66, 199, 336, 482, 643, 828, 1059, 1399),
    (34, 101, 170, 239, 310, 383, 458, 537, 620, 710, 807, 915, 1039, 1187, 1378, 1669),
    (17, 51, 86, 120, 155, 190, 225, 260, 296, 333, 370, 407, 446, 485, 525, 567,
     609, 653, 699, 747, 797, 849, 905, 965, 1029, 1099, 1177, 1265, 1368, 1494, 1659, 1917),
)
# fmt: on


@dataclasses.dataclass(frozen=True)
class Eden(Codec):
    """2^bits levels for the numbers of a block after a random rotation. Encoding needs a key.

    For most distributions of x, the error `|decoded - x|^2 / |x|^2` is 0.57, 0.13, 0.036, 0.0096, 0.0025 and 0.00064
    for 1 to 6 bits. It has no bias, and is independent on different ranks. So a mean over N ranks has 1/N of this
    error. If a few elements have most of a block's norm, the error can be larger and biased (docs/error-bounds.md).

    Args:
      bits: the bits of an element, 1 to 6.
      block: the number of elements that are rotated together, a power of two from 128 to 4096. If the last block of a
        leaf is shorter, the number of its codes is the next power of two.
    """

    bits: int
    block: int = 4096

    meta = 2
    kind = Kind.EDEN
    rotate = True
    stochastic = True

    def __post_init__(self) -> None:
        set_field(self, "bits", check_integer, 1, 6)
        set_field(self, "block", rotation.check_block)

    @property
    def bucket_size(self) -> int:
        """The same as `block`."""
        return self.block

    def _kernel_fields(self) -> dict[str, Any]:
        return dict(bits=self.bits, bucket_size=self.block, stochastic=True)

    @property
    def levels(self) -> np.ndarray[Any, Any]:
        """The positive levels, for numbers of variance 1."""
        return np.array(LEVELS[self.bits - 1], np.float32) / np.float32(512)

    def code_bytes(self, n: int, dtype: DType) -> int:
        return packed_bytes(rotation.padded(n), self.bits)

    def encode_buckets(self, x: jax.Array, noise: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        assert noise is not None
        seed = rotation.drawn_seed(noise)
        rotated = rotation.rotate(x, seed)
        y = rotated.x
        levels = self.levels
        variance = rotation.sum_in_order(rotation.product(y, y)) / y.shape[1]
        index = jnp.zeros(y.shape, jnp.int32)
        for bound in (levels[1:] + levels[:-1]) / 2:
            index += (y * y > bound * bound * variance).astype(jnp.int32)
        # <x, levels> / |levels|^2 would have a smaller error, but with this unit the error has no bias.
        meta, finite = rotation.unbiased(rotated, seed, jnp.asarray(levels)[index])
        half = len(levels)
        codes = jnp.where(ieee.bits(y) < 0, half - 1 - index, half + index)
        return meta, pack(jnp.where(finite, codes, 0), self.bits)

    def decode_buckets(self, meta: jax.Array, codes: jax.Array, n: int) -> jax.Array:
        levels = jnp.asarray(np.concatenate([-self.levels[::-1], self.levels]))
        value = levels[unpack(codes, self.bits, rotation.padded(n))]
        return rotation.rotate_back(value, rotation.sent_seed(meta), unit=meta[:, :1], base=None, n=n)
