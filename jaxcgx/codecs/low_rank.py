"""The contract of a codec of low rank: sums of matrices by sums of their factors (exchange/low_rank.py)."""

from typing import ClassVar

import jax

from jaxcgx.codecs.base import Codec


class LowRank(Codec):
    """A codec that makes no bytes. Subclass it as a frozen dataclass, with a `why_raw` and a `wire_bytes` of its own.

    A matrix M of [m, n] has the factors P and Q, of as many columns as the codec's rank. Factors have their long
    dimension last: P is [rank, m], Q is [rank, n]. The methods take k matrices of one shape at once.
    """

    low_rank = True
    state: ClassVar[tuple[str, ...]] = ("residuals", "factors")

    def matrix(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """(m, n) of the matrix that a leaf of two or more dimensions is."""
        raise NotImplementedError(f"{type(self).__name__}.matrix")

    def factor_shape(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """The shape of Q for a leaf that doesn't travel raw."""
        raise NotImplementedError(f"{type(self).__name__}.factor_shape")

    def begin(self, q: jax.Array) -> jax.Array:
        """The Q to multiply with, from the Q of the step before: [k, rank, n]."""
        raise NotImplementedError(f"{type(self).__name__}.begin")

    def left(self, matrices: jax.Array, q: jax.Array) -> jax.Array:
        """P of float32[k, m, n]: [k, rank, m]. It is linear in the matrices."""
        raise NotImplementedError(f"{type(self).__name__}.left")

    def orthonormal(self, p: jax.Array) -> jax.Array:
        """A basis of the columns of P, of the same shape."""
        raise NotImplementedError(f"{type(self).__name__}.orthonormal")

    def right(self, basis: jax.Array, matrices: jax.Array) -> jax.Array:
        """The new Q: [k, rank, n]. It is linear in the matrices."""
        raise NotImplementedError(f"{type(self).__name__}.right")

    def multiply(self, basis: jax.Array, q: jax.Array) -> jax.Array:
        """The matrices of these factors: [k, m, n]."""
        raise NotImplementedError(f"{type(self).__name__}.multiply")
