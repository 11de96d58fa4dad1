"""Tests plans that skip parameters. They are frozen, and no part of a step touches them."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from compressing import GRADS, compress, run
from errors import raises, says
from helpers import assert_same_trees, normal
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from training import CODEC, NESTED, PARAMS, SHARDED, X, loss_fn, mesh_of, tensor_parallel

import jaxcgx as cgx

PLAN = cgx.Plan(CODEC, [("w", cgx.Skip())], min_size=0, skip_1d=False)


@pytest.fixture(autouse=True)
def promotion():
    """optax relies on type promotion."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def test_the_transformation():
    """Updates are zeros, also with momentum and weight decay, and there is no state."""
    everything = dict(momentum=0.9, momentum_masking=True, weight_decay=0.1, beta=0.5, telemetry=True)
    plan = cgx.Plan(cgx.TopK(0.5), [("w", cgx.Skip())], min_size=0, skip_1d=False)
    transformation = compress({0: plan, 5: plan}, **everything)
    ones = jax.tree.map(lambda g: jnp.ones(g.shape[1:]), GRADS)
    with_params = transformation._replace(update=lambda grads, state: transformation.update(grads, state, ones))
    for mean, state in run(with_params, 2):
        assert not mean["w"].any() and mean["b"].any()
        for field in (state.residuals, state.momentum, state.trace):
            assert field["w"] is None and field["b"] is not None
        assert state.telemetry.bytes["w"] == state.telemetry.uncompressed["w"] == 0 < state.telemetry.bytes["b"]


def test_plans_that_skip_other_leaves_later():
    words = says("compress_gradients", "plan", "leaf ['w']", "skip every none", "a schedule", "new transformation")
    with raises(ValueError, words):
        compress({0: PLAN, 5: CODEC}).init(PARAMS)


@jax.custom_vjp
def never_differentiated(x):
    return x


never_differentiated.defvjp(lambda x: (x, None), lambda _, ct: pytest.fail("a frozen parameter is differentiated"))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_a_step(kind):
    """Parameters act like constants of the loss, also with an optimizer that would change them without gradients."""
    params = {**PARAMS, "w ids": jnp.arange(40)}
    plan = cgx.Plan(cgx.Raw(), [("w", cgx.Skip())])
    mesh = jax.make_mesh((4,), ("data",), axis_types=(kind,), devices=jax.devices()[:4])
    optimizer = optax.adamw(0.1, weight_decay=0.5)

    def loss(params, x):
        shuffled = {"w": never_differentiated(params["w"])[:, params["w ids"]], "b": params["b"]}
        return loss_fn(shuffled, x)

    train = cgx.make_train_step(loss, optimizer, mesh, plan=plan, accumulate=2, telemetry=True)
    expected, plain = {"b": params["b"]}, optimizer.init({"b": params["b"]})

    @jax.jit
    def plain_step(params, state):
        grads = jax.grad(lambda p: loss_fn({**PARAMS, **p}, X))(params)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    found, state = train.init(params)
    assert jax.tree.leaves(state[0].residuals) == []
    assert jax.tree.map(jnp.shape, state[1]) == jax.tree.map(jnp.shape, plain_with_holes(optimizer))
    for _ in range(3):
        found, state, metrics = train.step(found, state, X)
        expected, plain = plain_step(expected, plain)
    np.testing.assert_allclose(found["b"], expected["b"], rtol=1e-4, atol=1e-6)
    assert_same_trees((found["w"], found["w ids"]), (PARAMS["w"], params["w ids"]))
    assert metrics.telemetry.uncompressed["w"] == 0
    sent = cgx.explain(train.step, found, state, X, show=False)
    assert max(c.raw_bytes for c in sent.collectives) <= 2 * 4 * 40  # nothing as large as w
    assert {leaf.path: leaf.bytes for leaf in sent.raw} == {"['w']": 0, "['w ids']": 0, "['b']": 160}


def plain_with_holes(optimizer):
    return optimizer.init({"b": PARAMS["b"], "w": optax.MaskedNode(), "w ids": optax.MaskedNode()})


@NESTED
def test_an_axis_for_the_partitioner():
    plan = cgx.Plan(cgx.MaxMin(4, 64), [("up", cgx.Skip())], min_size=0, skip_1d=False)
    train = tensor_parallel(2, plan=plan)
    params, state = train.init(SHARDED)
    for _ in range(5):
        params, state, _ = train.step(params, state, X)
    assert_same_trees(params["up"], SHARDED["up"])
    assert state[0].residuals["up"] is None and state[1][0].trace["up"] == optax.MaskedNode()
    assert state[0].residuals["down"].sharding.spec == P("data", "model")
    assert (params["down"] != SHARDED["down"]).any()


def test_low_rank_adaptation():
    """Everything is frozen except some leaves of any size."""
    params = {"w": normal((30, 8), 1), "lora": {"a": normal((30, 2), 2), "b": jnp.zeros((2, 8)), "scale": jnp.ones(())}}
    loss = lambda p, x: (((x @ p["w"] + x @ p["lora"]["a"] @ p["lora"]["b"]) * p["lora"]["scale"] - 1) ** 2).mean()
    plan = cgx.Plan(cgx.Skip(), [("lora", cgx.MaxMin(4))], min_size=16)
    train = cgx.make_train_step(loss, optax.adam(0.05), mesh_of(4), plan=plan)
    found, state = train.init(params)
    losses = []
    for _ in range(20):
        found, state, metrics = train.step(found, state, X)
        losses.append(metrics.loss)
    assert losses[-1] < 0.8 * losses[0]
    assert_same_trees(found["w"], params["w"])
    kept = jax.tree.map(jnp.shape, state[0].residuals)
    assert kept == {"w": None, "lora": {"a": (4, 30, 2), "b": (4, 2, 8), "scale": None}}
