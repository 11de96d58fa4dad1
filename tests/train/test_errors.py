"""Tests what exchanges and compress_gradients refuse."""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest
from errors import table
from exchanging import GRADS, RANKS, compress, pmean, run
from helpers import assert_same_trees
from training import CODEC, PARAMS, STOCHASTIC, mesh_of

import jaxcgx as cgx

VALUE, TYPE = ValueError, TypeError


def in_step(exchange, update=lambda t, g: t.update(g, t.init(g))[0], **options):
    """Traces a step of an exchange on a mesh."""
    step = functools.partial(update, cgx.compress_gradients("data", exchange, **options))
    specs = jax.sharding.PartitionSpec()
    jax.eval_shape(jax.shard_map(step, mesh=mesh_of(2), in_specs=specs, out_specs=specs, check_vma=False), PARAMS)


RING = cgx.Plan(cgx.MaxMin(4), schedule="ring")


@pytest.mark.parametrize("exchange", [cgx.Feedback(RING, keep=False), cgx.Plan(cgx.Raw(), schedule="ring")], ids=str)
def test_rings_that_lose_nothing_of_a_ranks_own(exchange):
    in_step(exchange)


def test_numbers_are_parameters_and_gradients_too():
    assert compress(CODEC).init(1.0).own.residuals.shape == (RANKS,)
    state = compress(CODEC, 1).init({"w": 1.0})
    step = lambda _: cgx.compress_gradients("data", CODEC).update({"w": 2.0}, state)[0]["w"]
    assert jax.vmap(step, axis_name="data")(jnp.zeros(1)) == 2


WIDE = {**PARAMS, "w": jnp.zeros((30, 41))}
KERNEL = cgx.Plan(CODEC, [("kernel", cgx.Raw())])
SKIPS = {0: CODEC, 3: cgx.Plan(CODEC, [("b", cgx.Skip())], min_size=0)}
DECAY = cgx.DGC(weight_decay=0.1, weight_decay_mask={"x": True})
ADAM = optax.adam(1e-3).init(PARAMS)
AS_NNX = {"opt_state": {0: vars(compress(CODEC).init(PARAMS))}}  # as nnx.state has it
ROWS_OF_B, FORGETFUL = "state .own.residuals['b']", cgx.Feedback(cgx.MaxMin(4), keep=False)
decay = lambda transformation, g: transformation.update(g, transformation.init(g), g)[0]
unplaced = lambda: cgx.compress_gradients("data", CODEC).init(PARAMS)
half = lambda state: jax.tree.map(lambda x: x.astype(jnp.bfloat16) if x.dtype == jnp.float32 else x, state)


def of_adam():
    update = lambda w: compress(CODEC).update(w, optax.adam(1e-3).init(w))
    jax.vmap(update, axis_name="data")(PARAMS["w"])


def of_reduced_gradients():
    specs, transformation = jax.sharding.PartitionSpec(), cgx.compress_gradients("data", cgx.DGC())
    step = lambda g: transformation.update(g, transformation.init(g))[0]
    jax.shard_map(step, mesh=mesh_of(2), in_specs=specs, out_specs=specs)(PARAMS)


def from_state(exchange=CODEC, params=PARAMS, ranks=RANKS, change=lambda state: state):
    """Goes on with CODEC from a state that another exchange or other parameters made."""
    run(CODEC, 1, state=change(compress(exchange, ranks).init(params)))


ERRORS = {
    "Feedback": [
        (lambda: in_step(cgx.Feedback(RING)), VALUE, "plan", '"ring"', "keep=False"),
        (lambda: in_step(cgx.Feedback(RING, keep=False, telemetry=True)), VALUE, "plan", '"ring"', "keep=False"),
        (lambda: compress(cgx.Feedback(SKIPS)).init(PARAMS), VALUE, "plan ['b']"),
    ],
    "DGC": [
        (lambda: in_step(cgx.DGC(weight_decay=0.1)), VALUE, "params", "None", "update(gradients"),
        (lambda: in_step(DECAY, update=decay), VALUE, "weight_decay_mask", "{'x': True}"),
        (of_reduced_gradients, VALUE, "grads ['b']", "", "jaxcgx.value_and_grad(loss_fn, axis_name, None)"),
        # It chooses codecs, so it can't be traced.
        (lambda: jax.jit(lambda ratio: cgx.DGC(ratio).init(PARAMS))(0.1), TYPE, "ratio"),
    ],
    "compress_gradients": [
        (lambda: in_step(RING), VALUE, "exchange", '"ring"', "keep=False"),
        (lambda: in_step({0: cgx.Raw(), 5: RING}), VALUE, "exchange", '"ring"', "keep=False"),
        (lambda: in_step(cgx.Plan({"node": CODEC})), VALUE, "exchange", "{'node'"),
        (lambda: compress(KERNEL).init(PARAMS), VALUE, "exchange", "none", "'kernel'"),
        (lambda: compress(SKIPS).init(PARAMS), VALUE, "exchange ['b']"),
        (unplaced, VALUE, "axis_size", "None", "jax.set_mesh jax.shard_map jax.pmap axis_size=1"),
        (lambda: compress(CODEC).update(PARAMS, compress(CODEC).init(PARAMS)), VALUE, "mesh", "jax.shard_map"),
        (lambda: compress(CODEC).init({"w": "big"}), TYPE, "params ['w']", "'big'"),
        (lambda: in_step(CODEC, order=[1]), VALUE, "order", "[1]", "jaxcgx.backward_order"),
        (of_adam, TYPE, "state", "tuple"),
        (lambda: from_state(cgx.Plan(CODEC, min_size=100)), VALUE, ROWS_OF_B, "None"),
        (lambda: from_state(FORGETFUL), VALUE, "state", "one without .own.residuals['b']", "plan"),
        (lambda: from_state(cgx.Momentum(CODEC)), VALUE, "state", "one without .own.momentum", "plan"),
        (lambda: from_state(params=WIDE), VALUE, "state .own.residuals['w']", "float32[1, 30, 41]"),
        (lambda: from_state(ranks=2 * RANKS), VALUE, ROWS_OF_B, "float32[2, 40]", "jaxcgx.reshard_state"),
        (lambda: from_state(change=half), VALUE, ROWS_OF_B, "bfloat16[1, 40]"),
    ],
    # Without the error, all of the tree would seem replicated.
    "state_specs": [
        (lambda: cgx.state_specs(ADAM, "data"), TYPE, "opt_state", "a ", "nnx.Optimizer"),
        (lambda: cgx.state_specs(AS_NNX, "data"), TYPE, "opt_state", "a ", "nnx.Optimizer"),
        (lambda: cgx.state_specs(PARAMS, "data"), TYPE, "opt_state", "a ", "nnx.Optimizer"),
    ],
}
test_errors = table(ERRORS)


def test_a_state_fits_any_plan_that_compresses_the_same_leaves():
    """Residuals are gradients, whatever the codec. Noise and schedules continue from the same step."""
    ((_, state),) = run(cgx.Feedback({0: cgx.Raw(), 1: CODEC}, seed=5))
    ((_, state),) = run(CODEC, 1, state=state)
    key = jax.random.fold_in(jax.random.key(5, impl="threefry2x32"), 2)
    ((mean, after),) = run(STOCHASTIC, 1, GRADS, state)
    assert_same_trees((mean, after.own.residuals), pmean(STOCHASTIC, residuals=state.own.residuals, key=key))
    assert after.shared.count == 3
