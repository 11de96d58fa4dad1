"""Tests that results have the same bits on every rank and in every run.

On request, they have the same bits with any division into messages.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_same_trees, each_codec, normal, planned
from ranks import assert_same_on_all_ranks, mesh, on_ranks

import jaxcgx as cgx

STOCHASTIC = cgx.MaxMin(4, 64, rounding="stochastic")
KEY = jax.random.key(3)
SIZES = (0, 1, 17, 511, 3001)


def tree(*ranks):
    """Returns leaves of many sizes and of every dtype, including a scalar."""
    leaves = {f"{n}": normal((*ranks, n), n, dtype) for n, dtype in zip(SIZES, 3 * ("float32", "bfloat16", "float16"))}
    return {**leaves, "scalar": normal(ranks, 1), "matrix": normal((*ranks, 30, 40), 2)}


def one_axis(t, codec=STOCHASTIC, **fields):
    return cgx.compressed_psum(t, "a", planned(codec, **fields), key=KEY if codec.stochastic else None)


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_replicas_are_identical_and_runs_reproducible(ranks):
    f = lambda t: [one_axis(t, schedule=s) for s in ("two_shot", "one_shot", "ring", "gather", "auto")]
    run = on_ranks(f, mesh(ranks), check_vma=False)
    got = run(tree(ranks))
    assert_same_on_all_ranks(got)
    assert_same_trees(got, run(tree(ranks)))


def test_gathered_copies_are_identical():
    """The owner also decodes its own bytes."""
    gather = functools.partial(cgx.compressed_all_gather, key=KEY)
    f = lambda t: (gather(t, "a", STOCHASTIC), gather(t, ("a", "b"), {"a": STOCHASTIC, "b": STOCHASTIC}))
    one, two = on_ranks(f, mesh(2, 4), check_vma=False)(tree(2, 4))
    assert_same_on_all_ranks(two, axes=2)
    for column in range(4):
        assert_same_on_all_ranks(jax.tree.map(lambda x: x[:, column], one))


def test_one_rank_returns_its_input():
    nan = tree(1) | {"nan": jnp.array([[jnp.nan, -0.0, jnp.inf, 1e-45]])}
    ways = dict(schedule="two_shot", own="encoded"), dict(schedule="one_shot"), dict(schedule="ring")
    for got in on_ranks(lambda t: [one_axis(t, **way) for way in ways], mesh(1))(nan):
        assert_same_trees(got, nan)
    levels, same, options = {"a": STOCHASTIC, "b": STOCHASTIC}, tree(1, 1), dict(key=KEY, tiled=True)
    assert_same_trees(on_ranks(lambda t: cgx.compressed_pmean(t, ("a", "b"), levels, key=KEY), mesh(1, 1))(same), same)
    others = lambda x: (
        cgx.compressed_psum_scatter(x, "a", planned(STOCHASTIC, own="encoded"), **options),
        cgx.compressed_all_gather(x, "a", STOCHASTIC, **options),
        cgx.compressed_all_to_all(x, "a", 0, 0, STOCHASTIC, **options),
    )
    for got in on_ranks(others, mesh(1))(same["matrix"][0]):
        assert_same_trees(got, same["matrix"][0])


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_on_one_rank_makes_exactly_its_bucket_nan_everywhere(bad):
    clean = {"x": normal((4, 1000)), "y": normal((4, 5), 1), "z": normal((4, 130), 2, jnp.bfloat16)}
    dirty = clean | {"x": clean["x"].at[2, 100].set(bad), "z": clean["z"].at[0, 129].set(bad)}
    f = lambda t: [one_axis(t, codec=cgx.MaxMin(4, 64), schedule=s) for s in ("two_shot", "one_shot", "ring")]
    run = on_ranks(f, mesh(4), check_vma=False)
    for got, whole in zip(run(dirty), run(clean)):
        for name, buckets in dict(x=slice(64, 128), y=slice(0), z=slice(128, 130)).items():
            y, expected = (np.array(t[name], np.float32) for t in (got, whole))
            assert np.isnan(y[:, buckets]).all()
            y[:, buckets] = expected[:, buckets]
            np.testing.assert_array_equal(y, expected)


ENCODED = [dict(own="encoded", schedule="two_shot"), dict(schedule="one_shot")]


@pytest.mark.parametrize("codec", **each_codec([STOCHASTIC, cgx.MaxMin(4, 100), cgx.Cast("bfloat16", "stochastic")]))
def test_with_own_encoded_bits_do_not_depend_on_messages(codec):
    """All leaves are in one message, or a few in each, or one in each. So chunks are cut at different places."""
    f = lambda t: [[one_axis(t, codec, fusion_mb=mb, **fields) for mb in (64, 0.002, 1e-6)] for fields in ENCODED]
    for one, few, alone in on_ranks(f, mesh(3))(tree(3)):
        assert_same_trees(one, few)
        assert_same_trees(one, alone)


@pytest.mark.parametrize("leader", [False, True])
def test_nor_in_hierarchies(leader):
    fields = dict(schedule="two_shot", own="encoded", leader=leader)

    def f(t):
        each = [({"a": STOCHASTIC, "b": inner}, mb) for inner in (STOCHASTIC, cgx.Raw()) for mb in (64, 0.002)]
        plans = [planned(codecs, fusion_mb=mb, **fields) for codecs, mb in each]
        return [cgx.compressed_psum(t, ("a", "b"), plan, key=KEY) for plan in plans]

    one, few, raw_one, raw_few = on_ranks(f, mesh(2, 2))(tree(2, 2))
    assert_same_trees((one, raw_one), (few, raw_few))


@pytest.mark.parametrize("leader", [False, True])
@pytest.mark.parametrize("inner", [cgx.Raw(), cgx.MaxMin(4)], ids=repr)
def test_sums_of_16_bit_leaves_stay_in_float32_across_a_hierarchy(inner, leader):
    """Eight times 30,000 is too large for a float16. The mean isn't."""
    plan = planned({"a": cgx.MaxMin(4), "b": inner}, schedule="two_shot", leader=leader)
    x = jnp.full((2, 4, 600), 30000, jnp.float16)
    np.testing.assert_array_equal(on_ranks(lambda x: cgx.compressed_pmean(x, ("a", "b"), plan), mesh(2, 4))(x), x)
