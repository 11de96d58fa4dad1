"""Tests what compress_gradients alone sends and keeps."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from compressing import GRADS, RANKS, compress, pmean, run
from golden import numpy_codec
from helpers import assert_same_bytes, assert_same_trees, normal, sent
from jax import lax
from jax.sharding import PartitionSpec as P
from training import CODEC, PARAMS, STOCHASTIC, X, local_step, mesh_of, on_mesh, place, train

import jaxcgx as cgx


@pytest.mark.short
@pytest.mark.parametrize("check_vma", [True, False])
def test_two_steps_are_two_calls_of_the_collective(check_vma):
    (mean, state), (again, after) = run(compress(CODEC), 2, check_vma=check_vma)
    first = pmean(CODEC)
    assert_same_trees((mean, state.residuals), first)
    assert_same_trees((again, after.residuals), pmean(CODEC, residuals=first[1]))
    assert state.count == 1 and state.key.shape == (2,) and state.momentum is state.trace is state.telemetry is None


def test_noise_is_another_one_every_step():
    found = run(compress(STOCHASTIC, feedback=False, seed=5), 3)
    key = jax.random.key(5, impl="threefry2x32")
    for step, (mean, state) in enumerate(found):
        assert_same_trees(mean, pmean(STOCHASTIC, key=jax.random.fold_in(key, step))[0])
        assert (state.count, state.residuals) == (step + 1, {"w": None, "b": None})
        np.testing.assert_array_equal(state.key, jax.random.key_data(key))


@pytest.mark.parametrize(
    "options", [dict(schedule="two_shot", own="encoded"), dict(schedule="one_shot"), dict(fusion_mb=1e-6)], ids=str
)
def test_options_of_the_collective(options):
    ((mean, state),) = run(compress(CODEC, **options))
    assert_same_trees((mean, state.residuals), pmean(CODEC, **options))


def test_beta_keeps_some_of_what_was_kept():
    """The formula is LoCo's: e <- (1 - beta) e + beta lost."""
    (_, first), (_, second) = run(compress(CODEC, beta=0.25), 2)
    lost = pmean(CODEC)[1]
    for name, x in first.residuals.items():
        np.testing.assert_allclose(x, 0.25 * lost[name], rtol=1e-6)
    lost = pmean(CODEC, residuals=first.residuals)[1]
    for name, x in second.residuals.items():
        np.testing.assert_allclose(x, 0.75 * first.residuals[name] + 0.25 * lost[name], rtol=1e-5, atol=1e-7)


def test_reset_forgets_every_so_many_steps():
    found = run(compress(CODEC, reset_every=3), 7)
    kept = [bool(jnp.any(state.residuals["w"] != 0)) for _, state in found]
    assert kept == [True, True, False, True, True, False, True]
    assert_same_trees(found[3][0], found[0][0])


def test_a_reset_is_not_skipped():
    """A reset also happens in a step whose mean is not finite."""
    bad = {**GRADS, "w": GRADS["w"].at[2, 3, 7].set(jnp.inf)}
    transformation = compress(CODEC, reset_every=2, skip_nonfinite=True)
    ((_, before),) = run(transformation)
    ((_, after),) = run(transformation, 1, bad, before)
    assert before.residuals["w"].any() and not any(r.any() for r in after.residuals.values())


def test_plans_leave_leaves_raw():
    ((mean, state),) = run(compress(cgx.Plan(CODEC, min_size=100)))
    assert state.residuals["b"] is None and state.residuals["w"].shape == (RANKS, 30, 40)
    np.testing.assert_allclose(mean["b"], GRADS["b"].mean(0), rtol=1e-6, atol=1e-7)


@pytest.mark.short
def test_a_schedule_of_plans():
    """The codec changes at some steps, in one program."""
    eight = cgx.Plan(cgx.MaxMin(8, 64), min_size=100)
    transformation = compress({0: cgx.Raw(), 2: CODEC, 4: eight})
    found, residuals = run(transformation, 6), None
    for step, (mean, state) in enumerate(found):
        codec = cgx.Raw() if step < 2 else CODEC if step < 4 else eight
        expected, residuals = pmean(codec, residuals=residuals)
        assert_same_trees((mean, state.residuals), (expected, residuals))
        assert state.count == step + 1
    optimizer = optax.chain(transformation, optax.sgd(0.1))
    state = optimizer.init(PARAMS)
    step, params, state = (
        on_mesh(local_step(optimizer), state),
        place(PARAMS, P()),
        place(state, cgx.state_specs(state, "data")),
    )
    for _ in range(6):
        params, state, _ = step(params, state, X)
    assert step._cache_size() == 1


def test_what_never_is_compressed_has_no_residual():
    plans = {0: cgx.Plan(CODEC, min_size=100), 3: cgx.Plan(cgx.MaxMin(4), [("w", cgx.Raw())], min_size=0)}
    state = compress(plans).init({**PARAMS, "n": jnp.zeros(3)})
    assert {k: v if v is None else v.shape for k, v in state.residuals.items()} == {
        "w": (4, 30, 40),
        "b": None,
        "n": None,
    }


def test_a_quadratic_with_error_feedback():
    """Compares 1,000 steps on the sum of every rank's a/2 |x - c|^2 with NumPy, bit for bit.

    u = g + e, e <- u - Q(u), x <- x - lr mean Q(u). All numbers except those of Q are multiplied by powers of two, so
    only additions round.
    """
    n, steps, rate = 40, 1000, 2.0**-4
    centers = np.asarray(normal((RANKS, n), 5))
    curvature = np.float32([0.5, 1, 0.25, 1])
    codec = {"codec": "MaxMin", "bits": 2, "bucket_size": 16, "rounding": "nearest"}
    transformation = compress(cgx.MaxMin(2, 16), schedule="one_shot")
    state = transformation.init(jnp.zeros(n))
    specs = cgx.state_specs(state, "data")

    @functools.partial(
        jax.shard_map, mesh=mesh_of(RANKS), in_specs=(P("data"), P("data"), specs), out_specs=(P(), specs)
    )
    def train(center, a, state):
        def step(carry, _):
            x, state = carry
            mean, state = transformation.update(a * (x - center[0]), state)
            x = x - rate * mean
            return (x, state), x

        (_, state), path = lax.scan(step, (jnp.zeros(n), state), length=steps)
        return path, state

    path, state = jax.jit(train)(centers, curvature, state)
    x, lost = np.zeros(n, np.float32), np.zeros((RANKS, n), np.float32)
    for got in np.asarray(path):
        payloads = []
        for r in range(RANKS):
            gradient = (curvature[r] * (x - centers[r])).view(np.uint32)
            (payload,), (lost[r],) = numpy_codec.encode(codec, [("float32", gradient)], residuals=[lost[r]])
            payloads.append(payload)
        (mean,), _ = numpy_codec.reduce(codec, [("float32", n)], payloads, divisor=RANKS)
        x = x - np.float32(rate) * mean
        assert_same_bytes(got, x)
    assert_same_bytes(np.asarray(state.residuals), lost)
    best = (curvature[:, None] * centers).sum(0) / curvature.sum()
    assert np.abs(path[-1] - best).max() < 0.05 < np.abs(best).max()


@pytest.mark.parametrize("plan", [CODEC, cgx.Sign(16), {0: CODEC, 500: cgx.MaxMin(4, 16), 700: cgx.Raw()}], ids=str)
def test_nothing_is_lost_for_good(plan):
    """x - lr mean(e) follows x without compression over 1,000 steps, with both roundings of two_shot."""
    n, steps, rate = 40, 1000, 2.0**-4
    centers = normal((RANKS, n), 5)
    transformation = compress(plan, schedule="two_shot")
    state = transformation.init(jnp.zeros(n))
    specs = cgx.state_specs(state, "data")

    @functools.partial(jax.shard_map, mesh=mesh_of(RANKS), in_specs=(P("data"), specs), out_specs=(P(), P(), specs))
    def train(center, state):
        def step(carry, _):
            x, exact, state = carry
            grads = jnp.sin(x - center[0])
            mean, state = transformation.update(grads, state)
            return (x - rate * mean, exact - rate * lax.pmean(grads, "data"), state), None

        return lax.scan(step, (jnp.zeros(n), jnp.zeros(n), state), length=steps)[0]

    x, exact, state = jax.jit(train)(centers, state)
    owed = rate * np.asarray(state.residuals, np.float64).mean(0)
    np.testing.assert_allclose(np.asarray(x) - owed, exact, atol=2e-5)
    assert (owed != 0).any() != isinstance(plan, dict)  # the last codec, Raw(), sends all residuals


@pytest.mark.short
def test_states_are_donated():
    optimizer = cgx.compressed(optax.adagrad(0.1), "data", CODEC, axis_size=RANKS, momentum=0.9)
    state = optimizer.init(PARAMS)
    step = jax.jit(on_mesh(local_step(optimizer), state), donate_argnums=(0, 1))
    params, state = place(jax.tree.map(jnp.copy, PARAMS), P()), place(state, cgx.state_specs(state, "data"))
    after = step(params, state, X)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves((params, state)))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(after))


def test_residuals_are_overwritten_in_place():
    optimizer = cgx.compressed(optax.sgd(0.1), "data", CODEC, axis_size=RANKS, schedule="one_shot")
    state = optimizer.init(PARAMS)
    step = jax.jit(on_mesh(local_step(optimizer), state), donate_argnums=(0, 1))
    program = step.lower(PARAMS, state, X).compile().as_text()
    assert "jaxcgx_encode" in program and not re.search(r"f32\[(1,)?30,40\]\S* copy\(", program)


def hlo(step, *args):
    """Returns the compiled program without names and source positions."""
    text = jax.jit(step).lower(*args).compile().as_text()
    text = re.sub(r", metadata=\{[^{}]*\}", "", text)
    return re.sub(r"(FileNames|FunctionNames|FileLocations|StackFrames)\n(.+\n)*", "", text).strip()


@pytest.mark.parametrize(
    "plan", [cgx.Raw(), cgx.Plan(cgx.Raw()), cgx.Plan(CODEC, min_size=10**6)], ids=["Raw", "plan", "small"]
)
def test_raw_costs_nothing(plan):
    """The compiled program is the same as that of optax and lax.pmean."""
    optimizer = optax.sgd(0.1, momentum=0.9)
    wrapped = cgx.compressed(optimizer, "data", plan, axis_size=RANKS)
    plain = optax.chain(optax.stateless(lambda grads, params: lax.pmean(grads, "data")), optimizer)
    programs = [
        hlo(on_mesh(local_step(each), each.init(PARAMS), specs=specs), PARAMS, each.init(PARAMS), X)
        for each, specs in ((wrapped, None), (plain, P()))
    ]
    assert programs[0] == programs[1]


def test_gradients_travel_as_bytes():
    optimizer = cgx.compressed(optax.sgd(0.1), "data", CODEC, axis_size=RANKS)
    state = optimizer.init(PARAMS)
    program = on_mesh(local_step(optimizer), state).lower(PARAMS, state, X).compile().as_text()
    assert {dtype for _, dtype in sent(program)} == {"u8", "f32"}
    assert program.count("all-reduce(") == 1  # of the loss


@pytest.mark.parametrize("check_vma", [True, False])
def test_init_inside_of_shard_map(check_vma):
    """`init` finds the ranks there, and returns the state of this rank."""
    transformation = cgx.compress_gradients("data", CODEC, momentum=0.9)
    specs = cgx.state_specs(cgx.compress_gradients("data", CODEC, momentum=0.9, axis_size=RANKS).init(PARAMS), "data")
    init = jax.shard_map(transformation.init, mesh=mesh_of(RANKS), in_specs=P(), out_specs=specs, check_vma=check_vma)
    assert_same_trees(jax.jit(init)(PARAMS), compress(CODEC, momentum=0.9).init(PARAMS))


@pytest.mark.parametrize("axis_type", [jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit], ids=str)
@pytest.mark.parametrize("jit", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_init_under_a_mesh(axis_type, jit):
    """Every device has only the rows of its rank."""
    mesh = jax.make_mesh((RANKS,), ("data",), axis_types=(axis_type,), devices=jax.devices()[:RANKS])
    with jax.set_mesh(mesh):
        state = jit(cgx.compress_gradients("data", CODEC, momentum=0.9).init)(PARAMS)
    for found in (state.residuals["w"], state.momentum["w"]):
        assert [shard.data.shape for shard in found.addressable_shards] == [(1, 30, 40)] * RANKS


def test_what_init_makes_under_a_mesh_is_what_a_step_returns():
    """The step is compiled once, and everything is donated."""
    optimizer = cgx.compressed(optax.sgd(0.1, momentum=0.9), "data", CODEC)
    with jax.set_mesh(mesh_of(RANKS)):
        params = jax.device_put(jax.tree.map(jnp.copy, PARAMS), P())
        state = jax.jit(optimizer.init)(params)
    step = jax.jit(on_mesh(local_step(optimizer), state), donate_argnums=(0, 1))
    for _ in range(3):
        params, state, _ = step(params, state, X)
    assert step._cache_size() == 1


def test_in_vmap():
    transformation = cgx.compress_gradients("data", CODEC)

    def steps(grads):
        state = transformation.init(grads)
        _, state = transformation.update(grads, state)
        return transformation.update(grads, state)

    mean, state = jax.jit(jax.vmap(steps, axis_name="data", out_axes=(None, 0)))(GRADS)
    (_, _), (expected, after) = run(compress(CODEC), 2)
    assert_same_trees((mean, jax.tree.map(lambda x: x[:, 0], state.residuals)), (expected, after.residuals))


def test_hierarchies():
    mesh = jax.make_mesh(
        (2, 2), ("node", "local"), axis_types=(jax.sharding.AxisType.Auto,) * 2, devices=jax.devices()[:RANKS]
    )
    axes = ("node", "local")
    transformation = cgx.compress_gradients(axes, {"node": CODEC, "local": cgx.Raw()}, axis_size=RANKS)
    state = transformation.init(PARAMS)
    specs = cgx.state_specs(state, axes)
    assert specs.residuals["w"] == P(axes)

    @jax.jit
    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(P(axes), specs), out_specs=(P(), specs))
    def step(grads, state):
        return transformation.update(jax.tree.map(lambda g: g[0], grads), state)

    total = jax.tree.map(lambda g: 0.0 * g[0], GRADS)
    for _ in range(20):
        mean, state = step(GRADS, state)
        total = jax.tree.map(jnp.add, total, mean)
    for name, found in total.items():
        owed = np.asarray(state.residuals[name]).mean(0)
        np.testing.assert_allclose(found + owed, 20 * GRADS[name].mean(0), rtol=1e-4, atol=1e-4)


def test_bfloat16_gradients_have_float32_residuals():
    """Rounding the sums to bfloat16 is lost. The error of the codec is not."""
    grads = jax.tree.map(lambda g: g.astype(jnp.bfloat16), GRADS)
    found = run(compress(CODEC, momentum=0.5), 3, grads)
    for mean, state in found:
        assert all(x.dtype == jnp.bfloat16 for x in jax.tree.leaves((mean, state.momentum)))
        assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(state.residuals))


def test_a_nan_is_everybodys_and_residuals_can_wait_for_it():
    """All ranks see an overflow on one rank. With skip_nonfinite, the state doesn't change."""
    bad = {**GRADS, "w": GRADS["w"].at[2, 3, 7].set(jnp.inf)}
    options = dict(momentum=0.5, skip_nonfinite=True)
    ((_, before),) = run(compress(CODEC, **options))
    ((mean, after),) = run(compress(CODEC, **options), 1, bad, before)
    assert not np.isfinite(mean["w"]).all() and np.isfinite(mean["b"]).all()
    assert_same_trees(after._replace(count=None), before._replace(count=None))
    ((_, again),) = run(compress(CODEC, **options), 1, GRADS, after)
    assert_same_trees(again._replace(count=None), run(compress(CODEC, momentum=0.5), 2)[1][1]._replace(count=None))
    assert again.count == 3  # skipped steps count
    ((_, eaten),) = run(compress(CODEC), 1, bad, run(compress(CODEC))[0][1])
    assert np.isfinite(eaten.residuals["w"]).all()


def test_an_empty_tree():
    ((mean, state),) = run(compress(CODEC, telemetry=True), 1, {})
    assert mean == {} and state.residuals == {}


def test_a_schedule_in_which_nothing_is_compressed_counts_nothing():
    ((mean, state),) = run(compress({0: cgx.Raw(), 1: cgx.Plan(CODEC, min_size=10**6)}))
    assert state.count is state.key is None
    np.testing.assert_allclose(mean["w"], GRADS["w"].mean(0), rtol=1e-5, atol=1e-6)


def test_training_with_error_feedback_reaches_what_training_without_compression_does():
    plain = train(cgx.compressed(optax.sgd(0.5), "data", cgx.Raw(), axis_size=RANKS), 60)[2]
    fed = train(cgx.compressed(optax.sgd(0.5), "data", CODEC, axis_size=RANKS), 60)[2]
    assert plain[-1] < 0.5 * plain[0] and fed[-1] < 1.05 * plain[-1]


def test_feedback_matters():
    """Small elements next to a large one in a bucket round to 0 in every step. Without feedback they never change."""
    ranks, rate, steps = 8, 0.02, 1000
    curvature = jnp.where(jnp.arange(64) == 0, 5.0, 0.2)
    centers = normal((ranks, 64), 6) + jnp.where(jnp.arange(64) == 0, 0.0, 1.0)
    centers = centers.at[:, 0].add(20.0 * jnp.resize(jnp.array([1.0, -1.0]), ranks))

    def train(plan, **options):
        """Returns the difference between the mean loss and its minimum."""
        transformation = cgx.compress_gradients("data", plan, axis_size=ranks, **options)

        def local(center):
            def step(carry, _):
                x, state = carry
                mean, state = transformation.update(curvature * (x - center[0]), state)
                return (x - rate * mean, state), None

            return lax.scan(step, (jnp.zeros(64), transformation.init(jnp.zeros(64))), length=steps)[0][0]

        x = jax.jit(jax.shard_map(local, mesh=mesh_of(ranks), in_specs=P("data"), out_specs=P()))(centers)
        return float((curvature * (x - centers.mean(0)) ** 2).sum())

    start = float((curvature * centers.mean(0) ** 2).sum())
    assert train(cgx.Raw()) < 1e-2 * start
    assert train(cgx.MaxMin(2, 64)) < 0.02 * start < 0.1 * start < train(cgx.MaxMin(2, 64), feedback=False)


def test_axes_in_the_wrong_order_are_a_warning():
    plan = {"dc": cgx.MaxMin(4), "local": cgx.Raw()}
    make = lambda axes, **options: cgx.compress_gradients(axes, plan, **options)
    make(("dc", "local")), make(("local", "dc"), feedback=False)  # a warning would be an error
    with pytest.warns(
        UserWarning, match=r"'plan': .* not MaxMin\(bits=4\) for 'dc'; .* lists the outermost axis first"
    ):
        make(("local", "dc"))
