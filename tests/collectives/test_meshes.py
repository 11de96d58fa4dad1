"""Tests meshes with other axes: compressed data parallelism along 'data', and tensor or FSDP sharding along 'model'."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from errors import refused
from helpers import mesh_with, normal, sent
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from training import NESTED

import jaxcgx as cgx

CODEC = cgx.MaxMin(4, 64)
PARAMS = {"up": normal((32, 64), 0), "down": normal((64, 32), 1), "bias": jnp.ones(64)}
SPECS = {"up": P(None, "model"), "down": P("model", None), "bias": P("model")}
X = normal((16, 32), 2)
mesh_of = lambda axis_type: mesh_with(axis_type, data=2, model=4)
place = lambda mesh, tree, specs: jax.tree.map(lambda x, s: jax.device_put(x, NamedSharding(mesh, s)), tree, specs)


def loss(params, x, out_sharding=None):
    return jnp.dot(jnp.tanh(x @ params["up"] + params["bias"]), params["down"], out_sharding=out_sharding).var()


def loss_on(axis_type):
    """Returns the loss. On Explicit meshes, a product over a sharded dimension must name the sharding of its result."""
    return functools.partial(loss, out_sharding=P(None, None)) if axis_type == AxisType.Explicit else loss


def check(step, mesh, params, x):
    run = jax.jit(step)
    halves = [jax.grad(loss)(PARAMS, h) for h in (X[:8], X[8:])]
    for k, g in run(params, x).items():
        mean, spread = (halves[0][k] + halves[1][k]) / 2, max(np.ptp(h[k]) for h in halves)
        assert np.abs(g - mean).max() <= 1.1 * spread / 15
        assert g.sharding.is_equivalent_to(NamedSharding(mesh, SPECS[k]), g.ndim)
    return sent(run.lower(params, x).compile().as_text())


@NESTED
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_model_axis_left_to_the_partitioner(axis_type):
    """shard_map is over 'data' only, and compresses in a shard_map over 'model'."""
    mesh = mesh_of(axis_type)

    def program(pmean):
        @functools.partial(jax.shard_map, mesh=mesh, axis_names={"data"}, in_specs=(P(), P("data")), out_specs=P())
        def step(params, x):
            grads = cgx.grad(loss_on(axis_type), "data", None)(params, x)
            return jax.shard_map(pmean, in_specs=(SPECS,), out_specs=SPECS, axis_names={"model"})(grads)

        return step

    params, x = place(mesh, PARAMS, SPECS), place(mesh, X, P("data"))
    found = check(program(lambda g: cgx.compressed_pmean(g, "data", CODEC)), mesh, params, x)
    plain = sent(jax.jit(program(lambda g: jax.lax.pmean(g, "data"))).lower(params, x).compile().as_text())
    # Gradients travel as bytes. float32 is gathered only where the uncompressed program gathers it, too. On an Explicit
    # mesh, jax 0.10 gathers all arguments and results of such a shard_map.
    assert ("all-gather", "u8") in found
    assert {f for f in found if f[1] == "f32"} <= plain
    if axis_type == AxisType.Auto:
        assert ("all-gather", "f32") not in found


def test_all_axes_manual():
    mesh = mesh_of(AxisType.Auto)

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(SPECS, P("data")), out_specs=SPECS)
    def step(params, x):
        def tensor_parallel(params, x):
            return jax.lax.psum(jnp.tanh(x @ params["up"] + params["bias"]) @ params["down"], "model").var()

        return cgx.compressed_pmean(cgx.grad(tensor_parallel, "data", None)(params, x), "data", CODEC)

    found = check(step, mesh, place(mesh, PARAMS, SPECS), place(mesh, X, P("data")))
    assert ("all-gather", "u8") in found and ("all-gather", "f32") not in found


def test_without_the_inner_shard_map_explicit_shards_are_refused():
    """A sharded gradient is never gathered silently."""
    mesh = mesh_of(AxisType.Explicit)

    @functools.partial(jax.shard_map, mesh=mesh, axis_names={"data"}, in_specs=(P(), P("data")), out_specs=P())
    def step(params, x):
        return cgx.compressed_pmean(cgx.grad(loss_on(AxisType.Explicit), "data", None)(params, x), "data", CODEC)

    given = place(mesh, PARAMS, SPECS), place(mesh, X, P("data"))
    refused("compressed_pmean", lambda: jax.jit(step)(*given), ValueError, "x ['bias']", "", "'model'")


def test_axes_of_vmap_and_of_a_checked_mesh():
    """lax also refuses both together. Without the check they work."""
    mesh = mesh_of(AxisType.Auto)

    def gradient(check_vma):
        total = jax.vmap(lambda row: cgx.compressed_psum(row, ("v", "data"), CODEC), axis_name="v")
        step = jax.grad(lambda x: (total(x) * 2).sum())
        return jax.jit(jax.shard_map(step, mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=check_vma))(X)

    refused("compressed_psum", lambda: gradient(True), ValueError, "axis_name", "both: vmap's 'v'")
    np.testing.assert_array_equal(gradient(False), np.full(X.shape, 2.0 * 16))
