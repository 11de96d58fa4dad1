"""Tests models of other libraries, which have their own pytrees."""

import jax
import numpy as np
import optax
import pytest
from errors import raises, says
from jax.sharding import PartitionSpec as P
from steps import run
from training import CODEC, X, mesh_of, train

import jaxcgx as cgx

pytestmark = pytest.mark.usefixtures("promotion")


def test_equinox():
    eqx = pytest.importorskip("equinox", reason="needs the extra `test`")
    model = eqx.nn.MLP(30, 1, 40, 2, key=jax.random.key(0))
    params, static = eqx.partition(model, eqx.is_inexact_array)

    def loss(params, x):
        return ((jax.vmap(eqx.combine(params, static))(x) - x.mean(-1, keepdims=True)) ** 2).mean()

    plan = cgx.Plan(CODEC, [(r"layers/\d/weight", cgx.MaxMin(4, 64))], min_size=100)
    plain, state, _ = train(
        optax.chain(cgx.compress_gradients("data", plan, axis_size=4), optax.adam(1e-2)), 30, params, loss_fn=loss
    )
    residuals = state[0].own.residuals
    assert residuals.layers[0].weight.shape == (4, 40, 30) and residuals.layers[0].bias is None
    assert loss(plain, X) < 0.5 * loss(params, X)
    found, _ = run(cgx.make_train_step(loss, optax.adam(1e-2), mesh_of(4), plan), 30, params)
    np.testing.assert_allclose(loss(found.params, X), loss(plain, X), rtol=1e-3)


def test_nnx_optimizer():
    nnx = pytest.importorskip("flax.nnx", reason="needs the extra `test`")
    tx = optax.chain(cgx.compress_gradients("data", CODEC, axis_size=4), optax.sgd(0.1))
    found = {}
    for way in ("jax", "nnx"):
        model = nnx.Linear(30, 1, rngs=nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
        specs = cgx.state_specs(optimizer, "data")

        def local_step(model, optimizer, x):
            graph, params = nnx.split(model)
            loss = lambda params: ((nnx.merge(graph, params)(x) - x.mean(-1, keepdims=True)) ** 2).mean()
            value, grads = cgx.value_and_grad(loss, "data", None)(params)
            optimizer.update(model, grads)
            return value if way == "nnx" else (value, model, optimizer)

        if way == "nnx":
            placed = nnx.StateSharding(nnx.state(specs))
            step = nnx.jit(nnx.shard_map(local_step, mesh=mesh_of(4), in_specs=(P(), placed, P("data")), out_specs=P()))
            found[way] = [step(model, optimizer, X) for _ in range(3)]
        else:
            step = jax.jit(
                jax.shard_map(
                    local_step, mesh=mesh_of(4), in_specs=(P(), specs, P("data")), out_specs=(P(), P(), specs)
                )
            )
            found[way] = []
            for _ in range(3):
                value, model, optimizer = step(model, optimizer, X)
                found[way].append(value)
        residuals = optimizer.opt_state[0].own.residuals["kernel"][...]
        assert residuals.shape == (4, 30, 1) and residuals.sharding.spec == P("data") and residuals.any()
    np.testing.assert_allclose(found["jax"], found["nnx"], rtol=1e-6)
    with raises(TypeError, says("state_specs", "opt_state", got="a State", remedy="nnx.Optimizer")):
        cgx.state_specs(nnx.state(optimizer), "data")
