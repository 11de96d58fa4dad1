"""Runs CGX's own checks over MPI: sums of constants are exact, and others are within the bound of docs/error-bounds.md.

Sizes include some that leave ranks without a bucket or with a few elements. Tests cover every width, bucket and dtype.
"""

import bounds
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_trees, planned

import jaxcgx as cgx

pytest.importorskip("mpi4jax", reason="needs the extra `mpi`")

from processes import COMM, mine, same_everywhere

N = COMM.size
SIZES = (1, 2, 8, 17, 128, 1024, 1025, 16384)
CODECS = [cgx.MaxMin(bits, bucket) for bits in range(1, 9) for bucket in (64, 512, 2048, 33)]


def sums(x, schedules=("two_shot",), codecs=CODECS):
    """Returns {(codec, schedule): the sum of each leaf}."""
    return {
        (codec, schedule): cgx.compressed_psum(x, COMM, planned(codec, schedule=schedule))
        for codec in codecs
        for schedule in schedules
    }


def skewed(size):
    """Returns numbers of different magnitudes on each rank."""
    return (
        np.random.RandomState(size).standard_normal((N, size)).astype(np.float32) ** 3
        * np.arange(1, N + 1, dtype=np.float32)[:, None]
    )


def test_constant_arrays_are_exact():
    ranks = np.arange(1, N + 1)[:, None]
    x = [
        np.broadcast_to(ranks, (N, size)).astype(dtype)
        for size in SIZES
        for dtype in (jnp.float32, jnp.bfloat16, jnp.float16, jnp.int32)
    ]
    for got in jax.jit(lambda x: list(sums(x, codecs=CODECS[::3]).values()))(mine(x)):
        for leaf, given in zip(got, x):
            assert leaf.dtype == given.dtype and (np.asarray(leaf) == ranks.sum()).all()


@pytest.mark.parametrize("schedule", list(bounds.SCHEDULES))
def test_errors_are_within_the_derived_bound(schedule):
    codecs = CODECS if schedule == "two_shot" else CODECS[12:16]
    x = [skewed(size) for size in SIZES]
    f = jax.jit(lambda x: list(sums(x, [schedule], codecs).values()))
    got, again = f(mine(x)), f(mine(x))
    assert same_everywhere(got)
    assert_trees(np.testing.assert_array_equal, got, again)  # the result doesn't depend on which rank comes first
    for codec, leaves in zip(codecs, got):
        check(codec, schedule, leaves, x)


@pytest.mark.parametrize("codec", [cgx.MaxMin(4), cgx.MaxMin(8, 33)], ids=str)
def test_a_million(codec):
    x = [skewed(10**6)]
    check(
        codec,
        "two_shot",
        jax.jit(lambda x: cgx.compressed_psum(x, COMM, planned(codec, schedule="two_shot")))(mine(x)),
        x,
    )


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=lambda dtype: dtype.__name__)
def test_short_floats(dtype):
    """Short floats travel unchanged and are added in float32. The result is rounded once each time it is made."""
    x = [skewed(size).astype(dtype) for size in SIZES]
    for codec in (cgx.MaxMin(4), cgx.MaxMin(8, 33)):
        got = jax.jit(lambda x: cgx.compressed_psum(x, COMM, planned(codec, schedule="two_shot")))(mine(x))
        assert all(y.dtype == dtype for y in got)
        check(codec, "two_shot", got, x, float(jnp.finfo(dtype).eps))


def check(codec, schedule, got, x, eps=0):
    """Checks a sum against the bound. `eps` is that of the result's dtype, if this is shorter than float32."""
    if COMM.rank:
        return  # all ranks have the same bits
    for y, given, owner in zip(got, x, bounds.owners([leaf[0] for leaf in x], N, codec)):
        exact = np.asarray(given, np.float64)
        bound = bounds.SCHEDULES[schedule](exact, owner, codec) if N > 1 else 0 * bounds.spans(exact[0], codec)
        bound = bound * (1 + eps) + eps * bounds.largest(exact.sum(0), codec)
        error = bounds.check(y, exact, bound, codec)
        assert N == 1 or given.shape[1] < 16384 or error.max() > 0.1 * bound.max()  # the bound is not far too large


def test_small_ranges_and_numbers_that_are_none():
    """With an absolute epsilon, a bucket of small range would become one number, and a NaN would become the minimum."""
    codec, size = cgx.MaxMin(4, 64), 64 * 8
    tiny, bad = skewed(size) * np.float32(1e-25), skewed(size)
    bad[0, 100], bad[N - 1, 300] = np.nan, np.inf
    got = jax.jit(lambda x: cgx.compressed_psum(x, COMM, planned(codec, schedule="two_shot")))([mine(tiny), mine(bad)])
    assert len(np.unique(got[0])) > 60 and np.abs(got[0] - tiny.sum(0)).max() < 0.2 * np.abs(tiny.sum(0)).max()
    if N > 1:  # a single rank returns its numbers unchanged
        lost = np.isnan(np.asarray(got[1])).reshape(-1, 64)
        assert lost[[1, 4]].all()
        assert not lost[[0, 2, 3, 5, 6, 7]].any()
