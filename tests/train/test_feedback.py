"""Tests what exchanges with feedback send, keep and report, and the momentum of gradients."""

import dataclasses
import itertools
import pickle
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from errors import check, says
from exchanging import GRADS, RANKS, compress, pmean, run
from helpers import assert_same_trees, bare, mesh_with, sent
from jax import lax
from jax.sharding import PartitionSpec as P
from training import CODEC, PARAMS, STOCHASTIC, X, loss_fn, mesh_of, step_by_hand

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


def test_gradients_travel_as_bytes_and_residuals_are_overwritten_in_place():
    optimizer = optax.chain(compress(cgx.Plan.every(CODEC, schedule="one_shot")), optax.sgd(0.1))
    state = optimizer.init(PARAMS)
    step = jax.jit(step_by_hand(optimizer, state), donate_argnums=(0, 1))
    program = step.lower(PARAMS, state, X).compile().as_text()
    assert "jaxcgx_encode" in program and not re.search(r"f32\[(1,)?30,40\]\S* copy\(", program)
    assert {dtype for _, dtype in sent(program)} == {"u8", "f32"}
    assert program.count("all-reduce(") == 1  # of the loss


@pytest.mark.parametrize(
    "plan", [cgx.Raw(), cgx.Plan(cgx.Raw()), cgx.Plan(CODEC, min_size=10**6)], ids=["Raw", "plan", "small"]
)
def test_raw_costs_nothing(plan):
    """Except for a count of steps, the compiled program is the same as that of optax and lax.pmean."""
    optimizer = optax.sgd(0.1, momentum=0.9)
    wrapped = optax.chain(compress(plan), optimizer)
    plain = optax.chain(optax.stateless(lambda grads, params: lax.pmean(grads, "data")), optimizer)
    count = lambda params, state, loss: (params, state[1], loss)
    programs = []
    for each, specs in (wrapped, None), (plain, P()):
        step = step_by_hand(each, each.init(PARAMS), specs)
        program = jax.jit(lambda *args: count(*step(*args))).lower(PARAMS, each.init(PARAMS), X)
        programs.append(bare(program.compile()))
    assert programs[0] == programs[1]


@pytest.mark.parametrize("check_vma", [True, False])
def test_init_inside_of_shard_map(check_vma):
    """`init` finds the ranks there, and returns the state of this rank."""
    whole = compress(cgx.Momentum(CODEC)).init(PARAMS)
    init, specs = cgx.compress_gradients("data", cgx.Momentum(CODEC)).init, cgx.state_specs(whole, "data")
    init = jax.shard_map(init, mesh=mesh_of(RANKS), in_specs=P(), out_specs=specs, check_vma=check_vma)
    assert_same_trees(jax.jit(init)(PARAMS), whole)


def test_what_init_makes_under_a_mesh_is_what_a_step_returns():
    """The step is compiled once, and everything is donated."""
    optimizer = optax.chain(cgx.compress_gradients("data", CODEC), optax.sgd(0.1, momentum=0.9))
    with jax.set_mesh(mesh_of(RANKS)):
        params = jax.device_put(jax.tree.map(jnp.copy, PARAMS), P())
        state = jax.jit(optimizer.init)(params)
    step = jax.jit(step_by_hand(optimizer, state), donate_argnums=(0, 1))
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


@pytest.mark.parametrize("codec", [cgx.MaxMin(2), cgx.MaxMin(1), cgx.AbsMax(2), cgx.TopK(0.1), cgx.Sign()], ids=repr)
def test_few_bits_without_feedback_are_a_warning(codec):
    words = r"^Feedback: argument 'keep': .* may lose too much .* take jaxcgx.Eden"
    with pytest.warns(UserWarning, match=words) as found:
        cgx.Feedback({0: cgx.Raw(), 9: codec}, keep=False)
    assert ("write keep=True" in str(found[0].message)) == (codec.contracts and not codec.diverges), "the other trap"
    with pytest.warns(UserWarning, match="^value_and_grad: argument 'plan': .* may lose too much"):
        cgx.value_and_grad(loss_fn, "data", codec)


def test_signs_with_feedback_are_a_warning():
    """Whoever quantizes something else than gradients by a Feedback of their own, as 1-bit Adam, has none."""
    words = r"argument 'exchange': training with feedback may diverge with Sign\(.*\); write jaxcgx.Eden\(1\)"
    in_a_rule = cgx.Plan(cgx.MaxMin(4), [("w", cgx.Sign())])
    for exchange in cgx.Sign(), {0: cgx.Raw(), 9: cgx.Sign()}, cgx.Feedback(in_a_rule):
        with pytest.warns(UserWarning, match=f"^make_train_step: {words}"):
            cgx.make_train_step(loss_fn, optax.sgd(0.1), mesh_of(RANKS), exchange)
        with pytest.warns(UserWarning, match=f"^compress_gradients: {words}"):
            compress(exchange)


@pytest.mark.parametrize("codec", [cgx.Eden(2), cgx.Eden(1), STOCHASTIC, cgx.MaxMin(3), cgx.Raw()], ids=repr)
def test_others_are_no_trap(codec):
    cgx.Feedback(codec, keep=False), cgx.value_and_grad(loss_fn, "data", codec)  # a warning would be an error
    compress(codec)


def test_axes_in_the_wrong_order_are_a_warning():
    mesh, plan = mesh_with(dc=2, local=2), cgx.Plan.every({"dc": cgx.MaxMin(4), "local": cgx.Raw()})

    def step(axes, **options):
        transformation = cgx.compress_gradients(axes, cgx.Feedback(plan, **options))
        run = lambda g: transformation.update(g, transformation.init(g))[0]
        mapped = jax.shard_map(run, mesh=mesh, in_specs=P(axes), out_specs=P(), check_vma=False)
        jax.eval_shape(mapped, jnp.zeros((4, 64)))

    step(("dc", "local")), step(("local", "dc"), keep=False)  # a warning would be an error
    with pytest.warns(UserWarning, match=r"'plan': .* not MaxMin\(.*\) for 'dc'; .* listed outermost first"):
        step(("local", "dc"))


@pytest.mark.filterwarnings("ignore:.*may lose too much")
@pytest.mark.parametrize("keep", [True, False])
def test_telemetry(keep):
    plan = cgx.Plan(CODEC, min_size=100)
    (_, _), (mean, state) = run(cgx.Feedback(plan, keep=keep, telemetry=True), 2)
    found = state.shared.telemetry
    residuals = jax.tree.map(jnp.zeros_like, GRADS)
    if keep:
        residuals = pmean(plan)[1]
    lost = pmean(plan, residuals=residuals)[1]["w"]
    meant = GRADS["w"] + residuals["w"]
    np.testing.assert_allclose(found.vnmse["w"], (lost**2).sum() / (meant**2).sum(), rtol=1e-5)
    np.testing.assert_allclose(found.saturation["w"], (jnp.abs(lost) >= jnp.abs(meant)).mean(), rtol=1e-5)
    assert 0 < found.saturation["w"] < 1
    assert (found.vnmse["b"], found.saturation["b"]) == (0, 0)
    assert {k: (int(found.bytes[k]), int(found.uncompressed[k])) for k in PARAMS} == {
        "w": (CODEC.wire_bytes((30, 40), jnp.float32), 4800),
        "b": (160, 160),
    }
    assert_same_trees(mean, run(cgx.Feedback(plan, keep=keep), 2)[1][0])
    assert keep == bool(jax.tree.leaves(state.own))


@pytest.mark.parametrize("own", ["raw", "encoded"])
def test_telemetry_of_both_roundings(own):
    """With own="raw", `lost` is the whole error of the mean. With "encoded", it doesn't include the second rounding."""
    ((mean, state),) = run(cgx.Feedback(cgx.Plan.every(CODEC, schedule="two_shot", own=own), telemetry=True))
    lost = state.own.residuals["w"]
    np.testing.assert_allclose(state.shared.telemetry.vnmse["w"], (lost**2).sum() / (GRADS["w"] ** 2).sum(), rtol=1e-5)
    assert np.allclose(GRADS["w"].mean(0) - mean["w"], lost.mean(0), atol=1e-5) == (own == "raw")


def test_telemetry_of_zeros_and_of_infinities():
    grads = {"w": jnp.zeros((RANKS, 30, 40)), "b": GRADS["b"].at[1, 0].set(jnp.inf)}
    ((_, state),) = run(cgx.Feedback(CODEC, telemetry=True), 1, grads)
    found = state.shared.telemetry
    assert (found.vnmse["w"], found.saturation["w"]) == (0, 0)
    assert not np.isfinite(found.vnmse["b"]) and found.saturation["b"] > 0


def test_the_state_of_factors():
    """Factors are replicated, don't depend on the number of ranks, exist without feedback, and only where needed."""
    state = compress(cgx.PowerSGD(2)).init(PARAMS)
    assert state.shared.factors["w"].shape == (2, 40) and state.shared.factors["b"] is None
    specs = cgx.state_specs(state, "data")
    assert (specs.shared.factors, specs.own.residuals) == ({"w": P(), "b": None}, {"w": P("data"), "b": None})
    with pytest.warns(UserWarning, match=r"Feedback: argument 'keep': PowerSGD\(rank=2\) may lose too much"):
        forgetful = cgx.Feedback(cgx.PowerSGD(2), keep=False)
    assert forgetful.init(PARAMS).shared.factors["w"].shape == (2, 40)
    for codec in cgx.MaxMin(4), cgx.PowerSGD(20):  # the factors of the latter are not smaller than the leaves
        assert compress(codec).init(PARAMS).shared.factors is None


def test_three_sums_whatever_the_leaves():
    """Gloo sums one array at a time, so leaves that the codec refuses also travel together."""
    grads = GRADS | {"c": GRADS["b"], "d": GRADS["w"]}
    transformation = compress(cgx.PowerSGD(2))
    state = transformation.init(jax.tree.map(lambda g: g[0], grads))
    specs, update = cgx.state_specs(state, "data"), transformation.update
    mapped = jax.shard_map(update, mesh=mesh_of(RANKS), in_specs=(P("data"), specs), out_specs=(P(), specs))
    rows = jax.tree.map(lambda g: g.reshape(-1, *g.shape[2:]), grads)
    assert jax.jit(mapped).lower(rows, state).as_text().count("stablehlo.all_reduce") == 3


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


SIMPLE = [make(0.1) for make in (optax.adagrad, optax.adafactor, optax.adadelta, optax.sgd)]
SPECIAL = [optax.adam(0.1, b1=0), optax.rmsprop(0.1, centered=True), optax.sm3(0.1, momentum=0.0)]


@pytest.mark.parametrize("optimizer", SIMPLE + SPECIAL)
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
    check(str(warned[0].message), says(function, argument, got="optax.trace", remedy="write optax.sgd(rate)"))
    assert len(warned) == 1 and warned[0].filename == __file__
