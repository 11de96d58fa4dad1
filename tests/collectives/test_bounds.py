"""Tests that the error of a sum is within the bound that docs/error-bounds.md derives from codec and schedule."""

import jax
import numpy as np
import pytest
from bounds import SCHEDULES, check, loss, owners, spans
from helpers import FULL, normal, planned
from ranks import mesh, on_ranks

import jaxcgx as cgx

SIZES = (1, 2, 7, 17, 511, 513, 1_000_003)
CODEC = cgx.MaxMin(4)


@pytest.mark.parametrize("ranks", range(1, 9) if FULL else (1, 3, 8))
def test_four_bits(ranks):
    """The numbers are skewed, and have different magnitudes on every rank and in every bucket."""
    leaves = [normal((ranks, n), seed=n) ** 3 * (1 + np.arange(ranks, dtype=np.float32))[:, None] for n in SIZES]
    both = cgx.compressed_psum, cgx.compressed_pmean
    f = lambda t: {name: [sum_of(t, "a", planned(CODEC, schedule=name)) for sum_of in both] for name in SCHEDULES}
    got = jax.tree.map(lambda y: np.asarray(y[0]), on_ranks(f, mesh(ranks))(leaves))
    for name, bound in SCHEDULES.items():
        for x, owner, total, mean in zip(leaves, owners([x[0] for x in leaves], ranks, CODEC), *got[name]):
            x = np.asarray(x, np.float64)
            limit = bound(x, owner, CODEC) if ranks > 1 else 0 * spans(x[0], CODEC)
            error = check(total, x, limit, CODEC)
            check(mean, x / ranks, limit / ranks, CODEC)
        assert ranks == 1 or error.max() > 0.2 * limit.max()  # the bound is not far too large


def test_stochastic_rounding_errs_by_a_unit_where_nearest_does_by_half():
    x, codec = normal((4, 5000)), cgx.MaxMin(4, rounding="stochastic")
    f = lambda t: [cgx.compressed_psum(t, "a", planned(codec, schedule=s), key=jax.random.key(1)) for s in SCHEDULES]
    (owner,), exact = owners([x[0]], 4, codec), np.asarray(x, np.float64)
    for got, bound in zip(on_ranks(f, mesh(4))(x), SCHEDULES.values()):
        assert check(got[0], exact, bound(exact, owner, codec), codec).max() > bound(exact, owner, CODEC).min()


@pytest.mark.parametrize("inner", [cgx.Raw(), CODEC], ids=str)
def test_hierarchy(inner):
    """On 2 x 4 ranks, each rank of a node has a share of 2,500 elements, a fourth of the whole."""
    x = normal((2, 4, 10_000))
    ways = dict(schedule="two_shot", own="encoded"), dict(schedule="one_shot")
    f = lambda t: [cgx.compressed_psum(t, ("a", "b"), planned({"a": CODEC, "b": inner}, **way)) for way in ways]
    shares = np.asarray(x, np.float64).reshape(2, 4, 4, 2500)
    for got, second in zip(on_ranks(f, mesh(2, 4))(x), (1, 0)):
        for j in range(4):
            part, sums = shares[:, :, j], shares[:, :, j].sum(1)
            error = 0 if inner.raw else loss(spans(part, CODEC), 0, CODEC).sum(1)  # scattering inside each node
            error = np.broadcast_to(error, (2, 5))
            error = error.sum(0) + loss(spans(sums, CODEC), error, CODEC).sum(0)  # the exchange between nodes
            for _ in range(second + (not inner.raw)):  # encoding the sum, and gathering it
                error = error + loss(spans(sums.sum(0), CODEC), error, CODEC)
            check(np.asarray(got[0, 0]).reshape(4, 2500)[j], sums, error, CODEC)
