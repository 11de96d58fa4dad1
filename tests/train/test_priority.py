"""Tests Priority: its steps are those of plain training, one update later. Also tests `finish`."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from errors import raises, says
from helpers import FULL, assert_same_trees, normal
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from ranks import mesh

import jaxcgx as cgx

BATCHES = np.random.default_rng(0).standard_normal((3, 8, 8)).astype(np.float32)
PARAMS = {name: np.asarray(normal((8, 8), i)) for i, name in enumerate("abc")}
SMALL = dict(min_size=0, fusion_mb=1e-4)
PLAN = cgx.Plan(cgx.MaxMin(4, 16), **SMALL)


def loss(params, x):
    for name in ("b", "c", "a"):  # the order of the names is not the order of use
        x = jnp.tanh(x @ params[name])
    return jnp.mean(x**2)


def with_state(params, state, x):
    return loss(params, x), {"mean": 0.9 * state["mean"] + 0.1 * x.mean(), "count": state["count"] + 1}


def weighted(params, x):
    return loss(params, x) * x.shape[0], jnp.float32(x.shape[0])


def make(exchange=PLAN, loss_fn=loss, optimizer=None, axis_type=AxisType.Auto, params=None, zero=None, **options):
    sharding = cgx.Sharding("a", params=params, optimizer=zero, gather=cgx.MaxMin(8, 16) if zero else cgx.Raw())
    optimizer = optimizer or optax.sgd(0.1, momentum=0.9)
    return cgx.make_train_step(loss_fn, optimizer, mesh(4, axis_type=axis_type), exchange, sharding=sharding, **options)


def train(state=None, finish=True, **options):
    """Returns (the last state, the parameters before each step's update, the metrics of each step)."""
    train = make(**options)
    state, seen, metrics = train.init(PARAMS, state), [], []
    for batch in BATCHES:
        before = jax.tree.map(np.array, state.params)
        state, found = train.step(state, batch)
        seen.append(jax.tree.map(np.array, state.params) if options.get("overlap") else before)
        metrics.append(found)
    return train.finish(state) if finish else state, seen, metrics


STATE = {"mean": np.float32(0), "count": np.int32(0)}
SHARDED = dict.fromkeys("abc", P("a"))
STOCHASTIC = cgx.Plan(cgx.MaxMin(4, 16, rounding="stochastic"), **SMALL)
MOVED = cgx.Momentum(PLAN, 0.9, weight_decay=0.01, skip_nonfinite=True)
CASES = {
    "raw": dict(exchange=cgx.Plan(cgx.Raw(), **SMALL)),
    "feedback": dict(),
    "noise": dict(exchange=cgx.Feedback(STOCHASTIC, keep=False)),
    "Eden": dict(exchange=cgx.Plan(cgx.Eden(4, 128), **SMALL)),
    "Micro": dict(exchange=cgx.Plan(cgx.Micro("mxfp4"), **SMALL)),
    "PowerSGD": dict(exchange=cgx.Plan(cgx.PowerSGD(2), **SMALL)),
    "DGT": dict(exchange=cgx.wan.Differential(PLAN, k=0.5, block_bytes=64)),
    "MixedSync": dict(exchange=cgx.wan.MixedSync(PLAN)),
    "momentum": dict(exchange=MOVED, optimizer=optax.adamw(0.01, b1=0)),
    "coupled": dict(optimizer=optax.chain(optax.clip_by_global_norm(0.1), optax.adam(0.1))),
    "dgc": dict(exchange=cgx.DGC(0.1, fusion_mb=1e-4), optimizer=optax.sgd(0.1)),
    "schedule": dict(exchange={0: cgx.Raw(), 1: PLAN, 2: cgx.Plan(cgx.MaxMin(8, 16), **SMALL)}),
    "model state": dict(loss_fn=with_state, model_state="mean", state=STATE, accumulate=2),
    "weighted": dict(exchange=cgx.Feedback(PLAN, telemetry=True), loss_fn=weighted, weighted=True, donate=False),
    "frozen": dict(exchange=cgx.Plan(cgx.MaxMin(4, 16), rules=[("c", cgx.Skip())], **SMALL)),
    "parameters in shards": dict(params=SHARDED),
    "state in shards": dict(zero=SHARDED),
}


# Of codecs alone, that of "feedback" and "noise" are enough by default.
@pytest.mark.parametrize("case", [case for case in CASES if FULL or case not in ("Eden", "Micro")])
def test_the_bits_are_those_of_the_plain_step(case):
    with jax.numpy_dtype_promotion("standard"):  # adam needs it
        plain, plain_seen, plain_metrics = train(**CASES[case])
        late, seen, metrics = train(overlap=cgx.Priority(slice_elements=20), **CASES[case])
    assert_same_trees(late, plain)
    assert_same_trees((seen, [m.loss for m in metrics]), (plain_seen, [m.loss for m in plain_metrics]))
    if metrics[1].telemetry is not None:
        assert_same_trees([m.telemetry for m in metrics[1:]], [m.telemetry for m in plain_metrics[:-1]])


def test_what_is_pending():
    """A plain step refuses it."""
    state, *_ = train(finish=False, overlap=cgx.Priority(), donate=False)
    assert state.pending.grads["a"].shape == (4, 8, 8) and state.pending.ticket is None
    assert state.pending.order == (0, 2, 1)  # the last layer is ready first
    with raises(ValueError, says("train.step", "state", got="one whose gradients", remedy="finish")):
        make().step(state, BATCHES[1])


def test_after_finish_a_state_is_like_a_fresh_one():
    step = make(overlap=cgx.Priority())
    first, _ = step.step(step.init(PARAMS), BATCHES[0])
    left = step.finish(step.step(first, BATCHES[1])[0])
    assert jax.tree.structure(left) == jax.tree.structure(step.init(PARAMS))
    _, metrics = step.step(left, BATCHES[2])  # training continues
    np.testing.assert_array_equal(metrics.loss, train()[2][2].loss)
    assert step.step._cache_size() == 2  # without pending gradients, and with them


def test_finish_says_nothing_of_what_it_drops():
    # Without residuals, no leaf of the state has the shape of pending gradients. JAX checks shardings on Explicit
    # meshes.
    step = make(cgx.Raw(), optimizer=optax.sgd(0.1), axis_type=AxisType.Explicit, overlap=cgx.Priority())
    state, _ = step.step(step.init(PARAMS), BATCHES[0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step.finish(state)
