"""Tests momentum and weight decay of compress_gradients, and their state."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from compressing import GRADS, RANKS, compress, pmean, run
from errors import says
from helpers import assert_same_trees
from training import CODEC, PARAMS, loss_fn, mesh_of, train

import jaxcgx as cgx


def test_momentum_is_corrected():
    """Every rank sends u = m u + g."""
    found = run(compress(CODEC, momentum=0.5), 3)
    moved, residuals = jax.tree.map(jnp.zeros_like, GRADS), None
    for mean, state in found:
        moved = jax.tree.map(lambda u, g: 0.5 * u + g, moved, GRADS)
        expected, residuals = pmean(CODEC, moved, residuals)
        assert_same_trees((mean, state.residuals, state.momentum), (expected, residuals, moved))


def test_momentum_of_uncompressed_gradients_is_that_of_the_mean():
    found = run(compress(cgx.Raw(), momentum=0.9), 5)
    trace, mean = optax.trace(0.9), jax.tree.map(lambda g: g.mean(0), GRADS)
    state = trace.init(mean)
    for got, _ in found:
        expected, state = trace.update(mean, state)
        for name in got:
            np.testing.assert_allclose(got[name], expected[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("nesterov", [True, False])
def test_momentum_and_weight_decay_of_what_travels_raw_are_the_optimizers(nesterov):
    plan = cgx.Plan(cgx.MaxMin(8), min_size=10**6)
    ours = cgx.compressed(
        optax.sgd(0.1), "data", plan, axis_size=RANKS, momentum=0.9, nesterov=nesterov, weight_decay=0.01
    )
    theirs = optax.chain(
        cgx.compress_gradients("data", plan, axis_size=RANKS),
        optax.add_decayed_weights(0.01),
        optax.sgd(0.1, momentum=0.9, nesterov=nesterov),
    )
    (params, state, _), (expected, _, _) = train(ours), train(theirs)
    for name, p in params.items():
        np.testing.assert_allclose(p, expected[name], rtol=1e-5, atol=1e-6)
        assert state[0].momentum[name] is None and state[0].trace[name].shape == p.shape


def test_momentum_of_what_is_compressed_and_of_what_is_not():
    """This is Nesterov's momentum. Except for the error of 8 bits, it is the momentum of the mean.

    Weight decay is not compressed.
    """
    plan, options = (
        cgx.Plan(cgx.MaxMin(8, 64), min_size=100),
        dict(axis_size=RANKS, momentum=0.9, nesterov=True, weight_decay=0.1),
    )
    params, state, _ = train(cgx.compressed(optax.sgd(0.1), "data", plan, **options), 20)
    expected, _, _ = train(cgx.compressed(optax.sgd(0.1), "data", cgx.Raw(), **options), 20)
    for name, p in params.items():
        np.testing.assert_allclose(p, expected[name], atol=2e-3)
    assert (params["w"] != expected["w"]).any() and state[0].trace["w"].any()
    assert state[0].momentum["b"] is None and state[0].momentum["w"].shape == (RANKS, 30, 40)


def test_an_overflow_does_not_stay_in_the_momentum():
    """Where the mean is not finite, u stays the same, whether or not the next transformations look for overflows."""
    bad = {**GRADS, "b": GRADS["b"].at[2, 7].set(jnp.inf)}
    ((_, before),) = run(compress(CODEC, momentum=0.5))
    ((mean, after),) = run(compress(CODEC, momentum=0.5), 1, bad, before)
    expected = jax.tree.map(lambda u, g, x: jnp.where(jnp.isfinite(x), 0.5 * u + g, u), before.momentum, bad, mean)
    assert not np.isfinite(mean["b"]).any() and np.isfinite(mean["w"]).all()
    assert_same_trees(after.momentum, expected)


def test_momentum_has_the_dtype_of_its_parameters():
    """Gradients may have another dtype."""
    grads = jax.tree.map(lambda g: g.astype(jnp.bfloat16), GRADS)
    ((mean, state),) = run(compress(CODEC, momentum=0.5), 1, grads, compress(CODEC, momentum=0.5).init(PARAMS))
    assert_same_trees(state.momentum, jax.tree.map(lambda g: g.astype(jnp.float32), grads))
    assert_same_trees(mean, pmean(CODEC, grads, jax.tree.map(jnp.zeros_like, GRADS))[0])


@pytest.mark.parametrize("function", ["make_train_step", "state_specs"])
def test_momentum_twice_is_a_warning(function):
    """Elsewhere, a warning is an error."""
    optimizer, options = optax.sgd(0.1, momentum=0.9), dict(plan=cgx.TopK(0.1), momentum=0.9)
    with pytest.warns() as warned:
        if function == "make_train_step":
            cgx.make_train_step(loss_fn, optimizer, mesh_of(2), **options).init(PARAMS)
        else:
            cgx.state_specs(cgx.compressed(optimizer, "data", axis_size=2, **options).init(PARAMS), "data")
    argument = "optimizer" if function == "make_train_step" else "opt_state"
    words = says(function, argument, expected="none momentum", got="optax.trace", remedy="write optax.sgd(rate)")
    words.check(str(warned[0].message))
    assert len(warned) == 1 and warned[0].filename == __file__
