"""Tests Momentum: momentum and weight decay of gradients, and their state."""

import itertools

import jax
import jax.numpy as jnp
import optax
import pytest
from errors import check, says
from exchanging import GRADS, compress, pmean, run
from helpers import assert_same_trees
from training import CODEC, PARAMS, loss_fn, mesh_of

import jaxcgx as cgx


def test_momentum_has_the_dtype_of_its_parameters():
    """Gradients may have another dtype."""
    grads = jax.tree.map(lambda g: g.astype(jnp.bfloat16), GRADS)
    exchange = cgx.Momentum(CODEC, 0.5)
    ((mean, state),) = run(exchange, 1, grads, compress(exchange).init(PARAMS))
    assert_same_trees(state.own.momentum, jax.tree.map(lambda g: g.astype(jnp.float32), grads))
    assert_same_trees(mean, pmean(CODEC, grads, jax.tree.map(jnp.zeros_like, GRADS))[0])


FIRST_MOMENTS = {
    "ScaleByAdamState": [
        optax.adam(0.1),
        optax.adamw(0.1),
        optax.nadam(0.1),
        optax.lamb(0.1),
        optax.contrib.muon(0.1),  # biases get Adam
        optax.chain(optax.clip(1.0), optax.inject_hyperparams(optax.adam)(0.1)),
        optax.partition({"a": optax.adam(0.1), "b": optax.sgd(0.1)}, {"w": "a", "b": "b"}),
    ],
    "ScaleByAmsgradState": [optax.amsgrad(0.1)],
    "ScaleByBeliefState": [optax.adabelief(0.1)],
    "ScaleByLionState": [optax.lion(0.1)],
    "ScaleByNovogradState": [optax.novograd(0.1)],
    "ScaleByAdanState": [optax.adan(0.1)],
    "EmaState": [optax.chain(optax.ema(0.9), optax.sgd(0.1))],
    "ScaleByAdemamixState": [optax.contrib.ademamix(0.1)],
    "ProdigyState": [optax.contrib.prodigy(0.1)],
}


@pytest.mark.parametrize("state", FIRST_MOMENTS)
@jax.numpy_dtype_promotion("standard")  # optax's need it
def test_first_moments_are_momentum_too(state):
    for optimizer, exchange in itertools.product(FIRST_MOMENTS[state], (cgx.DGC(0.1), cgx.BSC(0.1, 100), cgx.MPQ(0.1))):
        with pytest.warns(UserWarning, match=f"make_train_step: argument 'optimizer'.* got {state}.*b1=0") as warned:
            cgx.make_train_step(loss_fn, optimizer, mesh_of(2), exchange).init(PARAMS)
        assert len(warned) == 1


@jax.numpy_dtype_promotion("standard")
def test_first_moments_are_found_without_running_the_optimizer():
    """By the shapes of the parameters alone, also for those of some leaves."""
    large = optax.masked(optax.adam(0.1), lambda params: jax.tree.map(lambda x: x.ndim > 1, params))
    step = lambda optimizer: cgx.make_train_step(loss_fn, optimizer, mesh_of(2), cgx.DGC(0.1))
    for optimizer in optax.adam(0.1), large:
        with pytest.warns(UserWarning, match="got ScaleByAdamState"):
            jax.eval_shape(step(optimizer).init, PARAMS)
    jax.eval_shape(step(optax.chain(optax.add_decayed_weights(1e-4), optax.adam(0.1, b1=0))).init, PARAMS)


@pytest.mark.parametrize(
    "optimizer",
    [
        optax.adam(0.1, b1=0),
        optax.rmsprop(0.1, centered=True),
        optax.adagrad(0.1),
        optax.adafactor(0.1),
        optax.sm3(0.1, momentum=0.0),
        optax.adadelta(0.1),
        optax.sgd(0.1),
    ],
)
@jax.numpy_dtype_promotion("standard")
def test_optimizers_without_momentum(optimizer):
    """A warning would be an error."""
    cgx.make_train_step(loss_fn, optimizer, mesh_of(2), cgx.DGC(0.1)).init(PARAMS)


@pytest.mark.parametrize("function", ["make_train_step", "state_specs"])
def test_momentum_twice_is_a_warning(function):
    """Elsewhere, a warning is an error."""
    optimizer, exchange = optax.sgd(0.1, momentum=0.9), cgx.Momentum(cgx.TopK(0.1))
    with pytest.warns() as warned:
        if function == "make_train_step":
            cgx.make_train_step(loss_fn, optimizer, mesh_of(2), exchange).init(PARAMS)
        else:
            cgx.state_specs(optax.chain(compress(exchange), optimizer).init(PARAMS), "data")
    argument = "optimizer" if function == "make_train_step" else "opt_state"
    words = says(function, argument, got="optax.trace", remedy="write optax.sgd(rate)")
    check(str(warned[0].message), words)
    assert len(warned) == 1 and warned[0].filename == __file__
