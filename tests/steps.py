"""Helpers of the tests of make_train_step."""

import jax.numpy as jnp
import optax
from helpers import mesh_with
from training import PARAMS, SPECS, X

import jaxcgx as cgx


def run(train, steps=5, params=PARAMS, x=X, key=None, model_state=None):
    """Returns (state, metrics of each step)."""
    state, found = train.init(params, model_state), []
    for _ in range(steps):
        state, metrics = train.step(state, x, key)
        found.append(metrics)
    return state, found


def tensor_parallel(exchange, model=4, optimizer=None, **options):
    """Returns a step on a mesh of 2 ranks, each of which has `model` shards of the parameters."""

    def loss(params, x):
        return ((jnp.tanh(x @ params["up"] + params["bias"]) @ params["down"] - x) ** 2).mean()

    optimizer, mesh = optimizer or optax.sgd(0.5, momentum=0.5), mesh_with(data=2, model=model)
    return cgx.make_train_step(loss, optimizer, mesh, exchange, sharding=cgx.Sharding(params=SPECS), **options)
