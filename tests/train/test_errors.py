"""Tests what exchanges and compress_gradients refuse."""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest
from errors import raises, refused, rows, says
from exchanging import GRADS, RANKS, compress, pmean, run
from helpers import assert_same_trees
from training import CODEC, PARAMS, STOCHASTIC, mesh_of

import jaxcgx as cgx
from jaxcgx.transports.xla import Axes

FEEDBACK, MOMENTUM = functools.partial(cgx.Feedback, CODEC), functools.partial(cgx.Momentum, CODEC)
MASKED = functools.partial(cgx.Momentum, cgx.TopK(), masking=True)
COMPRESS = lambda axis="data", exchange=CODEC, **options: cgx.compress_gradients(axis, exchange, **options)
VALUE, TYPE = ValueError, TypeError


# (the argument at fault, the class of the error, a call); and for a class, the calls with bad values of each argument.
@pytest.mark.parametrize(
    ("make", "argument", "error", "values"),
    [
        (cgx.Feedback, "plan", TYPE, [4, {"data": 4}, {0: CODEC, 9: "raw"}]),
        (cgx.Feedback, "plan", VALUE, [{5: CODEC}, {0: CODEC, -1: CODEC}, {0: CODEC, "data": CODEC}]),
        (FEEDBACK, "keep", TYPE, [1]),
        (FEEDBACK, "telemetry", TYPE, ["yes"]),
        (FEEDBACK, "skip_nonfinite", TYPE, [None]),
        (FEEDBACK, "seed", TYPE, ["a", 0.5]),
        (FEEDBACK, "beta", VALUE, [0, 2, jnp.float32(-0.5)]),
        (FEEDBACK, "beta", TYPE, ["1", jnp.zeros(2)]),
        (FEEDBACK, "reset_every", VALUE, [0]),
        (FEEDBACK, "reset_every", TYPE, [2.5]),
        (functools.partial(FEEDBACK, beta=0.5), "keep", VALUE, [False]),
        (functools.partial(FEEDBACK, reset_every=5), "keep", VALUE, [False]),
        (MOMENTUM, "momentum", VALUE, [1.0, -0.1, jnp.float32(1)]),
        (MOMENTUM, "nesterov", TYPE, [1]),
        (MOMENTUM, "weight_decay", VALUE, [-1]),
        (MOMENTUM, "weight_decay_mask", VALUE, [True]),
        (MOMENTUM, "masking", VALUE, [True]),
        (functools.partial(cgx.Momentum, cgx.TopK(1)), "masking", VALUE, [True]),  # it sends every element
        (MASKED, "keep", VALUE, [False]),
        (cgx.DGC, "ratio", VALUE, [0, 1]),
        (cgx.DGC, "ratio", TYPE, ["1%", jnp.float32(0.1)]),
        (cgx.DGC, "values", VALUE, [cgx.PowerSGD(2)]),
        (cgx.DGC, "select", VALUE, ["random"]),
        (cgx.DGC, "pull", VALUE, ["some"]),
        (cgx.DGC, "min_size", VALUE, [-1]),
        (cgx.DGC, "skip_1d", TYPE, [0]),
        (cgx.DGC, "clip_norm", VALUE, [0]),
        (cgx.DGC, "clip_value", TYPE, ["a"]),
        (cgx.DGC, "momentum", VALUE, [1]),
        (cgx.DGC, "warm_up", TYPE, [{0: 0.1}]),
        (functools.partial(cgx.WarmUp, steps_per_epoch=1), "epochs", VALUE, [-1, 0]),
        (functools.partial(cgx.WarmUp, 4), "steps_per_epoch", TYPE, [None]),
        (functools.partial(cgx.WarmUp, 1, 9), "coeff", VALUE, [[2], [0.1, 0.1]]),
        (cgx.BSC, "threshold", VALUE, [2, 0]),
        (cgx.BSC, "size_bound", VALUE, [-1]),
        (cgx.BSC, "beta", VALUE, [2]),
        (cgx.MPQ, "threshold", VALUE, [0]),
        (COMPRESS, "exchange", TYPE, [None, "MaxMin", cgx.DGC, optax.sgd(0.1)]),
        (COMPRESS, "axis_name", TYPE, [("data", Axes(("data",))), mesh_of(2)]),
        (COMPRESS, "axis_name", VALUE, [None, jnp.zeros(2)]),
        (COMPRESS, "axis_size", VALUE, [0]),
        (COMPRESS, "order", VALUE, [[1], [0, 2], 3]),
    ],
)
def test_bad_arguments(make, argument, error, values):
    kind = getattr(make, "func", make)
    function = "compress_gradients" if kind is COMPRESS else kind.__name__
    name = "axis" if argument == "axis_name" else argument
    for value in values:
        with raises(error, says(function, argument, expected="")):
            make(**{name: value})


def test_fields_that_no_exchange_has():
    """These are Python's own errors. A ratio chooses codecs, so it can't be traced."""
    for make in (
        lambda: cgx.DGC(0.1, plan=CODEC),
        lambda: cgx.BSC(ratio=0.1),
        lambda: cgx.Feedback(CODEC, fedback=True),
    ):
        with pytest.raises(TypeError, match="unexpected keyword"):
            make()
    with raises(TypeError, says("DGC", "ratio", expected="number 0 1")):
        jax.jit(lambda ratio: cgx.DGC(ratio).init(PARAMS))(0.1)


def in_step(exchange, axes=("data",), sizes=(2,), update=lambda t, g: t.update(g, t.init(g))[0]):
    """Traces a step of an exchange on a mesh."""
    types = (jax.sharding.AxisType.Auto,) * len(axes)
    mesh = jax.make_mesh(
        sizes, axes, axis_types=types, devices=jax.devices()[: sum(sizes)][: jnp.prod(jnp.array(sizes))]
    )
    step = functools.partial(update, cgx.compress_gradients(axes, exchange))
    specs = jax.sharding.PartitionSpec()
    jax.eval_shape(jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=specs, check_vma=False), PARAMS)


RING = cgx.Plan(CODEC, schedule="ring")
CROSSED = cgx.Plan.from_env(("cross", "inner"), {"CGX_COMPRESSION_QUANTIZATION_BITS": "4"})
NO_RING = dict(expected='schedule "two_shot" "one_shot"', got='"ring"', remedy="keep=False")


@pytest.mark.parametrize(
    ("exchange", "axes", "words"),
    [
        (RING, ("data",), dict(NO_RING)),
        (cgx.Feedback(RING, keep=False, telemetry=True), ("data",), dict(NO_RING)),
        ({0: cgx.Raw(), 5: RING}, ("data",), dict(NO_RING)),
        (CROSSED, ("cross", "inner"), dict(NO_RING)),
        (cgx.Plan({"node": CODEC}), ("data",), dict(expected="codec 'data'", got="{'node'")),
        (cgx.Plan(CODEC, [("w", {"node": CODEC, "data": CODEC})]), ("data",), dict(expected="codec 'data'")),
        (cgx.Plan(CODEC, schedule={"node": "two_shot"}), ("data",), dict(expected="schedule 'data'")),
    ],
    ids=["ring", "telemetry", "schedule", "CGX's", "axis of a codec", "axis of a rule", "axis of a schedule"],
)
def test_plans_that_do_not_fit_the_ranks(exchange, axes, words):
    with raises(ValueError, says("Feedback", "plan", at=words.pop("at", ""), **words) if axes else None):
        in_step(exchange, axes, (2,) * len(axes))


@pytest.mark.parametrize("exchange", [cgx.Feedback(RING, keep=False), cgx.Plan(cgx.Raw(), schedule="ring")], ids=str)
def test_rings_that_lose_nothing_of_a_ranks_own(exchange):
    in_step(exchange)


def test_steps():
    with raises(ValueError, says("DGC", "params", expected="'weight_decay'", got="None", remedy="update(gradients")):
        in_step(cgx.DGC(weight_decay=0.1))
    update = lambda t, g: t.update(g, t.init(g), g)[0]
    with raises(ValueError, says("DGC", "weight_decay_mask", expected="tree bools", got="{'x': True}")):
        in_step(cgx.DGC(weight_decay=0.1, weight_decay_mask={"x": True}), update=update)
    varied = says("DGC", "grads", at="leaf ['b']", expected="varies over 'data'", remedy="jaxcgx.local_value_and_grad")
    step, specs = compress(cgx.DGC(), 1), jax.sharding.PartitionSpec()
    with raises(ValueError, varied):
        run = lambda g: step.update(g, cgx.compress_gradients("data", cgx.DGC()).init(g))[0]
        jax.shard_map(run, mesh=mesh_of(2), in_specs=specs, out_specs=specs)(PARAMS)


def test_init_must_see_the_ranks():
    remedy = "jax.set_mesh jax.shard_map jax.pmap axis_size=1"
    with raises(
        ValueError, says("compress_gradients", "axis_size", expected="ranks 'data'", got="None", remedy=remedy)
    ):
        cgx.compress_gradients("data", CODEC).init(PARAMS)
    with raises(NameError, says("compress_gradients", "axis_name", expected="no axis 'data'")):
        compress(CODEC).update(PARAMS, compress(CODEC).init(PARAMS))


def test_numbers_are_parameters_and_gradients_too():
    assert compress(CODEC).init(1.0).own.residuals.shape == (RANKS,)
    with raises(TypeError, says("compress_gradients", "params", at="leaf ['w']", expected="array", got="'big'")):
        compress(CODEC).init({"w": "big"})
    state = compress(CODEC, 1).init({"w": 1.0})
    step = lambda _: cgx.compress_gradients("data", CODEC).update({"w": 2.0}, state)[0]["w"]
    assert jax.vmap(step, axis_name="data")(jnp.zeros(1)) == 2


def test_rules_without_a_leaf():
    with raises(ValueError, says("Feedback", "plan", expected="leaf rule", got="none", remedy="'kernel'")):
        compress(cgx.Plan(CODEC, [("kernel", cgx.MaxMin(8))])).init(PARAMS)


def test_plans_that_skip_other_leaves():
    plans = {0: CODEC, 3: cgx.Plan(CODEC, [("b", cgx.Skip())], min_size=0)}
    with raises(ValueError, says("Feedback", "plan", at="leaf ['b']", expected="skip every step none")):
        compress(plans).init(PARAMS)


B = dict(at="leaf .own.residuals['b']", expected="float32[1 40]")
LIKE_INIT = dict(expected="like that of init", remedy="another plan")


WIDE = jnp.zeros((30, 41))


def half(state):
    return jax.tree.map(lambda x: x.astype(jnp.bfloat16) if x.dtype == jnp.float32 else x, state)


A_STATE_FROM_ANOTHER_PLAN = {
    "compress_gradients": [
        (lambda: compress(cgx.Plan(CODEC, min_size=100)).init(PARAMS), ValueError, "state .own.residuals['b']", "None"),
        (lambda: compress(cgx.Raw()).init(PARAMS), ValueError, "state .own.residuals['b']", "None"),
        (lambda: compress(cgx.Feedback(CODEC, keep=False)).init(PARAMS), ValueError, "state", "one", "another"),
        (lambda: compress(CODEC).init({"w": PARAMS["w"]}), ValueError, "state", "one", "another"),
        (lambda: compress(cgx.Momentum(CODEC)).init(PARAMS), ValueError, "state", "one", "another"),
        (
            lambda: compress(CODEC).init({**PARAMS, "w": WIDE}),
            ValueError,
            "state .own.residuals['w']",
            "float32[1, 30, 41]",
        ),
        (
            lambda: compress(CODEC, 2 * RANKS).init(PARAMS),
            ValueError,
            "state .own.residuals['b']",
            "float32[2, 40]",
            "jaxcgx.reshard_state",
        ),
        (lambda: half(compress(CODEC).init(PARAMS)), ValueError, "state .own.residuals['b']", "bfloat16[1, 40]"),
    ]
}


@pytest.mark.parametrize("row", rows(A_STATE_FROM_ANOTHER_PLAN))
def test_a_state_from_another_plan(row):
    refused(*row, run=lambda given: run(CODEC, 1, state=given()))


def test_a_state_of_another_optimizer():
    with raises(TypeError, says("compress_gradients", "state", expected="ExchangeState", got="tuple")):
        jax.vmap(lambda w: compress(CODEC).update(w, optax.adam(1e-3).init(w)), axis_name="data")(PARAMS["w"])


@pytest.mark.parametrize(
    "state",
    [optax.adam(1e-3).init(PARAMS), {"opt_state": {0: vars(compress(CODEC).init(PARAMS))}}, PARAMS],
    ids=["adam", "as nnx.state has it", "parameters"],
)
def test_specs_of_trees_without_a_state(state):
    """Without the error, all of the tree would seem replicated."""
    with raises(
        TypeError, says("state_specs", "opt_state", expected="state of jaxcgx", got="a ", remedy="nnx.Optimizer")
    ):
        cgx.state_specs(state, "data")


def test_a_state_fits_any_plan_that_compresses_the_same_leaves():
    """Residuals are gradients, whatever the codec. Noise and schedules continue from the same step."""
    ((_, state),) = run(cgx.Feedback({0: cgx.Raw(), 1: CODEC}, seed=5))
    ((_, state),) = run(CODEC, 1, state=state)
    key = jax.random.fold_in(jax.random.key(5, impl="threefry2x32"), 2)
    ((mean, after),) = run(STOCHASTIC, 1, GRADS, state)
    assert_same_trees((mean, after.own.residuals), pmean(STOCHASTIC, residuals=state.own.residuals, key=key))
    assert after.shared.count == 3
