"""Tests plans that skip leaves: their sums are zeros, and nothing is sent."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from errors import refused
from helpers import assert_same_trees, normal, planned
from jax import lax
from jax.sharding import PartitionSpec as P
from ranks import mesh, on_ranks

import jaxcgx as cgx

PLAN = cgx.Plan(cgx.MaxMin(8), [("frozen", cgx.Skip())], min_size=100)
TREE = {"w": normal((4, 30, 40), 1), "frozen": {"w": normal((4, 30, 40), 2), "ids": jnp.ones((4, 3), jnp.int32)}}


def zeros(tree):
    return jax.tree.map(jnp.zeros_like, tree)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("collective", [cgx.compressed_psum, cgx.compressed_pmean])
def test_sums_are_zeros(collective, check_vma):
    residuals = {"w": zeros(TREE["w"]), "frozen": {"w": 1 + zeros(TREE["w"]), "ids": None}}
    sums = lambda t, r: collective(t, "a", planned(PLAN, strict=True), carry=cgx.Carry(residuals=r))
    found, carry = on_ranks(sums, mesh(4), check_vma)(TREE, residuals)
    assert_same_trees(found["frozen"], zeros(TREE["frozen"]))
    assert_same_trees(carry.residuals["frozen"], residuals["frozen"])
    assert found["w"].any() and carry.residuals["w"].any()
    raw = on_ranks(lambda t: collective(t, "a", cgx.Plan(cgx.Raw(), [("frozen", cgx.Skip())])), mesh(4), check_vma)(
        TREE
    )
    assert_same_trees(raw["frozen"], zeros(TREE["frozen"]))
    total = TREE["w"].sum(0) / (4 if collective is cgx.compressed_pmean else 1)
    np.testing.assert_allclose(raw["w"][0], total, rtol=1e-5, atol=1e-5)


def test_nothing_is_sent():
    """It doesn't matter whether these leaves are the same on every rank."""
    f = lambda t, same: cgx.compressed_pmean({"w": t["w"], "frozen": (t["frozen"], same)}, "a", PLAN)
    step = jax.shard_map(f, mesh=mesh(4), in_specs=(P("a"), P()), out_specs=P())
    found = cgx.explain(step, TREE, jnp.ones(3), show=False)
    assert {c.leaves for c in found.collectives} == {("['w']",)}
    frozen = [leaf for leaf in found.raw if "frozen" in leaf.path]
    assert {leaf.path for leaf in frozen} == {"['frozen'][0]['w']", "['frozen'][0]['ids']", "['frozen'][1]"}
    assert all((leaf.bytes, leaf.reason) == (0, "the plan skips it") for leaf in frozen)


def test_the_gradient_in_the_backward_pass_is_zeros():
    def loss(params, x):
        params = cgx.sync_in_backward(params, "a", PLAN)
        return lax.pmean(((x @ params["w"] + x @ params["frozen"]) ** 2).mean(), "a")

    params = {"w": normal((8, 16), 1), "frozen": normal((8, 16), 2)}
    outside = jax.shard_map(loss, mesh=mesh(4), in_specs=(P(), P("a")), out_specs=P())
    value, grads = jax.jit(jax.value_and_grad(outside))(params, normal((4, 8), 3))
    plain = ((normal((4, 8), 3) @ (params["w"] + params["frozen"])) ** 2).mean()
    np.testing.assert_allclose(value, plain, rtol=1e-5)
    assert grads["w"].any() and not grads["frozen"].any()


def test_codecs_that_send_nothing_encode_nothing():
    refused("encode", lambda: cgx.encode(jnp.ones(3), cgx.Skip()), ValueError, "codec", "Skip()", "jaxcgx.Plan")
    assert cgx.Skip().wire_bytes((1000, 3), "bfloat16") == 0 and cgx.Skip() == cgx.Skip() and cgx.Skip().skips
