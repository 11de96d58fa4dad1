"""PowerSGD: two thin factors in place of a matrix (Vogels, Karimireddy, Jaggi, 2019).

    P = M Q        Q' = M^T B, where B is an orthonormal basis of P's columns        M is about B Q'^T

Both products are linear in M: of a sum of matrices they are the sums of what every rank computes. Q is that of the step
before,
so that steps are iterations of the power method. Factors lie here with their long dimension last: P as [rank, m], Q as
[rank, n].
"""

import dataclasses
import math

import jax.numpy as jnp
from jax import lax

from jaxcgx.checks import MOST, check_field, check_integer
from jaxcgx.codecs.base import Codec, check_dtype, check_shape

_TINY = 2.0**-126  # the smallest normal number: what is below counts as 0, which XLA makes of it on CPUs anyway
_NOTHING = 2.0**-20  # what is left of a column of norm 1 is rounding
_FEW = 8  # columns whose products are fused with what uses them, and have no memory of their own


@dataclasses.dataclass(frozen=True)
class PowerSGD(Codec):
    """Sums of matrices by sums of their factors: `rank` (m + n) numbers in place of m n.

    rank: columns of each factor. It is for sums and means alone, makes no bytes, and wants residuals and `factors`. A
    leaf of more
    dimensions is a matrix, cut between two of them where its factors are the smallest. Leaves of one dimension travel
    raw, and so do those that have no more bytes than their factors.
    """

    rank: int = 4

    low_rank = True
    state = ("residuals", "factors")

    def __post_init__(self):
        check_field(self, "rank", check_integer, 1, MOST)

    def why_raw(self, shape, dtype):
        if len(shape) < 2:
            return f"it has {'one' if shape else 'no'} dimension, and PowerSGD is for matrices"
        m, n = matrix(shape)
        factors, size = 4 * self.rank * (m + n), m * n * dtype.itemsize
        if factors >= size:
            return f"it has {size} bytes, and its factors of rank {self.rank} would have {factors}"
        return None

    def wire_bytes(self, shape, dtype):
        name = f"{type(self).__name__}.wire_bytes"
        shape, dtype = check_shape(name, shape), check_dtype(name, "dtype", dtype)
        if self.why_raw(shape, dtype):
            return math.prod(shape) * dtype.itemsize
        return 4 * self.rank * sum(matrix(shape))

    def factor_shape(self, shape):
        """Of Q, for a leaf that is taken."""
        return self.rank, matrix(shape)[1]

    def approximate(self, x):
        """What one rank's sum of x would be, without the factor of a step before."""
        if self.why_raw(x.shape, x.dtype):
            return x
        matrices = x.astype(jnp.float32).reshape(1, *matrix(x.shape))
        q = jnp.zeros((1, *self.factor_shape(x.shape)), jnp.float32)
        basis = orthonormal(left(matrices, begin(q)))
        return multiply(basis, right(basis, matrices))[0].reshape(x.shape).astype(x.dtype)


def matrix(shape):
    """(m, n), the matrix that a leaf of two or more dimensions is."""
    return min(((math.prod(shape[:i]), math.prod(shape[i:])) for i in range(1, len(shape))), key=sum)


# The same on every rank: it depends on nothing but the shape.
def _start(rank, n):
    """float32[rank, n] in [-1, 1], the hashes of their places."""
    x = lax.iota(jnp.uint32, rank * n)
    for factor in (0x7FEB352D, 0x846CA68B):
        x = (x ^ (x >> 16)) * jnp.uint32(factor)
    return (lax.bitcast_convert_type(x ^ (x >> 16), jnp.int32).astype(jnp.float32) / 2.0**31).reshape(rank, n)


def _over(x, size, least=_TINY):
    """x / size, 0 where the size is below the least; of a NaN, NaN."""
    none = size < least
    return jnp.where(none, 0, x / jnp.where(none, 1, size))


# The basis doesn't depend on how long Q's columns are. With sums of magnitudes of 1 products are no larger than their
# matrix: numbers
# of any size neither overflow nor vanish. A column of zeros, in the first step or of a matrix of lower rank, would stay
# one.
def begin(q):
    """The Q to multiply with, of that of the step before, [k, rank, n]."""
    q = jnp.where(jnp.abs(q).max(-1, keepdims=True) < _TINY, _start(*q.shape[1:]), q)
    q = q / jnp.abs(q).max(-1, keepdims=True)
    return q / jnp.abs(q).sum(-1, keepdims=True)


def left(matrices, q):
    """P of float32[k, m, n]."""
    # This way round, and transposed afterwards: XLA's matrix products on CPUs take another one twice the time.
    return jnp.einsum("kmn,krn->kmr", matrices, q, precision=lax.Precision.HIGHEST).swapaxes(1, 2)


def right(basis, matrices):
    """Q', [k, rank, n]."""
    return jnp.einsum("krm,kmn->krn", basis, matrices, precision=lax.Precision.HIGHEST)


def multiply(basis, q):
    """[k, m, n]"""
    if q.shape[1] <= _FEW:
        return sum(basis[:, j, :, None] * q[:, j, None, :] for j in range(q.shape[1]))
    return jnp.einsum("kmr,krn->kmn", basis.swapaxes(1, 2), q, precision=lax.Precision.HIGHEST)


# Gram and Schmidt's, twice for each column, which makes columns orthogonal to rounding however close they were. A
# column is of
# norm 1 before, so that what is left of it has a scale; nothing is ever divided by a smaller number than _NOTHING. One
# turn of the
# loop is one projection: half as much to compile, and matrices of many shapes compile long enough.
def orthonormal(p):
    """Of each of k matrices, given as its columns [k, rank, m], an orthonormal basis, and 0 for columns that others
    span."""
    p = _over(p, jnp.abs(p).max(-1, keepdims=True))
    p = _over(p, jnp.linalg.norm(p, axis=-1, keepdims=True))

    def project(turn, p):
        j = turn // 2
        x = lax.dynamic_index_in_dim(p, j, 1)
        before = jnp.where(jnp.arange(p.shape[1])[:, None] < j, p, 0)
        along = jnp.einsum("krm,kim->kir", before, x, precision=lax.Precision.HIGHEST)
        x = x - jnp.einsum("kir,krm->kim", along, before, precision=lax.Precision.HIGHEST)
        return lax.dynamic_update_index_in_dim(p, _over(x, jnp.linalg.norm(x, axis=-1, keepdims=True), _NOTHING), j, 1)

    return lax.fori_loop(2, 2 * p.shape[1], project, p)  # the first column is there already
