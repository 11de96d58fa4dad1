"""Tests PowerSGD in compress_gradients: its factors in the state, in schedules, specs and skipped steps."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_same_bytes, assert_trees, normal
from jax import lax
from jax.sharding import PartitionSpec as P
from training import PARAMS, X, compress_state, loss_fn, mesh_of, train

import jaxcgx as cgx

RANKS = 2
GRADS = {"w": normal((RANKS, 30, 40), 3), "b": normal((RANKS, 40), 4)}
compress = functools.partial(cgx.compress_gradients, "data", axis_size=RANKS)


def run(transformation, steps, state=None):
    """Returns the [(mean, state)] of steps with these gradients, whose leading axis is the rank."""
    state = transformation.init(jax.tree.map(lambda g: g[0], GRADS)) if state is None else state
    specs, found = cgx.state_specs(state, "data"), []
    step = jax.jit(
        jax.shard_map(
            lambda g, s: transformation.update(jax.tree.map(lambda x: x[0], g), s),
            mesh=mesh_of(RANKS),
            in_specs=(P("data"), specs),
            out_specs=(P(), specs),
        )
    )
    for grads in steps:
        mean, state = jax.block_until_ready(step(grads, state))
        found.append((mean, state))
    return found


def test_steps_are_calls_of_the_collective():
    """Residuals and factors go from one step to the next, and telemetry measures the errors."""
    codec = cgx.PowerSGD(2)
    found = run(compress(codec, telemetry=True), [GRADS, GRADS])

    def twice(x):
        x = jax.tree.map(lambda leaf: leaf[0], x)
        first = cgx.compressed_pmean(
            x, "data", codec, residuals=jax.tree.map(jnp.zeros_like, x), factors=cgx.init_factors(x, codec)
        )
        second = cgx.compressed_pmean(x, "data", codec, residuals=first[1], factors=first[2])
        rows = lambda tree: jax.tree.map(lambda leaf: leaf[None], tree)
        return [(mean, rows(lost), factors) for mean, lost, factors in (first, second)]

    expected = jax.jit(
        jax.shard_map(twice, mesh=mesh_of(RANKS), in_specs=P("data"), out_specs=[(P(), P("data"), P())] * 2)
    )(GRADS)
    for (mean, state), (their_mean, lost, factors) in zip(found, expected, strict=True):
        assert_trees(
            functools.partial(np.testing.assert_allclose, atol=1e-5), (mean, state.factors), (their_mean, factors)
        )
        np.testing.assert_allclose(state.residuals["w"], lost["w"], atol=1e-5)
        assert state.residuals["b"] is state.factors["b"] is None
    first = found[0][1]
    np.testing.assert_allclose(
        first.telemetry.vnmse["w"], (expected[0][1]["w"] ** 2).sum() / (GRADS["w"] ** 2).sum(), rtol=1e-4
    )
    assert first.telemetry.bytes == {"w": 4 * 2 * 70, "b": 160}


def test_the_state():
    """Factors are replicated, don't depend on the number of ranks, exist without feedback, and only where needed."""
    state = compress(cgx.PowerSGD(2)).init(PARAMS)
    assert state.factors["w"].shape == (2, 40) and state.factors["b"] is None
    specs = cgx.state_specs(state, "data")
    assert (specs.factors, specs.residuals) == ({"w": P(), "b": None}, {"w": P("data"), "b": None})
    state = state._replace(factors={"w": normal((2, 40)), "b": None})
    three = cgx.reshard_state(state, 3)
    assert three.residuals["w"].shape == (3, 30, 40) and three.factors["w"] is state.factors["w"]
    with pytest.warns(
        UserWarning, match=r"compress_gradients: argument 'feedback': PowerSGD\(rank=2\) may lose too much"
    ):
        forgetful = compress(cgx.PowerSGD(2), feedback=False)
    assert forgetful.init(PARAMS).factors["w"].shape == (2, 40)
    assert compress(cgx.MaxMin(4)).init(PARAMS).factors is None
    assert compress(cgx.PowerSGD(20)).init(PARAMS).factors is None  # not smaller than the leaves


def test_schedules():
    """The rank of the matrices may change. A setting without factors keeps those of the previous one."""
    found = [
        state
        for _, state in run(
            compress({0: cgx.Raw(), 1: cgx.PowerSGD(1), 2: cgx.PowerSGD(3), 3: cgx.MaxMin(4)}), [GRADS] * 4
        )
    ]
    factors = [np.asarray(state.factors["w"]) for state in found]
    assert factors[0].shape == (3, 40) and not factors[0].any()
    assert factors[1][0].any() and not factors[1][1:].any()
    assert np.linalg.matrix_rank(factors[2]) == 3
    assert_same_bytes(factors[3], factors[2])


def test_steps_that_are_skipped():
    bad = GRADS | {"b": GRADS["b"].at[1, 3].set(jnp.inf)}
    (_, before), (mean, after) = run(compress(cgx.PowerSGD(2), skip_nonfinite=True), [GRADS, bad])
    assert np.isfinite(mean["w"]).all() and not np.isfinite(mean["b"]).all()
    assert_trees(assert_same_bytes, (after.residuals, after.factors), (before.residuals, before.factors))


def test_training():
    """Parameters under SGD differ from those without compression by the elements that are not sent yet."""
    rate, steps = 0.5, 30
    params, state, losses = train(optax.chain(compress(cgx.PowerSGD(1), axis_size=4), optax.sgd(rate)), steps)
    expected = train(optax.chain(compress(cgx.Raw(), axis_size=4), optax.sgd(rate)), steps)[2]
    owed = np.asarray(compress_state(state).residuals["w"], np.float64).mean(0)
    assert np.abs(owed).max() > 1e-4 and expected[-1] < 1.01 * losses[-1] < 0.75 * losses[0]
    # Gradients that don't depend on the parameters.
    linear = lambda params, x: (params["w"] * normal((30, 40), 9)).sum() * x.mean()
    params, state, _ = train(
        optax.chain(compress(cgx.PowerSGD(1), axis_size=4), optax.sgd(rate)), 5, loss_fn=linear, x=X
    )
    exact = PARAMS["w"] - 5 * rate * normal((30, 40), 9) * np.asarray(X).reshape(4, -1).mean()
    owed = np.asarray(compress_state(state).residuals["w"], np.float64).mean(0)
    np.testing.assert_allclose(params["w"] - rate * owed, exact, atol=1e-5)


def test_in_a_scan():
    """One program has all steps, and the state is its carry. Under check_vma its types don't change."""
    transformation = compress(cgx.PowerSGD(2))
    state = transformation.init(PARAMS)
    specs = cgx.state_specs(state, "data")

    def steps(grads, state):
        return lax.scan(
            lambda state, _: transformation.update(jax.tree.map(lambda x: x[0], grads), state)[::-1], state, length=3
        )[0]

    state = jax.jit(jax.shard_map(steps, mesh=mesh_of(RANKS), in_specs=(P("data"), specs), out_specs=specs))(
        GRADS, state
    )
    by_hand = run(transformation, [GRADS] * 3)[-1][1]
    assert_trees(functools.partial(np.testing.assert_allclose, atol=1e-5), state, by_hand)


def test_a_step_compiles_once():
    """init places factors where a step puts them, with the same sharding."""
    train = cgx.make_train_step(loss_fn, optax.sgd(0.1), mesh_of(2), plan=cgx.PowerSGD(2))
    params, state = train.init(PARAMS)
    for _ in range(2):
        params, state, _ = train.step(params, state, X)
    assert train.step._cache_size() == 1


def test_three_sums_whatever_the_leaves():
    """Gloo sums one array at a time, so leaves that the codec refuses also travel together."""
    grads = GRADS | {"c": GRADS["b"], "d": GRADS["w"]}
    transformation = compress(cgx.PowerSGD(2))
    state = transformation.init(jax.tree.map(lambda g: g[0], grads))
    specs = cgx.state_specs(state, "data")
    mapped = jax.shard_map(
        transformation.update, mesh=mesh_of(RANKS), in_specs=(P("data"), specs), out_specs=(P(), specs)
    )
    rows = jax.tree.map(lambda g: g.reshape(-1, *g.shape[2:]), grads)
    assert jax.jit(mapped).lower(rows, state).as_text().count("stablehlo.all_reduce") == 3
