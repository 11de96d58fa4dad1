"""A small model for the tests of train: its parameters, the batch of every rank, and a training step."""

import jax
import jax.numpy as jnp
import optax
import pytest
from helpers import mesh_with, normal
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxcgx as cgx

CODEC = cgx.MaxMin(2, 64)
STOCHASTIC = cgx.MaxMin(2, 64, rounding="stochastic")
PARAMS = {"w": normal((30, 40), 1, scale=0.2), "b": jnp.zeros(40)}
X = normal((24, 30), 2)  # divisible by 1, 2, 3, 4, 6 and 8 ranks


def mesh_of(ranks, kind=AxisType.Auto):
    return mesh_with(kind, data=ranks)


def loss_fn(params, x):
    return ((jnp.tanh(x @ params["w"] + params["b"]) - x.mean(-1, keepdims=True)) ** 2).mean()


def step_by_hand(optimizer, state, specs=None):
    """Returns a jitted step of four ranks. `state` is one of the states of its optimizer."""

    def step(params, state, x):
        loss, grads = cgx.value_and_grad(loss_fn, "data", None)(params, x)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    specs = cgx.state_specs(state, "data") if specs is None else specs
    mapped = dict(in_specs=(P(), specs, P("data")), out_specs=(P(), specs, P()))
    return jax.jit(jax.shard_map(step, mesh=mesh_of(4), **mapped))


def place(tree, specs, ranks=4):
    """Places a tree on the devices where a step expects it."""
    return jax.device_put(tree, jax.tree.map(lambda spec: NamedSharding(mesh_of(ranks), spec), specs))


def train(optimizer, steps=5):
    """Returns (parameters, state, losses) after some steps from a new state."""
    state = optimizer.init(PARAMS)
    step, losses = step_by_hand(optimizer, state), []
    # Where a step leaves them, so that it is compiled once.
    params, state = place((PARAMS, state), (P(), cgx.state_specs(state, "data")))
    for _ in range(steps):
        params, state, loss = step(params, state, X)
        losses.append(float(loss))
    return params, state, losses


def save(path, tree):
    """Saves a checkpoint, and returns its path."""
    ocp = pytest.importorskip("orbax.checkpoint", reason="needs the extra `test`")
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, tree)
    return path


NESTED = pytest.mark.skipif(
    jax.__version_info__ < (0, 10), reason="jax 0.9 can't lower axis_index in a shard_map within a shard_map"
)
SHARDED = {"up": normal((30, 64), 1, scale=0.2), "bias": jnp.zeros(64), "down": normal((64, 30), 2, scale=0.2)}
SPECS = {"up": P(None, "model"), "bias": P("model"), "down": P("model", None)}
