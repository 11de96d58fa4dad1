"""Tests plans that skip parameters. They are frozen, and no part of a step touches them."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from exchanging import GRADS, exchange_state
from exchanging import run as run_exchange
from helpers import assert_same_trees
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from steps import run, tensor_parallel
from training import NESTED, PARAMS, SHARDED, X, loss_fn

import jaxcgx as cgx

pytestmark = pytest.mark.usefixtures("promotion")


def test_an_exchange():
    """Means are zeros, also with momentum and weight decay, and there is no state."""
    plan = cgx.Plan(cgx.TopK(0.5), [("w", cgx.Skip())], min_size=0, skip_1d=False)
    everything = dict(masking=True, weight_decay=0.1, beta=0.5, telemetry=True)
    ones = jax.tree.map(lambda g: jnp.ones(g.shape[1:]), GRADS)
    for mean, state in run_exchange(cgx.Momentum({0: plan, 5: plan}, 0.9, **everything), 2, params=ones):
        own, shared = (found := exchange_state(state)).own, found.shared
        assert not mean["w"].any() and mean["b"].any()
        for field in (own.residuals, own.momentum, shared.trace):
            assert field["w"] is None and field["b"] is not None
        sent = shared.telemetry
        assert sent.bytes["w"] == sent.uncompressed["w"] == 0 < sent.bytes["b"]


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

    train = cgx.make_train_step(loss, optimizer, mesh, cgx.Feedback(plan, telemetry=True), accumulate=2)
    expected, plain = {"b": params["b"]}, optimizer.init({"b": params["b"]})

    @jax.jit
    def plain_step(params, state):
        grads = jax.grad(lambda p: loss_fn({**PARAMS, **p}, X))(params)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    state = train.init(params)
    assert jax.tree.leaves(state.exchange.own.residuals) == []
    assert jax.tree.map(jnp.shape, state.opt_state) == jax.tree.map(jnp.shape, plain_with_holes(optimizer))
    for _ in range(3):
        state, metrics = train.step(state, X)
        expected, plain = plain_step(expected, plain)
    np.testing.assert_allclose(state.params["b"], expected["b"], rtol=1e-4, atol=1e-6)
    assert_same_trees((state.params["w"], state.params["w ids"]), (PARAMS["w"], params["w ids"]))
    assert metrics.telemetry.uncompressed["w"] == 0
    sent = cgx.explain(train.step, state, X, show=False)
    assert max(c.raw_bytes for c in sent.collectives) <= 2 * 4 * 40  # nothing as large as w
    assert {leaf.path: leaf.bytes for leaf in sent.raw} == {"['w']": 0, "['w ids']": 0, "['b']": 160}


def plain_with_holes(optimizer):
    return optimizer.init({"b": PARAMS["b"], "w": None, "w ids": None})


@NESTED
def test_an_axis_for_the_partitioner():
    plan = cgx.Plan(cgx.MaxMin(4, 64), [("up", cgx.Skip())], min_size=0, skip_1d=False)
    state, _ = run(tensor_parallel(plan, 2), 5, SHARDED)
    residuals, trace = state.exchange.own.residuals, state.opt_state[0].trace
    assert_same_trees(state.params["up"], SHARDED["up"])
    assert residuals["up"] is None and trace["up"] is None
    assert residuals["down"].sharding.spec == P("data", "model")
    assert (state.params["down"] != SHARDED["down"]).any()
