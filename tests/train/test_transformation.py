"""Tests compress_gradients together with optax's transformations."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from errors import refused
from exchanging import compress, exchange_state
from helpers import assert_close, assert_same_bytes, assert_trees
from training import PARAMS, X, loss_fn, train

import jaxcgx as cgx

pytestmark = pytest.mark.usefixtures("promotion")

CODEC = cgx.MaxMin(4, 64)
RAW, COMPRESS = compress(cgx.Raw()), compress(CODEC)


def test_masked():
    """Some leaves are compressed. The others must be averaged, too."""
    mask = {"w": True, "b": False}
    optimizer = optax.chain(optax.masked(COMPRESS, mask), optax.masked(RAW, {"w": False, "b": True}), optax.sgd(0.5))
    got = train(optimizer, 30)
    same = train(optax.chain(compress(cgx.Plan(CODEC, min_size=100)), optax.sgd(0.5)), 30)
    assert_close(got[0], same[0], rtol=1e-5, atol=1e-6)
    residuals = got[1][0].inner_state.own.residuals
    assert residuals == {"w": residuals["w"], "b": optax.MaskedNode()}
    alone = optax.chain(optax.masked(COMPRESS, mask), optax.sgd(0.5))
    with pytest.raises(ValueError, match="out_specs"):  # the other leaves still differ between ranks
        train(alone, 1)


@pytest.mark.filterwarnings("ignore:DGC")  # of keep=False
def test_inject_hyperparams():
    """All numbers that don't choose codecs or shapes may change from step to step, also without feedback."""

    def make(momentum, beta, weight_decay, reset_every, seed):
        given = dict(beta=beta, weight_decay=weight_decay, reset_every=reset_every, seed=seed)
        return optax.chain(compress(cgx.Momentum(CODEC, momentum, **given)), optax.sgd(0.1))

    changing = optax.piecewise_constant_schedule(0.5, {3: 0.5})
    given = dict(weight_decay=0.25, reset_every=2, seed=3)
    injected = optax.inject_hyperparams(make)(momentum=changing, beta=0.5, **given)
    for steps, same in ((3, True), (4, False)):
        got, expected = train(injected, steps), train(make(0.5, 0.5, **given), steps)
        assert same == all(np.allclose(got[0][name], expected[0][name], rtol=1e-5, atol=1e-6) for name in PARAMS)
    assert {name: float(got[1].hyperparams[name]) for name in ("momentum", "beta")} == {"momentum": 0.25, "beta": 0.5}

    def clipped(seed, clip_norm, learning_rate):
        exchange = cgx.DGC(0.1, seed=seed, keep=False, masking=False, clip_norm=clip_norm)
        return optax.chain(compress(exchange), optax.sgd(learning_rate))

    numbers = dict(seed=3, clip_norm=0.01, learning_rate=0.5)
    got, expected = train(optax.inject_hyperparams(clipped)(**numbers), 2), train(clipped(**numbers), 2)
    assert_close(got[0], expected[0], rtol=1e-5, atol=1e-6)


def test_pmap():
    """As flax users write it: the state is made outside and replicated, and each device then has its own."""
    rows = X.reshape(4, 6, 30)
    of = lambda size: optax.chain(cgx.compress_gradients("data", CODEC, axis_size=size), optax.sgd(0.1))
    optimizer = of(1)
    replicate = lambda tree: jax.tree.map(lambda x: jnp.stack([x] * 4), tree)  # flax.jax_utils.replicate

    def step(params, state, x):
        updates, state = optimizer.update(jax.grad(loss_fn)(params, x), state, params)
        return optax.apply_updates(params, updates), state

    step = jax.pmap(step, axis_name="data", devices=jax.devices()[:4])
    params, state = replicate((PARAMS, optimizer.init(PARAMS)))
    made = jax.pmap(optimizer.init, axis_name="data", devices=jax.devices()[:4])(params)
    assert jax.tree.structure(made) == jax.tree.structure(state)
    assert [x.shape for x in jax.tree.leaves(made)] == [x.shape for x in jax.tree.leaves(state)]
    for _ in range(3):
        params, state = step(params, state, rows)
    expected, _, _ = train(of(4), 3)
    assert_trees(lambda a, b: np.testing.assert_allclose(a[0], b, atol=1e-5), params, expected)
    assert_trees(lambda a: assert_same_bytes(a[1:], a[:-1]), params)
    residuals = exchange_state(state).own.residuals
    assert residuals["w"].shape == (4, 1, 30, 40) and (residuals["w"][0] != residuals["w"][1]).any()
    whole = lambda: step(params, replicate(of(4).init(PARAMS)), rows)
    place = "state .own.residuals['b']"
    refused("compress_gradients", whole, ValueError, place, "float32[4, 40]", "jax.pmap axis_size=1")


def test_optax_maps_over_the_state():
    """Like over parameters, though optax makes the state of a tree without leaves, which no rule fits."""
    plan = cgx.Plan(CODEC, [("w", cgx.MaxMin(4))], min_size=0, skip_1d=False)
    optimizer = optax.chain(compress(plan), optax.adam(1e-2))
    state = optimizer.init(PARAMS)
    found = optax.tree_map_params(optimizer, lambda x: x + 1, state, transform_non_params=lambda x: x)
    assert jax.tree.structure(found) == jax.tree.structure(state)
    np.testing.assert_array_equal(found[1][0].mu["w"], 1 + state[1][0].mu["w"])
    np.testing.assert_array_equal(found[0].own.residuals["w"], 1 + state[0].own.residuals["w"])
    assert found[0].shared.count == 0


def test_without_optax(monkeypatch):
    monkeypatch.setitem(sys.modules, "optax", None)
    refused("compress_gradients", lambda: compress(CODEC), ImportError, "", "", "pip install optax")
