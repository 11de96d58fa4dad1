"""Tests the state per rank: its specs, other numbers of ranks, and checkpoints."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from errors import table
from jax.sharding import PartitionSpec as P
from training import CODEC, PARAMS, STOCHASTIC, X, local_step, loss_fn, mesh_of, on_mesh, place

import jaxcgx as cgx

OPTIMIZER = optax.adagrad(0.1)


def compressed(ranks, exchange=STOCHASTIC, optimizer=OPTIMIZER):
    return optax.chain(cgx.compress_gradients("data", exchange, axis_size=ranks), optimizer)


def train(ranks, params, state, steps, *exchange):
    """Returns (parameters, state, losses) after some more steps with as many ranks."""
    step, losses = on_mesh(local_step(compressed(ranks, *exchange)), state, ranks), []
    params, state = place(params, P(), ranks), place(state, cgx.state_specs(state, "data"), ranks)
    for _ in range(steps):
        params, state, loss = step(params, state, X)
        losses.append(float(loss))
    return params, state, losses


@pytest.mark.short
def test_specs_through_any_nesting():
    exchange = cgx.Momentum(cgx.Plan(CODEC, min_size=100), 0.9)
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0),
        cgx.compress_gradients("data", exchange, axis_size=4),
        optax.MultiSteps(optax.inject_hyperparams(optax.sgd)(learning_rate=0.1), 3).gradient_transformation(),
    )
    state = optimizer.init(PARAMS)
    specs = cgx.state_specs(jax.eval_shape(optimizer.init, PARAMS), "data")
    assert jax.tree.structure(specs) == jax.tree.structure(state)
    rows = {"w": P(("data",)), "b": None}
    assert specs[1].own.residuals == specs[1].own.momentum == rows
    assert set(jax.tree.leaves((specs[0], specs[1].shared, specs[2]))) == {P()}
    assert cgx.state_specs(state, ["node", "local"])[1].own.momentum["w"] == P(("node", "local"))


CLIP = optax.chain(optax.clip(1.0), optax.scale_by_schedule(lambda step: 1.0))
FIRST = cgx.compress_gradients("data", CODEC, axis_size=4)


def specs_of(optimizer):
    return cgx.state_specs((optimizer.init(PARAMS), ()), "data")


ERRORS = {
    "state_specs": [
        (lambda: specs_of(optax.MultiSteps(compressed(4), 2)), ValueError, "opt_state", "it around", "optax.chain("),
        (
            lambda: specs_of(optax.apply_if_finite(compressed(4), 5)),
            ValueError,
            "opt_state",
            "it around",
            "optax.chain(",
        ),
        # Its state would differ between ranks, and no spec would say so.
        (lambda: specs_of(optax.chain(CLIP, optax.trace(0.9), FIRST)), ValueError, "opt_state", "TraceState before it"),
    ],
    "reshard_state": [
        (lambda: cgx.reshard_state(FIRST.init(PARAMS), 0), ValueError, "new_size", "0"),
        (lambda: cgx.reshard_state(FIRST.init(PARAMS), True), TypeError, "new_size", "True"),
    ],
}
test_errors = table(ERRORS)


def test_what_may_stand_before():
    fine = optax.chain(CLIP, FIRST, optax.trace(0.9)).init(PARAMS)
    assert cgx.state_specs((PARAMS, fine), "data")[1][1].own.residuals["w"] == P(("data",))


def test_dtypes_for_other_ranks():
    """Residuals are float32, and momentum has the dtype of its parameters, in JAX's arrays and in NumPy's."""
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), PARAMS)
    state = cgx.compress_gradients("data", cgx.Momentum(CODEC), axis_size=4).init(params)
    for found in state, cgx.reshard_state(state, 3), cgx.reshard_state(jax.tree.map(np.asarray, state), 6):
        assert {x.dtype for x in jax.tree.leaves(found.own.residuals)} == {jnp.dtype("float32")}
        assert {x.dtype for x in jax.tree.leaves(found.own.momentum)} == {jnp.dtype("bfloat16")}


def test_the_same_size_changes_nothing():
    state = train(4, PARAMS, compressed(4).init(PARAMS), 2)[1]
    same, leaves = jax.tree.leaves(cgx.reshard_state(state, 4)), jax.tree.leaves(state)
    assert leaves and all(a is b for a, b in zip(same, leaves, strict=True))


def test_a_resharded_state_shares_no_memory():
    """A step that donates the new state leaves the old one alone."""
    of = lambda ranks: cgx.make_train_step(loss_fn, optax.sgd(0.1, momentum=0.9), mesh_of(ranks), CODEC)
    four, two = of(4), of(2)
    state = four.init(PARAMS)
    new = cgx.reshard_state(state, 2)
    new = place(new, cgx.state_specs(new, "data"), 2)
    two.step(new, X)
    assert all(x.is_deleted() for x in jax.tree.leaves(new)) and not any(x.is_deleted() for x in jax.tree.leaves(state))
