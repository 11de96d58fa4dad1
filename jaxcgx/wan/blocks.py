"""A leaf as blocks of equal size, of which some travel."""

import dataclasses
import math
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class Blocks:
    """How a leaf is cut. The last block is filled up with zeros."""

    shape: tuple[int, ...]
    size: int  # elements of a block

    @classmethod
    def of(cls, x: Any, block_bytes: int) -> Self:
        """The blocks of `block_bytes` of an array."""
        return cls(x.shape, block_bytes // x.dtype.itemsize)

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def count(self) -> int:
        return -(-self.elements // self.size)

    def share(self, k: float) -> int:
        """How many blocks are a share `k` of them; at least one."""
        return max(1, round(k * self.count))

    def split(self, x: jax.Array) -> jax.Array:
        """[count, size]."""
        flat = x.reshape(-1)
        if missing := self.count * self.size - self.elements:
            flat = jnp.pad(flat, (0, missing))
        return flat.reshape(self.count, self.size)

    def join(self, blocks: jax.Array) -> jax.Array:
        """The inverse of `split`."""
        return blocks.reshape(-1)[: self.elements].reshape(self.shape)

    def magnitudes(self, blocks: jax.Array) -> jax.Array:
        """The mean magnitude of each block, float32[count]."""
        sizes = np.full(self.count, self.size, np.float32)
        sizes[-1] -= self.count * self.size - self.elements
        return jnp.abs(blocks.astype(jnp.float32)).sum(-1) / sizes
