"""What tests of value_and_grad share: losses, batches and meshes."""

import jax
import jax.numpy as jnp
import pytest
from helpers import assert_close, mesh_with
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from training import PARAMS

import jaxcgx as cgx

RANKS = 4
CODEC = cgx.MaxMin(4, 64)
MASK = jnp.float32(jnp.arange(24) % 7 < jnp.arange(24) // 5)
MAPPED = pytest.mark.parametrize("ranks", ["shard_map", "vmap"])
KINDS = pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)


def mesh_of(kind, *axes):
    return mesh_with(kind, **dict(axes or [("data", RANKS)]))


def errors_of(params, x):
    return (jnp.tanh(x @ params["w"] + params["b"]) - x.mean(-1, keepdims=True)) ** 2


def loss_fn(params, x, mask=None):
    return errors_of(params, x).mean()


def place(mesh, tree, spec=P("data")):
    return jax.device_put(tree, NamedSharding(mesh, spec))


def close(found, expected):
    assert_close(*map(jax.tree.leaves, (found, expected)), rtol=2e-4, atol=1e-6)


# Sources of the mesh and of the shardings.
def called(how, mesh, f, params, *batch):
    batch = place(mesh, batch)
    if how == "jit":
        with jax.set_mesh(mesh):
            return jax.jit(f)(place(mesh, params, P()), *batch)
    if how == "context":
        with jax.set_mesh(mesh):
            return f(params, *batch)
    return f(params, *batch)


def fed(exchange, mesh=None, **options):
    """Returns (what exchanges the gradients of all ranks, its first state)."""
    mesh = mesh or mesh_of(AxisType.Auto)
    exchanged = cgx.compress_gradients("data", exchange, mesh=mesh, **options)
    return exchanged, exchanged.init(place(mesh, PARAMS, P()))
