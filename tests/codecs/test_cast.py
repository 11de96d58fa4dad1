"""Tests Cast against astype, and the bits of its sums."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_same_bytes, normal, planned, roundtrip
from ranks import mesh, on_ranks

import jaxcgx as cgx
from jaxcgx.native import ops
from jaxcgx.native.layout import Layout


def test_cast_is_astype():
    special = [0, -0.0, 65519, 65520, 1e30, -1e30, np.inf, np.nan]
    x = np.concatenate([normal(3000), normal(500, 1, scale=1e-6), special])
    for dtype in (jnp.bfloat16, jnp.float16):
        with np.errstate(over="ignore"):
            expected = x.astype(np.float32).astype(dtype).astype(np.float32)
        np.testing.assert_array_equal(roundtrip(x, cgx.Cast(dtype)), expected)


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_sums_of_bfloat16_have_the_same_bits_with_every_schedule(ranks):
    """Those of a sum in float32 and in rank order, which is rounded once. A ring rounds at every hop."""
    x = np.array(normal((ranks, 3001)) + normal((3001,), 1)).astype(jnp.bfloat16)
    total = functools.reduce(np.add, x.astype(np.float32))
    for schedule in "one_shot", "two_shot", "auto", "ring":
        plan = planned(cgx.Cast("bfloat16"), schedule=schedule)
        f = lambda x, plan=plan: [sum_(x, "a", plan) for sum_ in (cgx.compressed_psum, cgx.compressed_pmean)]
        sums, means = on_ranks(f, mesh(ranks))(x)
        for got, exact in (sums, total), (means, total / np.float32(ranks)):
            expected = np.broadcast_to(exact.astype(jnp.bfloat16), x.shape)
            if schedule == "ring" and ranks > 2:
                assert (np.asarray(got) != expected).any()
            else:
                assert_same_bytes(got, expected)


def test_a_number_that_overflows_keeps_its_residual():
    layout = Layout(cgx.Cast("float16"), ((2,),), ("float32",))
    _, (new,) = ops.encode_fed(layout, [jnp.array([1e6, 1.0])], [jnp.array([0.5, 2.0**-12])])
    np.testing.assert_array_equal(new, [0.5, 2.0**-12])
