"""PowerSGD: sends two thin factors in place of a matrix (Vogels, Karimireddy, Jaggi, 2019).

    P = M Q        Q' = M^T B, where B is an orthonormal basis of P's columns        M is about B Q'^T

Both products are linear in M, so the product of a sum of matrices is the sum of the ranks' products
(exchange/low_rank.py). Q comes from the previous step, so steps are iterations of the power method. Here, factors have
their long dimension last: P is [rank, m], Q is [rank, n]. Methods for factors alone take those of k matrices of one
shape at once.
"""

import dataclasses
import math
from typing import ClassVar, cast

import jax
import jax.numpy as jnp

from jaxcgx.checks import MOST, as_shape, check_integer, set_field
from jaxcgx.codecs.base import Codec
from jaxcgx.native.layout import as_dtype
from jaxcgx.typing import DType, DTypeLike

_TINY = 2.0**-126  # the smallest normal number; smaller numbers count as 0, because XLA flushes them on CPUs anyway
_NOTHING = 2.0**-20  # if less remains of a column of norm 1 after projection, the remainder is rounding error
_FEW = 8  # up to this rank, factors are multiplied as a sum of outer products, which XLA fuses with later operations


# The start depends only on the shape, so it is the same on every rank.
def _start(rank: int, n: int) -> jax.Array:
    """Returns float32[rank, n] in [-1, 1]. Each number is a hash of its position."""
    x = jax.lax.iota(jnp.uint32, rank * n)
    for factor in (0x7FEB352D, 0x846CA68B):
        x = (x ^ (x >> 16)) * jnp.uint32(factor)
    return (jax.lax.bitcast_convert_type(x ^ (x >> 16), jnp.int32).astype(jnp.float32) / 2.0**31).reshape(rank, n)


def _over(x: jax.Array, size: jax.Array, least: jax.Array | float = _TINY) -> jax.Array:
    """Returns x / size; 0 where the size is below `least`, and NaN where the size is NaN."""
    none = size < least
    return jnp.where(none, 0, x / jnp.where(none, 1, size))


@dataclasses.dataclass(frozen=True)
class PowerSGD(Codec):
    """Sums matrices by summing their factors, which have rank * (m + n) numbers in place of m * n.

    PowerSGD is only for sums and means. It makes no bytes, and needs residuals and `factors`. A leaf with more than two
    dimensions counts as a matrix: its dimensions are split into two groups so that the factors are smallest. Leaves of
    one dimension or none, and leaves that have no more bytes than their factors, travel raw.

    Args:
      rank: the number of columns of each factor.
    """

    rank: int = 4

    low_rank = True
    state: ClassVar[tuple[str, ...]] = ("residuals", "factors")

    def __post_init__(self) -> None:
        set_field(self, "rank", check_integer, 1, MOST)

    def why_raw(self, shape: tuple[int, ...], dtype: DType) -> str | None:
        if len(shape) < 2:
            return f"it has {'one' if shape else 'no'} dimension, and PowerSGD is for matrices"
        m, n = self.matrix(shape)
        factors, size = 4 * self.rank * (m + n), m * n * dtype.itemsize
        if factors >= size:
            return f"it has {size} bytes, and its factors of rank {self.rank} would have {factors}"
        return None

    def wire_bytes(self, shape: tuple[int, ...], dtype: DTypeLike) -> int:
        name = f"{type(self).__name__}.wire_bytes"
        shape, dtype = as_shape(name, "shape", shape), as_dtype(name, "dtype", dtype)
        if self.why_raw(shape, dtype):
            return math.prod(shape) * dtype.itemsize
        return 4 * self.factor_shape(shape)[0] * sum(self.matrix(shape))

    def factor_shape(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Returns the `shape` of Q for a leaf that doesn't travel raw."""
        return min(self.rank, *self.matrix(shape)), self.matrix(shape)[1]

    def approximate(self, x: jax.Array, key: jax.Array | None) -> jax.Array:
        """Returns the sum of x over one rank, without a factor from a previous step. `key` is not used."""
        if self.why_raw(x.shape, x.dtype):
            return x
        matrix = x.astype(jnp.float32).reshape(self.matrix(x.shape))
        q = self.begin(jnp.zeros((1, *self.factor_shape(x.shape)), jnp.float32))
        (basis,) = self.orthonormal(self.left(matrix, q[0])[None])
        return self.multiply(basis, self.right(matrix, basis)).reshape(x.shape).astype(x.dtype)

    # The algebra of a sum

    def matrix(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Returns (m, n), the `shape` of a leaf as a matrix."""
        return min(((math.prod(shape[:i]), math.prod(shape[i:])) for i in range(1, len(shape))), key=sum)

    # The basis doesn't depend on the norms of Q's columns. If the magnitudes of a column add up to 1, no element of its
    # product with a matrix is larger than all elements of the matrix. So numbers of any size neither overflow nor
    # vanish. A column of zeros (in the first step, or if the matrix has a lower rank) would stay zero, so it restarts.
    def begin(self, q: jax.Array) -> jax.Array:
        """Returns the Q to multiply with, [k, rank, n], from the `q` of the previous step."""
        q = jnp.where(jnp.abs(q).max(-1, keepdims=True) < _TINY, _start(*q.shape[1:]), q)
        q = q / jnp.abs(q).max(-1, keepdims=True)
        return q / jnp.abs(q).sum(-1, keepdims=True)

    def left(self, matrix: jax.Array, q: jax.Array) -> jax.Array:
        """Returns the P of a `matrix` float32[m, n] and its `q`."""
        # With the transposition after the product, XLA's matrix product takes half the time on CPUs.
        return jnp.einsum("mn,rn->mr", matrix, q, precision=jax.lax.Precision.HIGHEST).T

    def right(self, matrix: jax.Array, basis: jax.Array) -> jax.Array:
        """Returns the new Q of a `matrix` and its `basis`."""
        return jnp.einsum("rm,mn->rn", basis, matrix, precision=jax.lax.Precision.HIGHEST)

    def multiply(self, basis: jax.Array, q: jax.Array) -> jax.Array:
        """Returns the matrix of the factors `basis` and `q`."""
        if len(q) <= _FEW:
            return cast(jax.Array, sum(p[:, None] * row[None] for p, row in zip(basis, q)))
        return jnp.einsum("mr,rn->mn", basis.T, q, precision=jax.lax.Precision.HIGHEST)

    def result(self, basis: jax.Array, q: jax.Array) -> jax.Array:
        """Returns what a sum returns, of its factors `basis` and `q`."""
        return self.multiply(basis, q)

    def gone(self, basis: jax.Array, q: jax.Array) -> jax.Array:
        """Returns what leaves the residual of a rank whose own factors are `basis` and `q`."""
        return self.multiply(basis, q)

    # The Gram-Schmidt process, with two projections per column: columns become orthogonal up to rounding, even if they
    # were nearly parallel. A column has norm 1 before a projection, so a remainder below _NOTHING is rounding error. An
    # iteration is one projection, which halves the time to compile.
    def orthonormal(self, p: jax.Array) -> jax.Array:
        """Returns orthonormal bases of the columns of each `p`. A column in the span of those before it becomes 0."""
        p = _over(p, jnp.abs(p).max(-1, keepdims=True))
        p = _over(p, jnp.linalg.norm(p, axis=-1, keepdims=True))

        def project(turn: jax.Array, p: jax.Array) -> jax.Array:
            j = turn // 2
            x = jax.lax.dynamic_index_in_dim(p, j, 1)
            before = jnp.where(jnp.arange(p.shape[1])[None, :, None] < j, p, 0)
            along = jnp.einsum("krm,kim->kir", before, x, precision=jax.lax.Precision.HIGHEST)
            x = x - jnp.einsum("kir,krm->kim", along, before, precision=jax.lax.Precision.HIGHEST)
            x = _over(x, jnp.linalg.norm(x, axis=-1, keepdims=True), _NOTHING)
            return jax.lax.dynamic_update_index_in_dim(p, x, j, 1)

        return jax.lax.fori_loop(2, 2 * p.shape[1], project, p)  # the first column needs no projection


@dataclasses.dataclass(frozen=True)
class PowerIteration(PowerSGD):
    """The sums of `jaxcgx.Dion`: the residual is its momentum buffer, and a sum returns its update.

    The update is B Q^T sqrt(n / m), where the columns of Q are those of the summed Q' with norm 1.

    Args:
      rank: as in PowerSGD, but at most that of the matrix.
      momentum: Dion's decay of momentum.
    """

    momentum: float = 0.95
    alone = True

    def why_raw(self, shape: tuple[int, ...], dtype: DType) -> str | None:
        return None if len(shape) == 2 else f"it has {len(shape)} dimensions, and Dion is for matrices"

    def result(self, basis: jax.Array, q: jax.Array) -> jax.Array:
        # A column without a share of B is rounding error, and has no direction.
        norms = jnp.linalg.norm(q, axis=-1, keepdims=True)
        scale = math.sqrt(q.shape[-1] / basis.shape[-1])
        return scale * self.multiply(basis, _over(q, norms, jnp.maximum(_TINY, norms.max() * 2.0**-16)))

    def gone(self, basis: jax.Array, q: jax.Array) -> jax.Array:
        return (1 - self.momentum) * self.multiply(basis, q)
