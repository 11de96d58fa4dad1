"""Tests correlated rounding: it is unbiased on every rank, and errors cancel in a sum as the theory predicts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import normal, planned
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from ranks import mesh, on_ranks

import jaxcgx as cgx
from jaxcgx.exchange.message import first
from jaxcgx.native.rng import noise
from jaxcgx.transports.xla import Axes

RANKS, SIZE = 4, 40_000
STOCHASTIC, CORRELATED = (cgx.MaxMin(4, 100, rounding) for rounding in ("stochastic", "correlated"))
LIKE, UNLIKE = jnp.tile(normal(SIZE), (RANKS, 1)), normal((RANKS, SIZE))


def lost(codec, x, op=cgx.compressed_psum, **fields):
    """Returns the mean squared error per element of a sum."""
    whole = op is cgx.compressed_psum
    f = lambda x: op(x, "a", planned(codec, **fields), key=jax.random.key(0), **({} if whole else {"tiled": True}))
    got = jax.jit(jax.vmap(f, axis_name="a"))(x)
    sums = got[0] if whole else got.reshape(-1)
    return float(jnp.square(sums - x.sum(0)).mean())


# In units of a level, the error of one rank has the variance 1/6. If N inputs are alike and their noise is evenly
# spread, the error of their sum also has the variance 1/6, N times less than that of N independent errors. If one rank
# sends no error, it is 1/3 (1 - 1/N). If the inputs are independent, only the variance that the noise itself adds
# cancels, and 1/12 (1 + 1/N) of N errors is left.
@pytest.mark.parametrize(
    ("x", "op", "fields", "factor"),
    [
        (LIKE, cgx.compressed_psum, dict(schedule="one_shot"), RANKS),
        (LIKE, cgx.compressed_psum_scatter, dict(own="encoded"), RANKS),
        (LIKE, cgx.compressed_psum_scatter, dict(), RANKS / 2),
        (UNLIKE, cgx.compressed_psum, dict(schedule="one_shot"), 2 * RANKS / (RANKS + 1)),
    ],
    ids=["like", "like, scattered", "like, all except the owner's", "unlike"],
)
def test_the_variance_of_a_sum(x, op, fields, factor):
    independent, correlated = (lost(codec, x, op, **fields) for codec in (STOCHASTIC, CORRELATED))
    assert independent / correlated == pytest.approx(factor, rel=0.05)


@pytest.mark.parametrize("ranks", [1, 3, 8])
def test_ranks_share_noise_that_is_evenly_spread(ranks):
    """This holds for every element. The share of a rank changes from key to key."""

    def drawn(key):
        f = lambda _: noise(first(key, CORRELATED, Axes(("a",))), 0, 0, 1000)
        return jax.vmap(f, axis_name="a", axis_size=ranks)(jnp.arange(ranks))

    found = np.asarray(jax.jit(jax.vmap(drawn))(jnp.arange(200, dtype=jnp.uint32).reshape(100, 2)))
    gaps = np.diff(np.sort(found, axis=1), axis=1)
    assert np.isin(gaps, (2**16 // ranks, -(-(2**16) // ranks))).all()
    assert abs(found.mean() / 2**16 - 0.5) < 0.01
    orders = (found[:, :, 0] - found[:, :1, 0]) % 2**16
    assert len(np.unique(orders, axis=0)) >= min(2 * (ranks - 1), 50) or ranks == 1


@pytest.mark.parametrize("schedule", ["one_shot", "two_shot", "ring"])
@pytest.mark.parametrize("codec", [STOCHASTIC, CORRELATED], ids=["stochastic", "correlated"])
def test_every_rank_and_the_sum_are_unbiased(codec, schedule):
    x, steps = UNLIKE[:, :500], 400

    def body(x):
        def draw(key):
            each = cgx.compressed_all_gather(x, "a", codec, key=key)
            total = cgx.compressed_psum(x, "a", planned(codec, schedule=schedule), key=key)
            return jnp.concatenate([each, total[None]])

        return jax.lax.map(draw, jax.random.split(jax.random.key(1), steps))

    draws = np.asarray(jax.jit(jax.vmap(body, axis_name="a"))(x)[0], np.float64)
    exact = np.asarray(jnp.concatenate([x, x.sum(0, keepdims=True)]), np.float64)
    # The mean of `steps` independent draws has 1/steps of their variance. A bias would add to it.
    ratio = np.square(draws.mean(0) - exact).sum(1) / (draws.var(0).sum(1) / steps)
    assert (ratio > 0.75).all() and (ratio < 1.25).all()


@pytest.mark.parametrize(
    ("axis_type", "check_vma"), [(AxisType.Auto, True), (AxisType.Explicit, True), (AxisType.Auto, False)]
)
def test_meshes_give_the_bits_of_vmap(axis_type, check_vma):
    x, f = UNLIKE[:, :1000], lambda x: cgx.compressed_psum(x, "a", CORRELATED, key=jax.random.key(0))
    ranks = mesh(RANKS, axis_type=axis_type)
    found = on_ranks(f, ranks, check_vma=check_vma)(jax.device_put(x, NamedSharding(ranks, P("a"))))
    np.testing.assert_array_equal(found, jax.jit(jax.vmap(f, axis_name="a"))(x))


def test_without_other_ranks_it_is_stochastic_rounding():
    key = jax.random.key(5)
    np.testing.assert_array_equal(cgx.encode(LIKE[0], CORRELATED, key), cgx.encode(LIKE[0], STOCHASTIC, key))
