"""Tests MixedSync against DCASGD's rule in NumPy, bit for bit, and what it refuses."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from errors import table
from ranks import mesh, whole_numbers

import jaxcgx as cgx

STEPS, RATE, LAMBDA = 6, 0.25, 0.5
PARAMS = {"w": jnp.asarray(whole_numbers((6,), 1))}
X = np.asarray(whole_numbers((STEPS, 8, 6), 3)) / 4


def loss_fn(params, x):
    """A loss with exact gradients."""
    return ((params["w"] - x.mean(0)) ** 2).sum() / 2


@functools.lru_cache
def trained(exchange):
    """Returns the parameters after each step, and the last state of the exchange."""
    train = cgx.make_train_step(loss_fn, optax.sgd(RATE), mesh(4), exchange, sharding=cgx.Sharding("a"))
    state, found = train.init(PARAMS), []
    for x in X:
        state, _ = train.step(state, x)
        found.append(np.array(state.params["w"]))
    return found, state.exchange


@pytest.mark.parametrize("staleness", [1, 2])
def test_the_rule_of_dcasgd(staleness):
    got, _ = trained(cgx.wan.MixedSync(cgx.Raw(), staleness=staleness, compensation=LAMBDA))
    w, gradients, past = np.array(PARAMS["w"]), [], []
    for t, x in enumerate(X):
        gradients.append(np.float32(w - x.mean(0)))
        past.append(w)
        if t >= staleness:
            g = gradients[t - staleness]
            w = np.float32(w - RATE * (g + LAMBDA * g * g * (w - past[t - staleness])))
        np.testing.assert_allclose(got[t], w, rtol=1e-5)


@pytest.mark.parametrize("ranks", [2, 8])
def test_what_waits_keeps_its_mean_on_other_ranks(ranks):
    """The next step applies the mean of the pending gradients, for any number of ranks."""
    _, state = trained(cgx.wan.MixedSync(cgx.Raw(), compensation=0.0))
    waiting = np.asarray(state.own.grads[0]["w"])
    moved = np.asarray(cgx.reshard_state(state, ranks).own.grads[0]["w"])
    assert moved.shape == (ranks, *waiting.shape[1:]) and np.abs(waiting.mean(0)).max() > 0.01
    np.testing.assert_allclose(moved.mean(0), waiting.mean(0), rtol=1e-6)


def test_an_exchange_inside_may_be_early():
    """Two exchanges that are one step late are one that is two steps late."""
    late = functools.partial(cgx.wan.MixedSync, compensation=0.0)
    (twice, _), (once, _) = trained(late(late(cgx.Raw()))), trained(late(cgx.Raw(), staleness=2))
    np.testing.assert_array_equal(twice, once)
    assert (once[2] != once[1]).any()


LATE = cgx.compress_gradients("a", cgx.wan.MixedSync(cgx.Raw()), axis_size=1)


def update(size, params):
    """Does a step of `size` ranks."""
    state = LATE.init({"w": jnp.ones(99)})
    jax.vmap(lambda g: LATE.update(g, state, params), axis_name="a")({"w": jnp.ones((size, 99))})


BAD_INPUT = {
    "MixedSync": [
        (lambda: update(4, None), TypeError, "params", "None", "update"),
        (lambda: update(1, {"w": jnp.ones(99)}), ValueError, "axis", "one", "leave"),
    ]
}
test_bad_input = table(BAD_INPUT)
