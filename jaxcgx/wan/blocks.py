"""Cuts leaves into blocks of equal size, so that some blocks of a leaf can be sent without the others."""

import dataclasses
import math
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class Blocks:
    """The blocks that a leaf is cut into. The last block is padded with zeros."""

    shape: tuple[int, ...]
    size: int  # the number of elements in a block

    @classmethod
    def of(cls, x: Any, block_bytes: int) -> Self:
        """Returns the blocks of `block_bytes` bytes of an array."""
        return cls(x.shape, block_bytes // x.dtype.itemsize)

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def count(self) -> int:
        return -(-self.elements // self.size)

    def share(self, k: float) -> int:
        """Returns the number of blocks in the share `k` of all blocks. It is at least one."""
        return max(1, round(k * self.count))

    def split(self, x: jax.Array) -> jax.Array:
        """Returns the blocks of an array, [count, size]."""
        flat = x.reshape(-1)
        if missing := self.count * self.size - self.elements:
            flat = jnp.pad(flat, (0, missing))
        return flat.reshape(self.count, self.size)

    def join(self, blocks: jax.Array) -> jax.Array:
        """Returns the array that has these blocks: the inverse of `split`."""
        return blocks.reshape(-1)[: self.elements].reshape(self.shape)

    def magnitudes(self, blocks: jax.Array) -> jax.Array:
        """Returns the mean magnitude of each block, float32[count]. The padding doesn't count."""
        sizes = np.full(self.count, self.size, np.float32)
        sizes[-1] -= self.count * self.size - self.elements
        return jnp.abs(blocks.astype(jnp.float32)).sum(-1) / sizes
