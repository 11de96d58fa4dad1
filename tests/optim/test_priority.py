"""Tests overlap="priority": its steps are those of plain training, one update later. Also tests `finish`."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from errors import raises, says
from helpers import assert_same_trees, assert_trees
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from ranks import mesh

import jaxcgx as cgx
from jaxcgx.optim.halves import Halves
from jaxcgx.optim.priority import InFlight

BATCHES = np.random.default_rng(0).standard_normal((3, 8, 8)).astype(np.float32)
PARAMS = {name: np.asarray(jax.random.normal(jax.random.key(i), (8, 8))) for i, name in enumerate("abc")}
PLAN = cgx.Plan(cgx.MaxMin(4, 16), min_size=0)


def loss(params, x):
    for name in ("b", "c", "a"):  # the order of the names is not the order of use
        x = jnp.tanh(x @ params[name])
    return jnp.mean(x**2)


def with_state(params, state, x):
    return loss(params, x), {"mean": 0.9 * state["mean"] + 0.1 * x.mean(), "count": state["count"] + 1}


def weighted(params, x):
    return loss(params, x) * x.shape[0], jnp.float32(x.shape[0])


def make(loss_fn=loss, optimizer=None, **options):
    if "compress" not in options:
        options = {"plan": PLAN, **options}
    return cgx.make_train_step(loss_fn, optimizer or optax.sgd(0.1, momentum=0.9), mesh(4), data_axis="a", **options)


def train(given=(), finish=True, **options):
    """Returns (the last state, the parameters before each step's update, the metrics of each step)."""
    train = make(**options)
    state, seen, metrics = train.init(PARAMS, *given), [], []
    for batch in BATCHES:
        before = jax.tree.map(np.array, state[0])
        *state, found = train.step(*state, batch)
        seen.append(jax.tree.map(np.array, state[0]) if options.get("overlap") else before)
        metrics.append(found)
    return train.finish(*state) if finish else state, seen, metrics


STATE = {"mean": np.float32(0), "count": np.int32(0)}
SHARDED = dict.fromkeys("abc", P("a"))
CASES = {
    "raw": dict(plan=cgx.Raw()),
    "feedback": dict(),
    "noise": dict(plan=cgx.Plan(cgx.MaxMin(4, 16, rounding="stochastic"), min_size=0), feedback=False),
    "Eden": dict(plan=cgx.Plan(cgx.Eden(4, 128), min_size=0)),
    "Micro": dict(plan=cgx.Plan(cgx.Micro("mxfp4"), min_size=0)),
    "PowerSGD": dict(plan=cgx.Plan(cgx.PowerSGD(2), min_size=0)),
    "DGT": dict(compress=cgx.wan.Differential(k=0.5, block_bytes=64), plan=PLAN),
    "momentum": dict(momentum=0.9, weight_decay=0.01, skip_nonfinite=True, optimizer=optax.adamw(0.01)),
    "coupled": dict(optimizer=optax.chain(optax.clip_by_global_norm(0.1), optax.adam(0.1))),
    "dgc": dict(compress=cgx.dgc, ratio=0.1, optimizer=optax.sgd(0.1)),
    "schedule": dict(plan={0: cgx.Raw(), 1: PLAN, 2: cgx.Plan(cgx.MaxMin(8, 16), min_size=0)}),
    "model state": dict(loss_fn=with_state, model_state="mean", state=(STATE,), accumulate=2),
    "weighted": dict(loss_fn=weighted, weighted=True, telemetry=True, donate=False),
    "frozen": dict(plan=cgx.Plan(cgx.MaxMin(4, 16), rules=[("c", cgx.Skip())], min_size=0)),
    "parameters in shards": dict(param_specs=SHARDED),
    "state in shards": dict(optimizer_specs=SHARDED, gather=cgx.MaxMin(8, 16)),
}


@pytest.mark.parametrize("case", CASES)
def test_the_bits_are_those_of_the_plain_step(case):
    options = {"fusion_mb": 1e-4, **CASES[case]}
    state = options.pop("state", ())
    with jax.numpy_dtype_promotion("standard"):  # adam needs it
        check(state, options)


def check(state, options):
    plain, plain_seen, plain_metrics = train(given=state, **options)
    late, seen, metrics = train(given=state, overlap="priority", slice_elements=20, **options)
    assert_same_trees((late[:-1], late[-1][:-1]), (plain[:-1], plain[-1]))
    assert_same_trees((seen, [m.loss for m in metrics]), (plain_seen, [m.loss for m in plain_metrics]))
    if options.get("telemetry"):
        assert_same_trees([m.telemetry for m in metrics[1:]], [m.telemetry for m in plain_metrics[:-1]])


def test_reshard_keeps_what_is_pending():
    (_, opt_state), *_ = train(finish=False, overlap="priority", plan=cgx.Raw(), donate=False)
    rows = opt_state[-1].gradients
    assert rows["a"].shape == (4, 8, 8) and cgx.state_specs(opt_state, "a")[-1].gradients["a"] == P("a")
    moved = cgx.reshard_state(opt_state, 2)
    assert_trees(lambda x, y: np.testing.assert_allclose(x.mean(0), y.mean(0), rtol=1e-5), moved[-1].gradients, rows)
    assert moved[-1].gradients["a"].shape == (2, 8, 8)
    sent = InFlight([], jnp.float32(0), Halves(None, None, [], None))
    with raises(
        ValueError,
        says("reshard_state", "opt_state", expected="arrived", got="one whose gradients", remedy="train.finish"),
    ):
        cgx.reshard_state((*opt_state[:-1], sent), 2)


def test_after_finish_a_state_is_like_a_fresh_one():
    step = make(overlap="priority")
    fresh = step.init(PARAMS)
    first = [*step.step(*fresh, BATCHES[0])][:2]
    left = step.finish(*step.step(*first, BATCHES[1])[:2])
    assert jax.tree.structure(left) == jax.tree.structure(step.init(PARAMS))
    *_, metrics = step.step(*left, BATCHES[2])  # training continues
    np.testing.assert_array_equal(metrics.loss, train()[2][2].loss)
    assert step.step._cache_size() == 2  # without pending gradients, and with them


def test_finish_says_nothing_of_what_it_drops():
    # Without residuals, no leaf of the state has the shape of pending gradients. JAX checks shardings on Explicit
    # meshes.
    explicit = mesh(4, axis_type=AxisType.Explicit)
    step = cgx.make_train_step(loss, optax.sgd(0.1), explicit, data_axis="a", overlap="priority", plan=cgx.Raw())
    state = step.step(*step.init(PARAMS), BATCHES[0])[:2]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step.finish(*state)


def test_a_plain_step_refuses_what_is_pending():
    step = make(overlap="priority")
    state = step.step(*step.init(PARAMS), BATCHES[0])[:2]
    words = says("train.step", "opt_state", expected="arrived", got="one whose gradients", remedy="finish")
    with raises(ValueError, words):
        make().step(*state, BATCHES[1])


def test_what_it_refuses():
    for overlap in (None, "backward"):
        with raises(
            ValueError, says("make_train_step", "slice_elements", expected=f"None overlap={overlap!r}", got="9")
        ):
            make(overlap=overlap, slice_elements=9)
    with raises(ValueError, says("make_train_step", "slice_elements", expected="positive integer", got="0")):
        make(overlap="priority", slice_elements=0)
    for overlap in ("backward", "priority"):
        with raises(ValueError, says("make_train_step", "overlap", expected="compress=demo", got=repr(overlap))):
            make(compress=cgx.wan.demo, overlap=overlap)
    with raises(ValueError, says("make_train_step", "overlap", expected="'backward' 'diloco'", got="'priority'")):
        sgd = optax.sgd(0.1)
        centers = jax.make_mesh((2, 2), ("dc", "local"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
        how = cgx.wan.diloco(sgd, every=2)
        cgx.make_train_step(loss, sgd, centers, data_axis=("dc", "local"), diloco=how, overlap="priority")
