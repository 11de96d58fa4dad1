"""Tests PowerSGD over ranks: numbers of any size, what travels, and other codecs beside it.

tests/train/test_product.py compares its sums, residuals and factors with a model.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from errors import raises, says, table
from helpers import assert_same_bytes, assert_trees, normal, planned
from jax import lax
from jax.sharding import PartitionSpec as P
from ranks import assert_conserved, mesh

import jaxcgx as cgx
from jaxcgx.exchange import low_rank

CODEC = cgx.PowerSGD(2)
# The first three are matrices of one shape, so fewer programs are compiled.
LEAVES = {"w": (24, 40), "v": (24, 40), "kernel": (2, 3, 4, 40), "b": (40,)}


def tree(ranks):
    return {name: normal((ranks, *shape), i) for i, (name, shape) in enumerate(LEAVES.items())}


def run(f, ranks):
    """Runs f(leaves, residuals, factors) on every rank, and returns (the common results, residuals, factors)."""

    def body(x, residuals, factors):
        sums, lost, factors = f(*jax.tree.map(lambda leaf: leaf[0], (x, residuals)), factors)
        return sums, jax.tree.map(lambda leaf: leaf[None], lost), factors

    specs = dict(in_specs=(P("a"), P("a"), P()), out_specs=(P(), P("a"), P()))
    return jax.jit(jax.shard_map(body, mesh=mesh(ranks), **specs))


def everywhere(f, ranks=2):
    """Returns f on ranks that all have the same arguments."""
    return jax.shard_map(f, mesh=mesh(ranks), in_specs=P(), out_specs=P(), check_vma=False)


def reduce(x, residuals, factors, plan=CODEC):
    """Returns (sum, residuals, factors)."""
    found, carry = cgx.compressed_psum(x, "a", plan, carry=cgx.Carry(residuals=residuals, factors=factors))
    return found, carry.residuals, carry.factors


def test_numbers_of_any_size():
    """Rank 2 arrives whole. What is too small to be sent stays. An overflow spoils its own leaf alone."""
    low = np.asarray(normal((2, 30, 2))) @ np.asarray(normal((2, 2, 30), 1))
    low[1] = low[0] * np.float32(0.5)
    x = {
        "low": low,
        "constant": np.full((2, 30, 30), 3.25, np.float32),
        "zero": np.zeros((2, 30, 30), np.float32),
        "tiny": low * np.float32(1e-30),
        "huge": low * np.float32(1e35),
        "denormal": low * np.float32(1e-42),
        "nan": np.array(normal((2, 30, 30))),
        "inf": np.array(normal((2, 30, 30))),
    }
    x["nan"][0, 3, 4], x["inf"][1, 5, 6] = np.nan, np.inf
    before = jax.tree.map(np.zeros_like, x) | {
        "nan": np.asarray(normal((2, 30, 30), 5)),
        "inf": np.asarray(normal((2, 30, 30), 6)),
    }
    q = dict.fromkeys(x, jnp.zeros((2, 30))) | {"nan": normal((2, 30), 7), "inf": normal((2, 30), 8)}
    step = run(reduce, 2)
    sums, after, factors = step(x, before, q)
    for name in ("low", "constant", "zero", "tiny", "huge"):
        exact = x[name].sum(0)
        np.testing.assert_allclose(sums[name], exact, rtol=0, atol=5e-6 * np.abs(exact).max(), err_msg=name)
    for name in ("nan", "inf"):
        assert np.isnan(sums[name]).all()
        assert_same_bytes(np.asarray(after[name]), before[name])
        assert_same_bytes(factors[name], q[name])
    pick = lambda t: {name: t[name] for name in x if name not in ("nan", "inf")}
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves([pick(sums), pick(after), pick(factors)]))
    assert_conserved(
        pick(x), pick(before), jax.tree.map(lambda y: y[None], pick(sums)), pick(after), near=1.5e-6, least=1e-30
    )
    # A step of zeros is followed by another one.
    *_, again = step(x | {"low": np.asarray(normal((2, 30, 30)))}, before, factors)
    assert np.linalg.matrix_rank(again["low"]) == 2


def test_the_wire_is_two_sums_of_factors():
    """For all leaves of a message, as the plan says. Nothing is as large as a leaf."""
    x = {"w": jnp.ones((40, 60)), "v": jnp.ones((40, 60), jnp.bfloat16), "kernel": jnp.ones((3, 3, 6, 20))}
    x |= {"grid": x["w"]}
    plan = cgx.Plan(CODEC, [("grid", cgx.MaxMin(4))])
    f = lambda x: cgx.compressed_psum(x, "a", planned(plan, schedule="two_shot"))
    found = cgx.explain(everywhere(f, 4), x, show=False)
    low = [c for c in found.collectives if c.codec == "PowerSGD(rank=2)"]
    p, q = 4 * 2 * (40 + 40 + 54), 4 * 2 * (60 + 60 + 20)
    assert [(c.operation, c.dtype, c.bytes, c.schedule, c.axes) for c in low] == [
        ("all-reduce", "float32", 2 * 3 * n // 4, "psum", ("a",)) for n in (p, q)
    ]
    assert {c.leaves for c in low} == {("['kernel']", "['v']", "['w']")}
    raw = 4 * 2400 + 2 * 2400 + 4 * 1080
    assert sum(c.raw_bytes for c in low) == pytest.approx(2 * 3 / 4 * raw, abs=2)
    assert {(c.codec, c.dtype) for c in found.collectives if c not in low} == {("MaxMin(bits=4)", "uint8")}
    rows = {row.leaf: row for row in plan.explain(x, 4).rows}
    assert {name: row.bytes for name, row in rows.items() if name != "grid"} == {"w": 800, "v": 800, "kernel": 592}
    assert len({rows[name].message for name in ("w", "v", "kernel")}) == 1
    assert sum(row.bytes for row in rows.values() if row.codec == CODEC) == p + q


def test_what_travels_raw_and_why():
    x = {"b": jnp.ones(50), "small": jnp.ones((4, 4)), "n": jnp.ones((30, 30), jnp.int32), "w": jnp.ones((30, 30))}
    found = cgx.explain(everywhere(lambda x: cgx.compressed_psum(x, "a", CODEC)), x, show=False)
    reasons = {leaf.path: leaf.reason for leaf in found.raw}
    expected = {name: CODEC.why_raw(x[name].shape, x[name].dtype) for name in ("b", "small")}
    expected["n"] = "int32 is not float32, bfloat16 or float16"
    assert reasons == {f"['{name}']": why for name, why in expected.items()}
    if jax.__version_info__ >= (0, 10):  # jax 0.9 names only one of the sums that XLA joins
        assert found.raw_bytes == pytest.approx(sum(leaf.nbytes for leaf in x.values()), abs=4)
    rows = cgx.Plan(CODEC, min_size=0, skip_1d=False).explain(x, 2).rows
    assert {row.leaf: row.why for row in rows} == expected | {"w": None}
    strict = lambda plan: everywhere(lambda x: cgx.compressed_psum({"b": x["b"]}, "a", planned(plan, strict=True)))
    got = "one that can't, because it has one dimension, and PowerSGD is for matrices"
    with raises(ValueError, says("compressed_psum", "plan", at="leaf ['b']", got=got)):
        jax.eval_shape(strict(CODEC), x)
    jax.eval_shape(strict(cgx.Plan(CODEC)), x)  # the guard of the plan decides


def test_leaves_of_a_shape_share_operations(monkeypatch):
    """Fifty small leaves have the loops and products of one. Large ones share the loops."""

    def found(n):
        x = {str(i): jnp.ones((30, 40)) for i in range(n)}
        f = everywhere(lambda x: cgx.compressed_psum(x, "a", CODEC))
        text = jax.jit(f).lower(x).as_text()
        return text.count("stablehlo.while"), text.count("dot_general")

    loops, products = found(1)
    assert found(50) == (loops, products) > (0, 0)
    monkeypatch.setattr(low_rank, "_SMALL", 1000)
    assert found(2) == (loops, products + 2)


def test_without_a_sum():
    """Leaves of other codecs have no factors. One rank returns what was passed."""
    plan = cgx.Plan(CODEC, [("v", cgx.MaxMin(4)), ("b", cgx.Raw())], min_size=0)
    x = tree(1)
    q = cgx.init_carry(plan, jax.tree.map(lambda leaf: leaf[0], x)).factors
    assert jax.tree.map(jnp.shape, q) == {"w": (2, 40), "v": None, "kernel": (2, 40), "b": None}
    given = {name: None if leaf is None else leaf + 1 for name, leaf in q.items()}
    sums, _, factors = run(functools.partial(reduce, plan=plan), 1)(x, jax.tree.map(jnp.zeros_like, x), given)
    assert_trees(assert_same_bytes, (sums, factors), (jax.tree.map(lambda leaf: leaf[0], x), given))


def test_16_bit_leaves():
    x, before = normal((4, 30, 40), 0, "bfloat16"), normal((4, 30, 40), 1)
    sums, after, factors = run(reduce, 4)(x, before, jnp.zeros((2, 40)))
    assert (sums.dtype, after.dtype, factors.dtype) == (jnp.bfloat16, jnp.float32, jnp.float32)
    x, before, sums, after = (np.asarray(each, np.float64) for each in (x, before, sums, after))
    np.testing.assert_allclose(sums + after.sum(0), (x + before).sum(0), atol=2.0**-8 * np.abs(sums).max())


def test_without_factors_every_call_begins_alike():
    """It starts as with zeros. None instead of a leaf does the same, and returns no factors."""
    x = tree(2)
    q = cgx.init_carry(CODEC, jax.tree.map(lambda leaf: leaf[0], x)).factors

    def all_ways(x, e, q):
        (some, *_, factors), (zeros, *_, others) = (reduce(x, None, each) for each in (q | {"w": None}, q))
        return (cgx.compressed_psum(x, "a", CODEC), some, zeros), e, (factors, others)

    (without, some, zeros), _, (factors, others) = run(all_ways, 2)(x, x, q)
    assert_trees(assert_same_bytes, without, zeros)
    assert_trees(assert_same_bytes, without, some)
    assert factors["w"] is None and factors["b"] is None
    assert_same_bytes(factors["v"], others["v"])


def test_transforms():
    """Transforms are vmap over the ranks, a batch with one factor and with several, and derivatives."""
    x, q, weights = normal((2, 24, 40)), normal((2, 40), 1), jnp.outer(normal(24, 3), normal(40, 4))
    f = lambda x, q: reduce(x, None, q)[::2]
    loss = lambda x, q: (weights * f(x, q)[0]).sum()
    close = functools.partial(np.testing.assert_allclose, atol=1e-4)

    def body(x, q):
        x, batch = x[0], jnp.stack([x[0], -x[0]])
        batches = jax.vmap(f, (0, None))(batch, q), jax.vmap(f)(batch, jnp.stack([q, -q]))
        return f(x, q), batches, jax.grad(loss)(x, q)[None]

    specs = dict(in_specs=(P("a"), P()), out_specs=(P(), P(), P("a")))
    (sums, after), batches, gradient = jax.jit(jax.shard_map(body, mesh=mesh(2), **specs))(x, q)
    for got in batches:
        assert_trees(lambda y, expected: close(y[0], expected), got, (sums, after))
        close(got[0][1], -sums)
    np.testing.assert_array_equal(gradient, jnp.broadcast_to(weights, x.shape))
    back = lambda x, q: jax.grad(loss)(x[0], q)[None]
    untracked = jax.shard_map(back, mesh=mesh(2), in_specs=(P("a"), P()), out_specs=P("a"), check_vma=False)
    # The transpose is the same sum, applied to cotangents.
    close(jax.jit(untracked)(x, q), jnp.broadcast_to(2 * weights, x.shape))
    named = jax.jit(jax.vmap(f, axis_name="a", in_axes=(0, None), out_axes=None))(x, q)
    assert_trees(close, named, (sums, after))


W = {"w": jnp.ones((30, 40)), "b": jnp.ones(30)}
Q = jnp.ones((2, 40))
FINE = cgx.MaxMin(4)
INSIDE = {"a": FINE, "b": CODEC}


def fed(factors, codec=CODEC):
    return lambda x: cgx.compressed_psum(x, "a", codec, carry=cgx.Carry(factors=factors(x)))


def scatter(plan=FINE, **options):
    return lambda x: cgx.compressed_psum_scatter(x, "a", plan, tiled=True, **options)


gather = lambda x: cgx.compressed_all_gather(x, "a", CODEC)
swap = lambda x: cgx.compressed_all_to_all(x, "a", 0, 0, CODEC, tiled=True)
varying = fed(lambda x: {"w": Q + x["w"][:2], "b": None})
BAD_INPUT = {
    "compressed_all_gather": [(gather, ValueError, "plan", "PowerSGD(rank=2)")],
    "compressed_all_to_all": [(swap, ValueError, "plan", "PowerSGD(rank=2)")],
    "compressed_psum_scatter": [
        (scatter(cgx.Plan(CODEC)), ValueError, "plan", "PowerSGD(rank=2)"),
        (scatter(backward_plan=CODEC), ValueError, "backward_plan", "PowerSGD(rank=2)"),
    ],
    "compressed_psum": [
        (lambda x: cgx.compressed_psum(x, ("a", "b"), INSIDE), ValueError, "plan", "it", "jaxcgx.Raw()"),
        (fed(lambda x: [1]), ValueError, "carry.factors", "PyTreeDef([*])"),
        (fed(lambda x: {"w": jnp.ones((3, 40)), "b": None}), ValueError, "carry.factors ['w']", "float32[3, 40]"),
        (fed(lambda x: {"w": None, "b": jnp.ones((2, 3))}), ValueError, "carry.factors ['b']", "float32[2, 3]"),
        (fed(lambda x: {"w": Q, "b": None}, FINE), ValueError, "carry.factors ['w']", "float32[2, 40]"),
        (varying, ValueError, "carry.factors ['w']", "one that varies over 'a'"),
    ],
}


def trace(f):
    inside = lambda x: f(lax.pcast(x, ("a", "b"), to="varying"))
    jax.eval_shape(jax.shard_map(inside, mesh=mesh(2, 2), in_specs=P(), out_specs=P("a")), W)


test_bad_input = table(BAD_INPUT, trace)
