"""Tests what compress_gradients refuses."""

import jax
import jax.numpy as jnp
import optax
import pytest
from compressing import RANKS, compress, pmean, run
from errors import raises, says
from helpers import assert_same_trees
from training import CODEC, PARAMS, STOCHASTIC, mesh_of

import jaxcgx as cgx
from jaxcgx.transports.xla import Axes

ALLREDUCE = 'jaxcgx.mpi.compressed_allreduce op="mean"'


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        (dict(plan=4), TypeError, says("compress_gradients", "plan", expected="codec", got="4")),
        (dict(plan={"data": 4}), TypeError, says("compress_gradients", "plan", expected="codec", got="4")),
        (
            dict(plan={5: CODEC}),
            ValueError,
            says("compress_gradients", "plan", expected="schedule step 0", got="steps [5]"),
        ),
        (
            dict(plan={0: CODEC, -1: CODEC}),
            ValueError,
            says("compress_gradients", "plan", expected="schedule 0", got="steps [0, -1]"),
        ),
        (
            dict(plan={0: CODEC, "data": CODEC}),
            ValueError,
            says("compress_gradients", "plan", expected="schedule 0", got="steps [0, 'data']"),
        ),
        (dict(plan={0: CODEC, 9: "raw"}), TypeError, says("compress_gradients", "plan", expected="codec", got="'raw'")),
        (dict(feedback=1), TypeError, says("compress_gradients", "feedback", expected="True False", got="1")),
        (dict(telemetry="yes"), TypeError, says("compress_gradients", "telemetry", expected="True False", got="'yes'")),
        (
            dict(skip_nonfinite=None),
            TypeError,
            says("compress_gradients", "skip_nonfinite", expected="True False", got="None"),
        ),
        (dict(beta=0), ValueError, says("compress_gradients", "beta", expected="number 0 1", got="0")),
        (dict(beta="1"), TypeError, says("compress_gradients", "beta", expected="number 0 1", got="'1'")),
        (dict(momentum=1.0), ValueError, says("compress_gradients", "momentum", expected="number 0 1", got="1.0")),
        (
            dict(reset_every=0),
            ValueError,
            says("compress_gradients", "reset_every", expected="positive integer", got="0"),
        ),
        (
            dict(reset_every=2.5),
            TypeError,
            says("compress_gradients", "reset_every", expected="positive integer", got="2.5"),
        ),
        (dict(axis_size=0), ValueError, says("compress_gradients", "axis_size", expected="positive integer", got="0")),
        (dict(seed="a"), TypeError, says("compress_gradients", "seed", expected="integer", got="'a'")),
        (
            dict(feedback=False, beta=0.5),
            ValueError,
            says(
                "compress_gradients", "feedback", expected="True 'beta' 'reset_every' 'momentum_masking'", got="False"
            ),
        ),
        (
            dict(nesterov=True),
            ValueError,
            says(
                "compress_gradients",
                "momentum",
                expected="number 'nesterov' 'momentum_masking' 'weight_decay'",
                got="None",
            ),
        ),
        (
            dict(weight_decay=0.1),
            ValueError,
            says(
                "compress_gradients",
                "momentum",
                expected="number 'nesterov' 'momentum_masking' 'weight_decay'",
                got="None",
                remedy="optax.add_decayed_weights",
            ),
        ),
        (
            dict(momentum=0.9, weight_decay=-1),
            ValueError,
            says("compress_gradients", "weight_decay", expected="number 0", got="-1"),
        ),
        (
            dict(momentum=0.9, nesterov=1),
            TypeError,
            says("compress_gradients", "nesterov", expected="True False", got="1"),
        ),
        (
            dict(momentum=0.9, momentum_masking=True),
            ValueError,
            says("compress_gradients", "momentum_masking", expected="False jaxcgx.TopK", got="True"),
        ),
        (
            dict(plan=cgx.TopK(1), momentum=0.9, momentum_masking=True),  # sends every element
            ValueError,
            says("compress_gradients", "momentum_masking", expected="False jaxcgx.TopK", got="True"),
        ),
        (
            dict(plan=cgx.TopK(), momentum=0.9, momentum_masking=True, feedback=False),
            ValueError,
            says(
                "compress_gradients", "feedback", expected="True 'beta' 'reset_every' 'momentum_masking'", got="False"
            ),
        ),
        (
            dict(schedule="ring"),
            ValueError,
            says(
                "compress_gradients",
                "schedule",
                expected='schedule "two_shot" "one_shot" \'data\'',
                got='"ring"',
                remedy='schedule="two_shot" feedback=False',
            ),
        ),
        (
            dict(schedule={"data": "ring"}, feedback=False, telemetry=True),
            ValueError,
            says("compress_gradients", "schedule", expected='schedule "two_shot" "one_shot" \'data\'', got='"ring"'),
        ),
        (
            dict(plan={0: cgx.Raw(), 5: cgx.Plan(CODEC, schedule="ring")}),
            ValueError,
            says("compress_gradients", "plan", expected='schedule "two_shot" "one_shot" \'data\'', got='"ring"'),
        ),
        (
            dict(
                axis_name=("cross", "inner"),
                plan=cgx.Plan.from_env(("cross", "inner"), {"CGX_COMPRESSION_QUANTIZATION_BITS": "4"}),
            ),
            ValueError,
            says("compress_gradients", "plan", expected='schedule "two_shot" "one_shot" \'cross\'', got='"ring"'),
        ),
        (
            dict(axis_name=Axes(("data",))),
            TypeError,
            says("compress_gradients", "axis_name", expected="name", got="a communicator, Axes", remedy=ALLREDUCE),
        ),
        (
            dict(axis_name=("data", Axes(("data",)))),
            TypeError,
            says("compress_gradients", "axis_name", expected="name", got="a communicator, Axes", remedy=ALLREDUCE),
        ),
        (
            dict(axis_name=mesh_of(2)),
            TypeError,
            says("compress_gradients", "axis_name", expected="name", got="a mesh, Mesh", remedy="name 'data'"),
        ),
        (
            dict(axis_name=jnp.zeros(2)),
            ValueError,
            says("compress_gradients", "axis_name", expected="name tuple", got="Array([0., 0.]"),
        ),
        (dict(axis_name=None), ValueError, says("compress_gradients", "axis_name", expected="name", got="None")),
        (
            dict(momentum=jnp.float32(1)),
            ValueError,
            says("compress_gradients", "momentum", expected="number 0 1", got="1"),
        ),
        (dict(beta=jnp.float32(-0.5)), ValueError, says("compress_gradients", "beta", expected="number 1", got="-0.5")),
        (dict(beta=jnp.zeros(2)), TypeError, says("compress_gradients", "beta", expected="number 0", got="Array([0.")),
        (
            dict(schedule="star"),
            ValueError,
            says("compress_gradients", "schedule", expected="'auto' 'ring'", got="'star'"),
        ),
        (
            dict(schedule={"node": "two_shot"}),
            ValueError,
            says("compress_gradients", "schedule", expected="schedule 'data'", got="{'node'"),
        ),
        (dict(own="mine"), ValueError, says("compress_gradients", "own", expected="'raw' 'encoded'", got="'mine'")),
        (dict(strict=1), TypeError, says("compress_gradients", "strict", expected="True False", got="1")),
        (dict(leader="0"), TypeError, says("compress_gradients", "leader", expected="True False", got="'0'")),
        (dict(fusion_mb=0), ValueError, says("compress_gradients", "fusion_mb", expected="positive number", got="0")),
        (
            dict(plan=cgx.Plan({"node": CODEC})),
            ValueError,
            says("compress_gradients", "plan", expected="codec 'data'", got="{'node'"),
        ),
        (
            dict(plan=cgx.Plan(CODEC, [("w", {"node": CODEC, "data": CODEC})])),
            ValueError,
            says("compress_gradients", "plan", expected="codec 'data'", got="{'node'"),
        ),
        (
            dict(feedback=False, reset_every=5),
            ValueError,
            says(
                "compress_gradients", "feedback", expected="True 'beta' 'reset_every' 'momentum_masking'", got="False"
            ),
        ),
    ],
)
def test_bad_arguments(arguments, error, words):
    with raises(error, words):
        cgx.compress_gradients(**{"axis_name": "data", "plan": CODEC, **arguments})


@pytest.mark.parametrize(
    "arguments",
    [
        dict(schedule="ring", feedback=False),
        dict(plan=cgx.Raw(), schedule="ring"),
        dict(plan=cgx.Plan(CODEC, schedule="ring"), schedule="two_shot"),
        dict(axis_name=("node", "local"), schedule={"node": "two_shot", "local": "ring"}),
    ],
    ids=str,
)
def test_rings_that_lose_nothing_of_a_ranks_own(arguments):
    cgx.compress_gradients(**{"axis_name": "data", "plan": CODEC, **arguments})


def test_init_must_see_the_ranks():
    with raises(
        ValueError,
        says(
            "compress_gradients",
            "axis_size",
            expected="ranks 'data'",
            got="None",
            remedy="jax.set_mesh jax.shard_map jax.pmap axis_size=1",
        ),
    ):
        cgx.compress_gradients("data", CODEC).init(PARAMS)
    with raises(NameError, says("compress_gradients", "axis_name", expected="no axis 'data'")):
        compress(CODEC).update(PARAMS, compress(CODEC).init(PARAMS))


def test_numbers_are_parameters_and_gradients_too():
    assert compress(CODEC).init(1.0).residuals.shape == (RANKS,)
    with raises(TypeError, says("compress_gradients", "params", at="leaf ['w']", expected="array", got="'big'")):
        compress(CODEC).init({"w": "big"})
    state = cgx.compress_gradients("data", CODEC, axis_size=1).init({"w": 1.0})
    step = lambda _: cgx.compress_gradients("data", CODEC).update({"w": 2.0}, state)[0]["w"]
    assert jax.vmap(step, axis_name="data")(jnp.zeros(1)) == 2


def test_rules_without_a_leaf():
    with raises(ValueError, says("compress_gradients", "plan", expected="leaf rule", got="none", remedy="'kernel'")):
        compress(cgx.Plan(CODEC, [("kernel", cgx.MaxMin(8))])).init(PARAMS)


@pytest.mark.parametrize(
    ("state", "error", "words"),
    [
        (
            lambda: compress(cgx.Plan(CODEC, min_size=100)).init(PARAMS),
            ValueError,
            says("compress_gradients", "state", at="leaf .residuals['b']", expected="float32[1 40]", got="None"),
        ),
        (
            lambda: compress(CODEC, feedback=False).init(PARAMS),
            ValueError,
            says("compress_gradients", "state", at="leaf .residuals['b']", expected="float32[1 40]", got="None"),
        ),
        (
            lambda: compress(cgx.Raw()).init(PARAMS),
            ValueError,
            says("compress_gradients", "state", at="leaf .count", expected="int32[]", got="None"),
        ),
        (
            lambda: compress(CODEC).init({**PARAMS, "w": jnp.zeros((30, 41))}),
            ValueError,
            says(
                "compress_gradients",
                "state",
                at="leaf .residuals['w']",
                expected="float32[1 30 40]",
                got="float32[1, 30, 41]",
            ),
        ),
        (
            lambda: compress(CODEC).init({"w": PARAMS["w"]}),
            ValueError,
            says("compress_gradients", "state", expected="structure CompressState", got="PyTreeDef("),
        ),
        (
            lambda: compress(CODEC, momentum=0.9).init(PARAMS),
            ValueError,
            says("compress_gradients", "state", expected="structure CompressState", got="PyTreeDef("),
        ),
        (
            lambda: cgx.compress_gradients("data", CODEC, axis_size=2 * RANKS).init(PARAMS),
            ValueError,
            says(
                "compress_gradients",
                "state",
                at="leaf .residuals['b']",
                expected="float32[1 40]",
                got="float32[2, 40]",
                remedy="'data' jaxcgx.state_specs(state, 'data') jaxcgx.reshard_state",
            ),
        ),
        (
            lambda: jax.tree.map(
                lambda x: x if x.dtype != jnp.float32 else x.astype(jnp.bfloat16), compress(CODEC).init(PARAMS)
            ),
            ValueError,
            says(
                "compress_gradients",
                "state",
                at="leaf .residuals['b']",
                expected="float32[1 40]",
                got="bfloat16[1, 40]",
            ),
        ),
    ],
    ids=["guard", "no feedback", "raw", "shape", "leaf", "momentum", "ranks", "dtype"],
)
def test_a_state_from_another_plan(state, error, words):
    with raises(error, words):
        run(compress(CODEC), 1, state=state())


def test_a_state_of_another_optimizer():
    with raises(TypeError, says("compress_gradients", "state", expected="CompressState", got="tuple")):
        jax.vmap(lambda w: compress(CODEC).update(w, optax.adam(1e-3).init(w)), axis_name="data")(PARAMS["w"])


@pytest.mark.parametrize(
    "state",
    [optax.adam(1e-3).init(PARAMS), {"opt_state": {0: compress(CODEC).init(PARAMS)._asdict()}}, PARAMS],
    ids=["adam", "as nnx.state has it", "parameters"],
)
def test_specs_of_trees_without_a_state(state):
    """Without the error, all of the tree would seem replicated."""
    words = says("state_specs", "opt_state", expected="state jaxcgx's", got="a ", remedy="init nnx.Optimizer")
    with raises(TypeError, words):
        cgx.state_specs(state, "data")


def test_a_state_fits_any_plan_that_compresses_the_same_leaves():
    """Residuals are gradients, whatever the codec. Noise and schedules continue from the same step."""
    ((_, state),) = run(compress({0: cgx.Raw(), 1: CODEC}, seed=5))
    ((_, state),) = run(compress(CODEC), 1, state=state)
    key = jax.random.fold_in(jax.random.key(5, impl="threefry2x32"), 2)
    ((mean, after),) = run(compress(STOCHASTIC), 1, state=state)
    assert_same_trees((mean, after.residuals), pmean(STOCHASTIC, residuals=state.residuals, key=key))
    assert after.count == 3
