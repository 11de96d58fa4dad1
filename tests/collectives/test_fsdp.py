"""Tests FSDP: sharded weights are gathered compressed in the forward pass, and gradients are scattered compressed."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import ranks
from helpers import assert_trees, normal
from jax.sharding import PartitionSpec as P
from training import mesh_of

import jaxcgx as cgx

RANKS = 4
MESH = mesh_of(RANKS)
W = {"a": normal((64, 48), 0), "b": normal((48, 32), 1)}
X = normal((RANKS * 8, 64), 2)
CHECKS = pytest.mark.parametrize("check_vma", [True, False])
loss = lambda w, x: (jnp.tanh(x @ w["a"]) @ w["b"]).var()


def mean_gradient(w):
    grads = [jax.grad(loss)(w, X[8 * r : 8 * r + 8]) for r in range(RANKS)]
    return {k: np.mean([g[k] for g in grads], 0) for k in w}


@CHECKS
def test_leaves_along_dimensions_of_their_own(check_vma):
    """A tree gives each leaf its dimension, for a gather, for its transpose and for a scatter."""
    specs, axis = {"a": P(None, "data"), "b": P("data")}, {"a": 1, "b": 0}

    @functools.partial(
        jax.shard_map, mesh=MESH, in_specs=(specs, P("data")), out_specs=(specs, specs), check_vma=check_vma
    )
    def step(shards, x):
        options = dict(axis_name="data", plan=cgx.Raw(), tiled=True)
        gathered = lambda s: loss(cgx.compressed_all_gather(s, axis=axis, **options), x)
        whole = {k: jax.lax.all_gather(w, "data", axis=axis[k], tiled=True) for k, w in shards.items()}
        grads = jax.grad(loss)(whole, x)
        return jax.grad(gathered)(shards), cgx.compressed_psum_scatter(grads, scatter_dimension=axis, **options)

    grads, scattered = jax.jit(step)(W, X)
    for k, mean in mean_gradient(W).items():
        np.testing.assert_allclose(grads[k] / RANKS, mean, rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(scattered[k] / RANKS, mean, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("codec", [cgx.MaxMin(4), cgx.Raw(), {"a": cgx.MaxMin(4), "b": cgx.Raw()}], ids=str)
@CHECKS
def test_nothing_gathered_is_saved(codec, check_vma):
    """With the policy in JAX's documentation, the backward pass gathers again, as with lax.all_gather."""
    axes, kept = ("a", "b"), {}
    policies = {"all": None, "none gathered": lambda op, *_, **__: str(op) != "all_gather"}

    @functools.partial(jax.shard_map, mesh=ranks.mesh(2, 2), in_specs=P(axes), out_specs=P(axes), check_vma=check_vma)
    def step(shards, x):
        local = lambda shards, x: loss(cgx.compressed_all_gather(shards, axes, codec, tiled=True, axis=-2), x)
        grads = {}
        for name, policy in policies.items():
            f = local if policy is None else jax.remat(local, policy=policy)
            value, back = jax.vjp(f, shards, x)
            kept[name] = {leaf.shape for leaf in jax.tree.leaves(back)}
            grads[name] = back(jnp.ones_like(value))[0]
        return grads

    grads = jax.jit(step)(W, X)
    assert_trees(np.testing.assert_array_equal, grads["none gathered"], grads["all"])
    gathered = {w.shape for w in W.values()}
    assert kept["all"] & gathered and not kept["none gathered"] & gathered
    assert (8, 64) in kept["none gathered"]  # without the policy, gathered leaves are saved
