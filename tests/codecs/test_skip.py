"""Tests that Skip sends nothing for a leaf, whose sum is zeros."""

import jax.numpy as jnp
import numpy as np
from ranks import mesh, on_ranks

import jaxcgx as cgx

PLAN = cgx.Plan(cgx.Raw(), rules=[("frozen", cgx.Skip())])


def test_nothing_is_sent():
    assert cgx.Skip().wire_bytes((1000, 3), "bfloat16") == 0
    assert cgx.Skip() == cgx.Skip() and cgx.Skip().skips


def test_sums_and_means_are_zeros():
    x = {name: jnp.arange(1.0, 7).reshape(2, 3) for name in ("frozen", "trained")}
    for reduce, expected in (cgx.compressed_psum, [5, 7, 9]), (cgx.compressed_pmean, [2.5, 3.5, 4.5]):
        found = on_ranks(lambda x, reduce=reduce: reduce(x, "a", PLAN), mesh(2))(x)
        np.testing.assert_array_equal(found["frozen"], np.zeros((2, 3), np.float32))
        np.testing.assert_array_equal(found["trained"], [expected] * 2)
