"""Tests what exchanges with feedback send and keep."""

import dataclasses
import pickle
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from exchanging import RANKS, compress, pmean, run
from helpers import assert_same_trees, sent
from jax import lax
from jax.sharding import PartitionSpec as P
from training import CODEC, PARAMS, STOCHASTIC, X, local_step, loss_fn, mesh_of, on_mesh, train

import jaxcgx as cgx


@pytest.mark.short
@pytest.mark.parametrize("check_vma", [True, False])
def test_two_steps_are_two_calls_of_the_collective(check_vma):
    (mean, state), (again, after) = run(CODEC, 2, check_vma=check_vma)
    first = pmean(CODEC)
    assert_same_trees((mean, state.own.residuals), first)
    assert_same_trees((again, after.own.residuals), pmean(CODEC, residuals=first[1]))
    shared = state.shared
    assert shared.count == 1 and shared.key.shape == (2,) and shared.trace is shared.telemetry is shared.factors is None


def test_noise_is_another_one_every_step():
    found = run(cgx.Feedback(STOCHASTIC, keep=False, seed=5), 3)
    key = jax.random.key(5, impl="threefry2x32")
    for step, (mean, state) in enumerate(found):
        assert_same_trees(mean, pmean(STOCHASTIC, key=jax.random.fold_in(key, step))[0])
        assert state.shared.count == step + 1 and not jax.tree.leaves(state.own)
        np.testing.assert_array_equal(state.shared.key, jax.random.key_data(key))


@pytest.mark.parametrize(
    "fields", [dict(schedule="two_shot", own="encoded"), dict(schedule="one_shot"), dict(fusion_mb=1e-6)], ids=str
)
def test_fields_of_a_plan(fields):
    plan = cgx.Plan.every(CODEC, **fields)
    ((mean, state),) = run(plan)
    assert_same_trees((mean, state.own.residuals), pmean(plan))


def test_what_never_is_compressed_has_no_residual():
    plans = {0: cgx.Plan(CODEC, min_size=100), 3: cgx.Plan(cgx.MaxMin(4), [("w", cgx.Raw())], min_size=0)}
    state = compress(plans).init({**PARAMS, "n": jnp.zeros(3)})
    assert {k: v if v is None else v.shape for k, v in state.own.residuals.items()} == {
        "w": (4, 30, 40),
        "b": None,
        "n": None,
    }


def test_gradients_travel_as_bytes_and_residuals_are_overwritten_in_place():
    optimizer = optax.chain(compress(cgx.Plan.every(CODEC, schedule="one_shot")), optax.sgd(0.1))
    state = optimizer.init(PARAMS)
    step = jax.jit(on_mesh(local_step(optimizer), state), donate_argnums=(0, 1))
    program = step.lower(PARAMS, state, X).compile().as_text()
    assert "jaxcgx_encode" in program and not re.search(r"f32\[(1,)?30,40\]\S* copy\(", program)
    assert {dtype for _, dtype in sent(program)} == {"u8", "f32"}
    assert program.count("all-reduce(") == 1  # of the loss


def hlo(step, *args):
    """Returns the compiled program without names and source positions."""
    text = jax.jit(step).lower(*args).compile().as_text()
    text = re.sub(r", metadata=\{[^{}]*\}", "", text)
    return re.sub(r"(FileNames|FunctionNames|FileLocations|StackFrames)\n(.+\n)*", "", text).strip()


@pytest.mark.parametrize(
    "plan", [cgx.Raw(), cgx.Plan(cgx.Raw()), cgx.Plan(CODEC, min_size=10**6)], ids=["Raw", "plan", "small"]
)
def test_raw_costs_nothing(plan):
    """Except for a count of steps, the compiled program is the same as that of optax and lax.pmean."""
    optimizer = optax.sgd(0.1, momentum=0.9)
    wrapped = optax.chain(compress(plan), optimizer)
    plain = optax.chain(optax.stateless(lambda grads, params: lax.pmean(grads, "data")), optimizer)
    count = lambda params, state, loss: (params, state[1], loss)
    programs = [
        hlo(lambda *args, step=step: count(*step(*args)), PARAMS, each.init(PARAMS), X)
        for each, step in (
            (each, on_mesh(local_step(each), each.init(PARAMS), specs=specs))
            for each, specs in ((wrapped, None), (plain, P()))
        )
    ]
    assert programs[0] == programs[1]


@pytest.mark.parametrize("check_vma", [True, False])
def test_init_inside_of_shard_map(check_vma):
    """`init` finds the ranks there, and returns the state of this rank."""
    whole = compress(cgx.Momentum(CODEC)).init(PARAMS)
    init, specs = cgx.compress_gradients("data", cgx.Momentum(CODEC)).init, cgx.state_specs(whole, "data")
    init = jax.shard_map(init, mesh=mesh_of(RANKS), in_specs=P(), out_specs=specs, check_vma=check_vma)
    assert_same_trees(jax.jit(init)(PARAMS), whole)


@pytest.mark.parametrize("axis_type", [jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit], ids=str)
@pytest.mark.parametrize("jit", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_init_under_a_mesh(axis_type, jit):
    """Every device has only the rows of its rank."""
    mesh = jax.make_mesh((RANKS,), ("data",), axis_types=(axis_type,), devices=jax.devices()[:RANKS])
    with jax.set_mesh(mesh):
        state = jit(cgx.compress_gradients("data", cgx.Momentum(CODEC)).init)(PARAMS)
    for found in (state.own.residuals["w"], state.own.momentum["w"]):
        assert [shard.data.shape for shard in found.addressable_shards] == [(1, 30, 40)] * RANKS


def test_what_init_makes_under_a_mesh_is_what_a_step_returns():
    """The step is compiled once, and everything is donated."""
    optimizer = optax.chain(cgx.compress_gradients("data", CODEC), optax.sgd(0.1, momentum=0.9))
    with jax.set_mesh(mesh_of(RANKS)):
        params = jax.device_put(jax.tree.map(jnp.copy, PARAMS), P())
        state = jax.jit(optimizer.init)(params)
    step = jax.jit(on_mesh(local_step(optimizer), state), donate_argnums=(0, 1))
    for _ in range(3):
        params, state, _ = step(params, state, X)
    assert step._cache_size() == 1


@pytest.mark.parametrize("plan", [CODEC, {0: cgx.Raw(), 2: CODEC}], ids=["codec", "schedule"])
def test_a_plan_is_a_feedback(plan):
    """In place of an exchange, a plan means its Feedback. Only errors differ: they name the function that got it."""
    exchange, given = cgx.Feedback(plan), cgx.wan.MixedSync(plan)
    assert given.exchange == exchange
    assert given == cgx.wan.MixedSync(exchange) and repr(given) == repr(cgx.wan.MixedSync(exchange))
    copies = pickle.loads(pickle.dumps(given.exchange)), dataclasses.replace(given.exchange, seed=0)
    for copy in copies:
        assert copy == exchange and repr(copy) == repr(exchange)
        with pytest.raises(ValueError, match="^MixedSync: argument 'beta': "):
            dataclasses.replace(copy, beta=2.0)


def test_an_empty_tree():
    for exchange in cgx.Feedback(CODEC, telemetry=True), cgx.DGC(0.1, clip_global_norm=1.0, skip_nonfinite=True):
        ((mean, state),) = run(exchange, 1, {})
        assert mean == {} and state.own.residuals == {}


def test_training_with_error_feedback_reaches_what_training_without_compression_does():
    plain, fed = (train(optax.chain(compress(plan), optax.sgd(0.5)), 60)[2] for plan in (cgx.Raw(), CODEC))
    assert plain[-1] < 0.5 * plain[0] and fed[-1] < 1.05 * plain[-1]


@pytest.mark.parametrize("codec", [cgx.MaxMin(2), cgx.MaxMin(1), cgx.AbsMax(2), cgx.TopK(0.1), cgx.Sign()], ids=repr)
def test_few_bits_without_feedback_are_a_warning(codec):
    with pytest.warns(
        UserWarning, match=r"^Feedback: argument 'keep': .* may lose too much .* take jaxcgx.Eden"
    ) as found:
        cgx.Feedback({0: cgx.Raw(), 9: codec}, keep=False)
    assert ("write keep=True" in str(found[0].message)) == (codec.contracts and not codec.diverges), "the other trap"
    with pytest.warns(UserWarning, match="^value_and_grad: argument 'plan': .* may lose too much"):
        cgx.value_and_grad(loss_fn, "data", codec)


def test_signs_with_feedback_are_a_warning():
    """Whoever quantizes something else than gradients by a Feedback of their own, as 1-bit Adam, has none."""
    words = r"argument 'exchange': training with feedback may diverge with Sign\(.*\); write jaxcgx.Eden\(1\)"
    for exchange in (
        cgx.Sign(),
        {0: cgx.Raw(), 9: cgx.Sign()},
        cgx.Feedback(cgx.Plan(cgx.MaxMin(4), [("w", cgx.Sign())])),
    ):
        with pytest.warns(UserWarning, match=f"^make_train_step: {words}"):
            cgx.make_train_step(loss_fn, optax.sgd(0.1), mesh_of(RANKS), exchange)
        with pytest.warns(UserWarning, match=f"^compress_gradients: {words}"):
            compress(exchange)


@pytest.mark.parametrize("codec", [cgx.Eden(2), cgx.Eden(1), STOCHASTIC, cgx.MaxMin(3), cgx.Raw()], ids=repr)
def test_others_are_no_trap(codec):
    cgx.Feedback(codec, keep=False), cgx.value_and_grad(loss_fn, "data", codec)  # a warning would be an error
    compress(codec)


def test_axes_in_the_wrong_order_are_a_warning():
    types = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((2, 2), ("dc", "local"), axis_types=types, devices=jax.devices()[:4])

    def step(axes, **options):
        transformation = cgx.compress_gradients(
            axes, cgx.Feedback({"dc": cgx.MaxMin(4), "local": cgx.Raw()}, **options)
        )
        run = lambda g: transformation.update(g, transformation.init(g))[0]
        jax.eval_shape(
            jax.shard_map(run, mesh=mesh, in_specs=P(axes), out_specs=P(), check_vma=False), jnp.zeros((4, 64))
        )

    step(("dc", "local")), step(("local", "dc"), keep=False)  # a warning would be an error
    with pytest.warns(UserWarning, match=r"'plan': .* not MaxMin\(.*\) for 'dc'; .* listed outermost first"):
        step(("local", "dc"))
