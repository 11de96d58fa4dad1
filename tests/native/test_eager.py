"""Tests primitives outside jit. They stay compiled under `jax.disable_jit`."""

import jax
import jax.numpy as jnp
import pytest
from helpers import KEY, assert_same_trees, normal
from ranks import mesh, on_ranks

import jaxcgx as cgx
from jaxcgx.native import ops
from jaxcgx.native.layout import Layout

CODEC, TOPK = cgx.MaxMin(4, 64, "stochastic"), cgx.TopK(0.1)
X = normal((4, 300))


def operations(x):
    """Runs every native operation."""
    layout, sparse = (Layout.of(codec, [x]) for codec in (CODEC, TOPK))
    key = jax.random.key_data(KEY)
    payload, residuals = ops.encode_fed(layout, [x], [x], key)
    total = ops.reduce_encoded(layout, payload, key=key)
    cleared = ops.clear(sparse, ops.encode(sparse, [x]), [x])
    return payload, residuals, ops.decode(layout, payload), total, cleared, cgx.roundtrip(x, CODEC, KEY)


def collectives(x):
    fed = cgx.compressed_psum(x, "a", CODEC, key=KEY, carry=cgx.Carry(residuals=jnp.zeros_like(x)))
    return fed, cgx.compressed_all_gather(x, "a", CODEC, key=KEY)


@pytest.mark.parametrize(
    "f",
    [operations, on_ranks(collectives, mesh(4), jit=False), jax.vmap(collectives, axis_name="a")],
    ids=["operations", "mesh", "vmap"],
)
def test_without_jit(f):
    expected = jax.jit(f)(X)
    with jax.disable_jit():
        assert_same_trees(f(X), expected)
    assert_same_trees(f(X), expected)
