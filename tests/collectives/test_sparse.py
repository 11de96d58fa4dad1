"""Tests sums of sparse codecs: elements that are not sent stay in the residuals, with every schedule."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_trees, planned
from ranks import assert_conserved, assert_same, assert_same_on_all_ranks, mesh, on_ranks, twins, whole_numbers

import jaxcgx as cgx

SHAPES = {"small": (7,), "flat": (3001,), "matrix": (30, 40)}
ALL, TOP = cgx.TopK(0.05), cgx.TopK(0.05, pull="top")
CODECS = {"all": ALL, "top": TOP}
OTHERS = cgx.TopK(0.05, select="sampled"), cgx.TopK(0.05, select="fitted", pull="top"), cgx.TopK(0.25)
WAYS = {"two_shot": dict(schedule="two_shot"), "one_shot": dict(schedule="one_shot")}


def tree(*ranks, seed=0):
    """Returns different whole numbers without 0, so that sums are exact."""
    rng = np.random.RandomState(seed)
    draw = lambda shape: rng.choice([-1, 1], (*ranks, *shape)) * rng.randint(1, 60000, (*ranks, *shape))
    return {name: jnp.asarray(draw(shape), jnp.float32) for name, shape in SHAPES.items()}


def psum(x, residuals, axes="a", codec=ALL, momentum=None, **fields):
    """Returns (sum, residuals) or, with momentum, (sum, residuals, momentum)."""
    plan, carry = planned(codec, **fields), cgx.Carry(residuals=residuals, momentum=momentum)
    found, kept = cgx.compressed_psum(x, axes, plan, key=jax.random.key(7) if plan.stochastic else None, carry=carry)
    return (found, kept.residuals) if momentum is None else (found, kept.residuals, kept.momentum)


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_nothing_is_lost(ranks):
    x, before = tree(ranks), tree(ranks, seed=1)
    codecs = ALL, TOP, cgx.TopK(0.05, cgx.Cast("bfloat16")), *OTHERS
    run = lambda x, e: [psum(x, e, codec=codec, **way) for codec in codecs for way in WAYS.values()]
    for results, after in on_ranks(run, mesh(ranks))(x, before):
        assert_conserved(x, before, results, after, near=0)
        assert_same_on_all_ranks(results)


HIERARCHIES = {"shards": {}, "leader": dict(leader=True), "one_shot": dict(schedule={"a": "one_shot", "b": "ring"})}


@pytest.mark.parametrize("options", HIERARCHIES.values(), ids=HIERARCHIES)
def test_nothing_is_lost_of_a_hierarchy(options):
    x, before = tree(2, 4), tree(2, 4, seed=1)

    def run(x, e):
        return {name: psum(x, e, ("a", "b"), {"a": CODECS[name], "b": cgx.Raw()}, **options) for name in ("all", "top")}

    for results, after in on_ranks(run, mesh(2, 4))(x, before).values():
        assert_conserved(x, before, results, after, 2, near=0)


def sent(x, after):
    """Returns where elements of x, which has no 0, were sent. Their residuals are 0."""
    return {name: np.asarray(after[name]) == 0 for name in x}


@pytest.mark.parametrize("way", WAYS)
def test_all_that_is_sent_arrives(way):
    """With pull="all", the result is the sum of the elements that the ranks sent, the largest ones of each rank."""
    x, zero = tree(4), jax.tree.map(jnp.zeros_like, tree(4))
    results, after = on_ranks(lambda x, e: psum(x, e, **WAYS[way]), mesh(4))(x, zero)
    for name, where in sent(x, after).items():
        np.testing.assert_array_equal(results[name][0], np.where(where, x[name], 0).sum(0), err_msg=name)
        if way == "one_shot":
            flat, kept = np.abs(np.asarray(x[name])).reshape(4, -1), where.reshape(4, -1)
            assert (kept.sum(1) == -(-flat.shape[1] // 20)).all()
            assert (np.where(kept, flat, np.inf).min(1) >= np.where(kept, 0, flat).max(1)).all()


def test_of_16_bits_the_result_is_rounded_and_nothing_else_lost():
    x = jax.tree.map(lambda y: y.astype(jnp.bfloat16), tree(4))
    zero = jax.tree.map(lambda y: jnp.zeros(y.shape, jnp.float32), x)
    for way in WAYS.values():
        results, after = on_ranks(lambda x, e, way=way: psum(x, e, **way), mesh(4))(x, zero)
        for name in x:
            sums, have, kept = (np.asarray(y, np.float64) for y in (results[name][0], x[name], after[name]))
            missing = np.abs(have.sum(0) - kept.sum(0) - sums)
            assert (missing <= 2.0**-8 * np.abs(sums)).all() and missing.any() and kept.any()


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_owners_send_as_little_whatever_the_number_of_ranks(ranks):
    """Ok-Topk's bound: fewer than 6 k words for k elements; here 2 k values and their indices."""
    n, k = 100_000, 1000

    def sent(codec, schedule):
        program = on_ranks(lambda x: cgx.compressed_psum(x, "a", planned(codec, schedule=schedule)), mesh(ranks))
        return cgx.explain(program, jax.ShapeDtypeStruct((ranks, n), jnp.float32), show=False).bytes

    assert 4 * k < sent(cgx.TopK(k / n, pull="top"), "two_shot") < 4 * 6 * k * (ranks - 1) / ranks
    assert (ranks - 1) * 4 * k < sent(cgx.TopK(k / n), "one_shot") < (ranks - 1) * 4 * 2 * k


@pytest.mark.parametrize("codec", ["all", "top"])
def test_momentum_loses_what_is_sent(codec):
    x, zero, ones = tree(4), jax.tree.map(jnp.zeros_like, tree(4)), jax.tree.map(jnp.ones_like, tree(4))
    f = lambda x, e, m: {way: psum(x, e, codec=CODECS[codec], momentum=m, **WAYS[way]) for way in WAYS}
    for way, (results, after, momentum) in on_ranks(f, mesh(4))(x, zero, ones).items():
        for name in x:
            kept, m = np.asarray(after[name]), np.asarray(momentum[name])
            assert set(np.unique(m)) <= {0, 1}
            if codec == "all":
                np.testing.assert_array_equal(m == 0, kept == 0)
            else:  # an owner also keeps what other ranks sent to it; what it sent itself is in the sum
                assert ((m == 0) <= ((kept == 0) | (np.asarray(results[name]) != 0) | (way == "one_shot"))).all()
            assert 0 < (m == 0).sum() < m.size


def test_of_ratio_1_nothing_is_lost_by_any_collective():
    x = whole_numbers((4, 4, 8, 12))
    compressed, plain = twins("a", cgx.TopK(1.0))
    assert_same(on_ranks(compressed, mesh(4), check_vma=False)(x), on_ranks(plain, mesh(4), check_vma=False)(x))


def test_of_ratio_0_nothing_is_sent():
    x, zero = tree(2), jax.tree.map(jnp.zeros_like, tree(2))
    results, after = on_ranks(lambda x, e: psum(x, e, codec=cgx.TopK(0.0)), mesh(2))(x, zero)
    assert_trees(np.testing.assert_array_equal, (results, after), (zero, x))


def test_a_ring_sends_the_top_of_its_sums():
    """Sums of whole numbers below 2^24 are exact if all elements are sent."""
    x = tree(4)
    ring = lambda codec: on_ranks(lambda x: cgx.compressed_psum(x, "a", planned(codec, schedule="ring")), mesh(4))(x)
    exact = lambda y, x: np.testing.assert_array_equal(y[0], np.asarray(x).sum(0))
    assert_trees(exact, ring(cgx.TopK(1.0, pull="top")), x)
    assert 0 < (np.asarray(ring(TOP)["flat"][0]) != 0).sum() <= 0.05 * 3001 + 4
