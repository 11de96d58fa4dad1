"""Tests mixed_sync against DCASGD's rule in NumPy, bit for bit, and what it refuses."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from errors import raises, says
from ranks import mesh, whole_numbers

import jaxcgx as cgx

STEPS, RATE, LAMBDA = 6, 0.25, 0.5
PARAMS = {"w": jnp.asarray(whole_numbers((6,), 1))}
X = np.asarray(whole_numbers((STEPS, 8, 6), 3)) / 4


def loss_fn(params, x):
    """A loss with exact gradients."""
    return ((params["w"] - x.mean(0)) ** 2).sum() / 2


@functools.lru_cache
def trained(staleness, **options):
    """Returns the parameters after each step, and the last state."""
    options = dict(compress=cgx.wan.mixed_sync, staleness=staleness, **options)
    train = cgx.make_train_step(loss_fn, optax.sgd(RATE), mesh(4), data_axis="a", **options)
    state, found = list(train.init(PARAMS)), []
    for x in X:
        *state, _ = train.step(*state, x)
        found.append(np.array(state[0]["w"]))
    return found, state[1][0]


@pytest.mark.parametrize("staleness", [1, 2])
def test_the_rule_of_dcasgd(staleness):
    got, _ = trained(staleness, compensation=LAMBDA)
    w, gradients, past = np.array(PARAMS["w"]), [], []
    for t, x in enumerate(X):
        gradients.append(np.float32(w - x.mean(0)))
        past.append(w)
        if t >= staleness:
            g = gradients[t - staleness]
            w = np.float32(w - RATE * (g + LAMBDA * g * g * (w - past[t - staleness])))
        np.testing.assert_allclose(got[t], w, rtol=1e-5)


def test_nothing_is_lost():
    """Everything that has not arrived is pending, or in the residuals of the codec."""
    got, state = trained(1, compensation=0.0, plan=cgx.MaxMin(3))
    gradients = np.stack([w - x.reshape(4, 2, 6).mean(1) for w, x in zip([PARAMS["w"], *got], X)])
    left = np.asarray(state.late.gradients[0]["w"]) + np.asarray(state.exchange.residuals["w"])
    arrived = (np.asarray(PARAMS["w"]) - got[-1]) / RATE
    np.testing.assert_allclose(arrived + left.mean(0), gradients.sum(0).mean(0), atol=1e-4)


@pytest.mark.parametrize("ranks", [2, 8])
def test_what_waits_keeps_its_mean_on_other_ranks(ranks):
    """The next step applies the mean of the pending gradients, for any number of ranks."""
    _, state = trained(1, compensation=0.0)
    waiting = np.asarray(state.late.gradients[0]["w"])
    moved = np.asarray(cgx.reshard_state(state, ranks).late.gradients[0]["w"])
    assert moved.shape == (ranks, *waiting.shape[1:]) and np.abs(waiting.mean(0)).max() > 0.01
    np.testing.assert_allclose(moved.mean(0), waiting.mean(0), rtol=1e-6)


def test_bad_input():
    for options, argument, expected, got in (
        (dict(staleness=0), "staleness", "positive integer", "0"),
        (dict(compensation=-1), "compensation", "number 0", "-1"),
    ):
        with raises(ValueError, says("mixed_sync", argument, expected=expected, got=got)):
            cgx.wan.mixed_sync("a", **options)
    with raises(TypeError, says("mixed_sync", "params", expected="parameters", got="None", remedy="update")):
        cgx.wan.mixed_sync("a", axis_size=4).update(PARAMS, None)
    alone = cgx.wan.mixed_sync("a", axis_size=1)
    one = {"w": jnp.ones((1, 99))}
    expected = says(
        "mixed_sync", "axis_name", expected="several centers along 'a'", got="one", remedy="leave mixed_sync"
    )
    with raises(ValueError, expected):
        jax.vmap(alone.init, axis_name="a")(one)
    state = alone.init({"w": jnp.ones(99)})  # outside of the axis it can't see it
    with raises(ValueError, expected):
        jax.vmap(lambda g: alone.update(g, state, g), axis_name="a")(one)
