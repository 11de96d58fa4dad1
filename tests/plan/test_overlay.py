"""Tests sums along overlays: they equal plain sums, have the same bits on every rank, and lose nothing."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from errors import raises, says
from helpers import as_bits, assert_trees, normal, planned
from jax import lax
from ranks import EXACT, assert_same_on_all_ranks, mesh, on_ranks, whole_numbers

import jaxcgx as cgx
from jaxcgx.native.layout import Layout
from jaxcgx.plan.overlay import Overlay, Tree

STOCHASTIC = cgx.MaxMin(4, 64, rounding="stochastic")
UNEVEN = Overlay((Tree((-1, 0, 1, 0), 5), Tree((2, 2, 3, -1), 2), Tree((1, -1, 1, 1), 1)))
OUTER = Overlay.owners(2, [2, 1])
OVERLAYS = {
    3: [Overlay.ring([1, 0, 2]), Overlay.owners(3, [0.2, 1, 0])],
    4: [UNEVEN, Overlay.owners(4, 3), "tree"],
    5: [Overlay.tree(5)],
}


def leaves(ranks, draw=whole_numbers):
    return {"w": draw((ranks, 70, 13)), "b": draw((ranks, 7), 1), "h": draw((ranks, 301), 2).astype(jnp.bfloat16)}


@pytest.mark.parametrize("ranks", OVERLAYS)
def test_the_numbers_of_plain_sums(ranks):
    """Raw() and an exact codec give exact sums and means. With few bits, all ranks agree."""

    def f(t):
        found, key = [], jax.random.key(0)
        for s in OVERLAYS[ranks]:
            exact = cgx.compressed_psum(t, "a", planned(EXACT, schedule=s))
            mean = cgx.compressed_pmean(t, "a", planned(cgx.Raw(), schedule=s))
            found.append((exact, mean, cgx.compressed_psum(t, "a", planned(STOCHASTIC, schedule=s), key=key)))
        return found

    found = on_ranks(f, mesh(ranks))(leaves(ranks))
    total = jax.tree.map(lambda x: np.asarray(x, np.float32).sum(0), leaves(ranks))
    for psum, pmean, rounded in found:
        for name, x in leaves(ranks).items():
            assert psum[name].dtype == x.dtype
            np.testing.assert_array_equal(np.asarray(psum[name], np.float32), np.broadcast_to(total[name], x.shape))
            mean = (total[name] / np.float32(ranks)).astype(x.dtype).astype(np.float32)
            np.testing.assert_array_equal(np.asarray(pmean[name], np.float32), np.broadcast_to(mean, x.shape))
            assert np.abs(np.asarray(rounded[name][0], np.float32) - total[name]).max() < 2 * ranks
        assert_same_on_all_ranks(rounded)


def test_owners_are_those_of_two_shot():
    """With equal shares, all bits are the same, also with feedback."""
    x, r = leaves(4, normal), jax.tree.map(lambda x: jnp.asarray(x, jnp.float32) / 8, leaves(4, normal))

    def f(x, r):
        found, options = [], dict(key=jax.random.key(2), carry=cgx.Carry(residuals=r))
        for schedule in ("two_shot", Overlay.owners(4)):
            for own in ("raw", "encoded"):
                plan = planned(STOCHASTIC, schedule=schedule, own=own)
                found.append(cgx.compressed_psum(x, "a", plan, **options))
            found.append(cgx.compressed_psum(x, "a", planned(cgx.ByteGrad(), schedule=schedule)))
        return found[:3], found[3:]

    for got, expected in zip(*map(jax.tree.leaves, on_ranks(f, mesh(4), check_vma=False)(x, r))):
        np.testing.assert_array_equal(as_bits(got), as_bits(expected))


@pytest.mark.parametrize("codec", [cgx.MaxMin(2, 64), cgx.TopK(0.1, pull="top")], ids=["MaxMin", "TopK"])
def test_feedback_keeps_what_is_lost(codec):
    """At every level, sum + residuals of all ranks = x + residuals of all ranks."""
    x, r = normal((4, 3000)), normal((4, 3000), 1) / 8

    def f(x, r):
        y, new = cgx.compressed_psum(x, "a", planned(codec, schedule=UNEVEN), carry=cgx.Carry(residuals=r))
        return y, lax.psum(new.residuals, "a"), lax.psum(x + r, "a")

    y, new, expected = on_ranks(f, mesh(4))(x, r)
    assert_same_on_all_ranks(y)
    np.testing.assert_allclose(y + new, expected, atol=2e-5)
    assert np.abs(new).max() > 0.1


def test_in_a_hierarchy_with_a_leader_and_under_vmap():
    x = whole_numbers((2, 2, 333))
    over, codecs = Overlay.owners(2, [1, 3]), {"a": EXACT, "b": cgx.Raw()}

    def f(x):
        plans = [planned(codecs, schedule={"a": over, "b": "auto"}, leader=lead) for lead in (False, True)]
        both = [cgx.compressed_psum(x, ("a", "b"), plan) for plan in plans]
        return [*both, jax.vmap(lambda x: cgx.compressed_psum(x, "a", planned(EXACT, schedule=over)))(x.reshape(3, -1))]

    first, second, third = on_ranks(f, mesh(2, 2))(x)
    for got in (first, second):
        np.testing.assert_array_equal(got, np.broadcast_to(x.sum((0, 1)), x.shape))
    np.testing.assert_array_equal(third.reshape(x.shape), np.broadcast_to(x.sum(0), x.shape))


@pytest.mark.parametrize("weights", [4, 3, [1, 1, 1, 0.1], [5, 0, 0.03, 1]])
def test_bytes_are_balanced(weights):
    """The bytes are within 1% of the message, and of each large owner's share."""
    overlay = Overlay.owners(4, weights)
    tree = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((3, 70_000), (17,), (4000, 300), (1,), (999, 99))]
    layout = Layout.of(cgx.MaxMin(4), tree, chunks=len(overlay.trees))
    found = np.array(dataclasses.replace(layout, shares=overlay.shares).ends)
    given = np.array([1] * weights if isinstance(weights, int) else [w for w in weights if w])
    np.testing.assert_allclose(found / found.sum(), given / given.sum(), atol=1e-3)
    large = given / given.sum() > 0.1
    np.testing.assert_allclose((found / found.sum())[large], (given / given.sum())[large], rtol=0.01)


def test_rings_and_trees():
    assert str(Overlay.owners(4, 2)) == "Overlay(2 trees over 4 ranks, depth 1)"
    ring = Overlay.ring([2, 0, 1, 3])
    assert ring.loads() == {(0, 2): 0.75, (0, 1): 0.75, (1, 3): 0.75, (2, 3): 0.75}
    assert ring.depth == 2 and Overlay.tree(7).depth == 2
    assert Overlay.ring([0, 1]).loads() == {(0, 1): 1.0} and Overlay.ring([0]).loads() == {}
    for overlay in (ring, Overlay.tree(5), UNEVEN):
        ones = [1] * len(overlay.trees)
        assert sum(overlay.sent(ones, ones)) == 2 * (overlay.ranks - 1) * len(overlay.trees)
    assert {ring: 1}[Overlay.ring([2, 0, 1, 3])] == 1  # static under jit


@pytest.mark.parametrize(
    ("codec", "schedule", "expected"),
    [(EXACT, Overlay.tree(3), "an overlay of the 4 ranks"), (cgx.TopK(0.1), UNEVEN, "sums grow")],
)
def test_where_an_overlay_does_not_fit(codec, schedule, expected):
    with raises(ValueError, says("compressed_psum", "plan", expected=expected)):
        on_ranks(lambda x: cgx.compressed_psum(x, "a", planned(codec, schedule=schedule)), mesh(4))(normal((4, 60, 40)))


def test_factors_travel_along_an_overlay():
    plans = [planned(cgx.PowerSGD(2), schedule=schedule) for schedule in ("auto", UNEVEN, "tree")]
    run = on_ranks(lambda x: [cgx.compressed_psum(x, "a", plan) for plan in plans], mesh(4))
    first, *others = run(normal((4, 60, 40)))
    for found in others:
        np.testing.assert_allclose(found, first, rtol=0, atol=1e-5 * np.abs(first).max())


@pytest.mark.parametrize("schedule", [OUTER, {"a": OUTER, "b": "auto"}], ids=["overlay", "by axis"])
def test_an_overlay_of_the_outer_axis_carries_what_a_plan_leaves_raw(schedule):
    plan = cgx.Plan({"a": EXACT, "b": cgx.Raw()})  # leaves of one dimension travel raw
    tree = {"w": whole_numbers((2, 2, 70, 13)), "b": whole_numbers((2, 2, 99), 1)}
    found = on_ranks(lambda t: cgx.compressed_psum(t, ("a", "b"), planned(plan, schedule=schedule)), mesh(2, 2))(tree)
    for name, x in tree.items():
        np.testing.assert_array_equal(found[name], np.broadcast_to(np.asarray(x).sum((0, 1)), x.shape))


def test_an_overlay_of_the_outer_axis_takes_any_plan():
    """A single codec, of the plan or of a rule, is then that of the outer axis. Over the inner one, leaves stay raw."""
    tree = {"b": normal((2, 2, 70))} | {name: normal((2, 2, 70, 13), i) for i, name in enumerate("uvw")}
    found = []
    for outer in (lambda codec: codec, lambda codec: {"a": codec, "b": cgx.Raw()}):
        rules = [("v", outer(cgx.MaxMin(8)))]
        plan = cgx.Plan(outer(cgx.MaxMin(4)), rules, schedule=OUTER, min_size=0)
        run = lambda t, plan=plan: cgx.compressed_psum(t, ("a", "b"), plan)
        shapes = {name: x[0, 0] for name, x in tree.items()}
        found.append((on_ranks(run, mesh(2, 2))(tree), str(plan.explain(shapes, {"a": 2, "b": 2}))))
    (one, said), (by_axis, expected) = found
    assert_trees(np.testing.assert_array_equal, one, by_axis)
    assert said == expected
