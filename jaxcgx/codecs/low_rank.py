"""The contract of a low-rank codec, which sums matrices by summing their factors (exchange/low_rank.py)."""

from typing import ClassVar

import jax

from jaxcgx.codecs.base import Codec


class LowRank(Codec):
    """A codec that makes no bytes. Subclass it as a frozen dataclass, and also define `why_raw` and `wire_bytes`.

    A matrix M of [m, n] has the factors P and Q. The number of their columns is the codec's rank. Factors are stored
    with the long dimension last: P is [rank, m], Q is [rank, n]. The methods take k matrices of one shape at once.
    """

    low_rank = True
    state: ClassVar[tuple[str, ...]] = ("residuals", "factors")

    def matrix(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Returns (m, n), the shape as a matrix of a leaf with two or more dimensions."""
        raise NotImplementedError(f"{type(self).__name__}.matrix")

    def factor_shape(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Returns the shape of Q for a leaf that doesn't travel raw."""
        raise NotImplementedError(f"{type(self).__name__}.factor_shape")

    def begin(self, q: jax.Array) -> jax.Array:
        """Returns the Q to multiply with, [k, rank, n], from the `q` of the previous step."""
        raise NotImplementedError(f"{type(self).__name__}.begin")

    def left(self, matrices: jax.Array, q: jax.Array) -> jax.Array:
        """Returns the P of matrices float32[k, m, n] and this `q`: [k, rank, m]. It is linear in the matrices."""
        raise NotImplementedError(f"{type(self).__name__}.left")

    def orthonormal(self, p: jax.Array) -> jax.Array:
        """Returns an orthonormal basis of the columns of P, in the shape of P."""
        raise NotImplementedError(f"{type(self).__name__}.orthonormal")

    def right(self, basis: jax.Array, matrices: jax.Array) -> jax.Array:
        """Returns the new Q of this `basis`: [k, rank, n]. It is linear in the matrices."""
        raise NotImplementedError(f"{type(self).__name__}.right")

    def multiply(self, basis: jax.Array, q: jax.Array) -> jax.Array:
        """Returns the matrices of the factors `basis` and `q`: [k, m, n]."""
        raise NotImplementedError(f"{type(self).__name__}.multiply")
