"""Tests that make_train_step gives the same as a step by hand, on meshes of every kind."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from errors import raises, says
from helpers import assert_same_trees, assert_trees, sent
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from training import CODEC, NESTED, PARAMS, SHARDED, SPECS, STOCHASTIC, X, loss_fn, mesh_of, tensor_parallel
from training import train as by_hand

import jaxcgx as cgx
from jaxcgx.wan import Differential

OPTIMIZER = optax.sgd(0.2, momentum=0.5)


def run(train, steps=5, params=PARAMS, x=X, key=None):
    """Returns (parameters, state, metrics of each step)."""
    params, state = train.init(params)
    found = []
    for _ in range(steps):
        params, state, metrics = train.step(params, state, x, key)
        found.append(metrics)
    return params, state, found


@pytest.mark.short
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_as_by_hand(axis_type):
    mesh = jax.make_mesh((4,), ("data",), axis_types=(axis_type,), devices=jax.devices()[:4])
    train = cgx.make_train_step(loss_fn, optax.sgd(0.2), mesh, plan=STOCHASTIC, momentum=0.5, seed=3)
    params, state, metrics = run(train)
    expected = by_hand(cgx.compressed(optax.sgd(0.2), "data", STOCHASTIC, axis_size=4, momentum=0.5, seed=3))
    assert_same_trees((params, state), expected[:2])
    assert [float(m.loss) for m in metrics] == expected[2]
    assert metrics[0].aux is metrics[0].telemetry is None
    assert state[0].residuals["w"].addressable_shards[0].data.shape == (1, 30, 40)


def test_the_mean_of_loss_and_aux_is_not_compressed():
    def loss_and_aux(params, x):
        return x.sum(), {"rows": x, "number": 3, "mean": x.mean(0)}

    train = cgx.make_train_step(loss_and_aux, OPTIMIZER, mesh_of(4), plan=cgx.MaxMin(2), has_aux=True)
    _, _, (metrics,) = run(train, 1)
    parts = X.reshape(4, 6, 30)
    np.testing.assert_allclose(metrics.loss, parts.sum((1, 2)).mean(), rtol=1e-5)
    np.testing.assert_array_equal(metrics.aux["rows"], X)
    np.testing.assert_allclose(metrics.aux["mean"], X.mean(0), rtol=1e-4, atol=1e-6)
    assert metrics.aux["number"] == 3


@pytest.mark.parametrize("plan", [cgx.Raw(), CODEC], ids=str)
def test_accumulation(plan):
    """The gradient is that of the whole batch, and is sent once."""

    def loss_and_aux(params, x):
        return loss_fn(params, x), {"mean": x.mean(), "two": 2}

    programs = {}
    for parts in (1, 3):
        train = cgx.make_train_step(loss_and_aux, OPTIMIZER, mesh_of(4), plan=plan, has_aux=True, accumulate=parts)
        params, state, metrics = run(train, 3)
        programs[parts] = params, metrics, train.step.lower(params, state, X).compile().as_text().count("all-gather(")
    for name in PARAMS if plan == cgx.Raw() else ():
        np.testing.assert_allclose(programs[3][0][name], programs[1][0][name], rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(programs[3][1][0].loss, programs[1][1][0].loss, rtol=1e-6)
    np.testing.assert_allclose(programs[3][1][0].aux["mean"], X.mean(), rtol=1e-4)
    assert programs[3][1][0].aux["two"] == 2 and programs[3][2] == programs[1][2] == (plan != cgx.Raw())


def test_sixteen_bit_gradients_are_accumulated_in_float32():
    def loss(params, x):
        return (params * x.astype(jnp.bfloat16)).sum()

    train = cgx.make_train_step(loss, optax.sgd(1.0), mesh_of(2), plan=cgx.Raw(), accumulate=256)
    params, _, _ = run(train, 1, jnp.zeros(3, jnp.bfloat16), jnp.full((512, 3), 1.0).at[::2].set(2.0**-6))
    expected = jnp.bfloat16(-(256 + 256 * 2.0**-6) / 512)  # in bfloat16 the small numbers would vanish in the sum
    np.testing.assert_array_equal(params, jnp.full(3, expected))


@pytest.mark.short
def test_keys_for_the_loss():
    """Every rank and every micro-batch has its own key."""

    def loss(params, x, key):
        return params.sum(), jax.random.normal(key, (3,))

    train = cgx.make_train_step(loss, OPTIMIZER, mesh_of(4), plan=CODEC, has_aux=True, accumulate=2)
    key = jax.random.key(5)
    _, _, (metrics,) = run(train, 1, PARAMS["w"], X[:8], key)
    fold = jax.random.fold_in
    expected = np.mean(
        [jax.random.normal(fold(fold(key, rank), part), (3,)) for rank in range(4) for part in range(2)], 0
    )
    np.testing.assert_allclose(metrics.aux, expected, rtol=1e-5, atol=1e-6)


def test_scalars_of_a_batch_are_replicated():
    """A number and a random key are the same on every rank and in every micro-batch."""

    def loss(params, batch):
        drawn = jax.random.normal(batch["key"], ())
        return (params * batch["x"]).sum() * batch["scale"], (drawn, batch["scale"], batch["key"])

    key = jax.random.key(5)
    batch = {"x": X[:8], "scale": 2.0, "key": key}
    for accumulate in (1, 2):
        train = cgx.make_train_step(
            loss, optax.sgd(1.0), mesh_of(4), plan=cgx.Raw(), has_aux=True, accumulate=accumulate
        )
        params, _, (metrics,) = run(train, 1, jnp.zeros(30), batch)
        expected = -2.0 * X[:8].reshape(4 * accumulate, -1, 30).sum(1).mean(0)
        np.testing.assert_allclose(params, expected, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(metrics.aux[:2], (jax.random.normal(key, ()), 2.0), rtol=1e-6)
        assert metrics.aux[2] == key


def test_random_keys_among_auxiliary_outputs_are_not_averaged():
    """They are those of the last micro-batch of the first rank."""

    def loss(params, x, key):
        return (params * x).sum(), {"key": key, "n": 3}

    key, fold = jax.random.key(5), jax.random.fold_in
    for accumulate in (1, 2):
        train = cgx.make_train_step(
            loss, optax.sgd(1.0), mesh_of(2), plan=cgx.Raw(), has_aux=True, accumulate=accumulate
        )
        _, _, (metrics,) = run(train, 1, jnp.zeros(30), X[:8], key)
        assert metrics.aux["key"] == (fold(key, 0) if accumulate == 1 else fold(fold(key, 0), 1))
        assert metrics.aux["n"] == 3


@pytest.mark.parametrize("chained", [False, True])
def test_optimizers_that_take_no_value(chained):
    optimizer = optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.01), sync_period=2)
    optimizer = optax.chain(optax.identity(), optimizer) if chained else optimizer
    with jax.numpy_dtype_promotion("standard"):  # sam needs it
        params, _, _ = run(cgx.make_train_step(loss_fn, optimizer, mesh_of(2), plan=cgx.Raw()), 2)
        plain, state = PARAMS, optimizer.init(PARAMS)
        for _ in range(2):
            updates, state = optimizer.update(jax.grad(loss_fn)(plain, X), state, plain)
            plain = optax.apply_updates(plain, updates)
    assert_trees(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), params, plain)


@pytest.mark.parametrize("with_mesh", [False, True])
def test_a_sharding_constraint_over_the_axis_of_the_ranks(with_mesh):
    spec = NamedSharding(mesh_of(2), P("data")) if with_mesh else P("data")

    def loss(params, x):
        return loss_fn(params, jax.lax.with_sharding_constraint(x, spec))

    train = cgx.make_train_step(loss, OPTIMIZER, mesh_of(2), plan=CODEC)
    words = says(
        "make_train_step", "loss_fn", expected="no constraint 'data' loss", got="one", remedy="PartitionSpec mesh"
    )
    with raises(ValueError, words):
        train.step(*train.init(PARAMS), X)


def test_loops_that_start_from_zeros_and_losses_averaged_over_the_ranks():
    """JAX's check_vma refuses such loops. Without it, averaged losses have the gradient of the mean."""

    def loss(params, x):
        state = jax.lax.scan(lambda h, x: (jnp.tanh(h + x @ params["w"]), None), jnp.zeros(3), x)[0]
        return (state * params["b"]).sum()

    def of_all(params, x):
        return jax.vmap(loss, (None, 0))(params, x).mean()

    params = {"w": jnp.full((2, 3), 0.1), "b": jnp.arange(3.0)}
    x = jax.random.normal(jax.random.key(0), (4, 5, 2))
    expected = jax.tree.map(lambda p, g: p - g, params, jax.grad(of_all)(params, x))
    for function in of_all, lambda params, x: jax.lax.pmean(of_all(params, x), "data"):
        train = cgx.make_train_step(function, optax.sgd(1.0), mesh_of(4), plan=cgx.Raw())
        got, _, metrics = train.step(*train.init(params), x)
        assert_trees(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), got, expected)
        np.testing.assert_allclose(metrics.loss, of_all(params, x), rtol=1e-6)


WAYS = {
    "momentum": dict(plan=CODEC, momentum=0.9, weight_decay=0.1),
    "DGC": dict(compress=cgx.dgc, ratio=0.1),
    "BSC": dict(compress=cgx.bsc, size_bound=100),
    "MPQ": dict(compress=cgx.mpq, size_bound=100),
    "DGT, drop": dict(compress=Differential(k=0.5, block_bytes=400, rest="drop"), plan=cgx.Plan(CODEC, min_size=0)),
    "DGT, defer": dict(compress=Differential(k=0.5, block_bytes=400), plan=cgx.Plan(CODEC, min_size=0)),
    "mixed sync": dict(compress=cgx.wan.mixed_sync, plan=CODEC),
    "feedback": dict(plan=CODEC),
    "factors": dict(plan=cgx.PowerSGD(2)),
    "priority": dict(plan=CODEC, overlap="priority"),
}
ADDED_AXES = pytest.mark.xfail(strict=True, reason="the rows of momentum and of blocks have one axis more")


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[ADDED_AXES] if n in ("momentum", "DGC", "BSC", "MPQ", "DGT, drop") else []) for n in WAYS],
)
def test_ranks_of_arrays_are_not_promoted(name):
    def loss(params, x):
        return loss_fn({"w": params["w"], "b": params["b"][None]}, x)

    with jax.numpy_rank_promotion("raise"):
        train = cgx.make_train_step(loss, OPTIMIZER, mesh_of(4), **WAYS[name])
        jax.eval_shape(train.step, *train.init(PARAMS), X)


@pytest.mark.xfail(strict=True, reason="outputs are computed for made-up inputs, to see whether they count examples")
@pytest.mark.parametrize("form", ["has_aux", "model_state"])
def test_the_loss_does_not_run_while_it_is_traced(form):
    """It is traced at most twice, and runs once in a step of each rank."""
    ran, traced = [], []

    def loss(params, *rest):
        traced.append(1)
        total = jax.lax.stop_gradient(params["b"].sum())
        total = jax.pure_callback(lambda x: (ran.append(1), x)[1], jax.ShapeDtypeStruct((), jnp.float32), total)
        return loss_fn(params, rest[-1]), {"total": total + jnp.ones(len(rest[-1])).mean()}

    options, state = (dict(has_aux=True), ()) if form == "has_aux" else (dict(model_state="mean"), ({"total": 0.0},))
    train = cgx.make_train_step(loss, OPTIMIZER, mesh_of(4), plan=CODEC, **options)
    given = *train.init(PARAMS, *state), X
    train.step.lower(*given)
    assert not ran and len(traced) <= 2
    jax.block_until_ready(train.step(*given))
    assert len(ran) == 4


@pytest.mark.parametrize("donate", [True, False])
def test_donation(donate):
    train = cgx.make_train_step(loss_fn, OPTIMIZER, mesh_of(4), plan=CODEC, donate=donate)
    given = jax.device_put(PARAMS, NamedSharding(mesh_of(4), P()))
    before = train.init(given)
    train.step(*before, X)
    assert {leaf.is_deleted() for leaf in jax.tree.leaves(before)} == {donate}
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(given))


def test_one_compilation():
    def loss(params, x):
        traces.append(1)
        return loss_fn(params, x)

    traces = []
    train = cgx.make_train_step(loss, OPTIMIZER, mesh_of(4), plan={0: cgx.MaxMin(8), 2: CODEC, 3: cgx.MaxMin(2)})
    run(train)
    assert len(traces) == 1 and train.step._cache_size() == 1


def test_telemetry():
    train = cgx.make_train_step(loss_fn, OPTIMIZER, mesh_of(4), plan=cgx.Plan(CODEC, min_size=100), telemetry=True)
    _, state, metrics = run(train, 2)
    assert 0 < metrics[1].telemetry.vnmse["w"] < 1 and metrics[1].telemetry.vnmse["b"] == 0
    assert_same_trees(metrics[1].telemetry, state[0].telemetry)


def test_a_hierarchy():
    mesh = jax.make_mesh((2, 2), ("node", "local"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4])
    plan = {"node": cgx.MaxMin(8, 64), "local": cgx.Raw()}
    train = cgx.make_train_step(loss_fn, OPTIMIZER, mesh, data_axis=("node", "local"), plan=plan)
    _, state, metrics = run(train, 20)
    plain = by_hand(cgx.compressed(OPTIMIZER, "data", cgx.Raw(), axis_size=4), 20)
    assert state[0].residuals["w"].sharding.spec == P(("node", "local"))
    np.testing.assert_allclose(metrics[-1].loss, plain[2][-1], rtol=1e-2)


@NESTED
def test_an_axis_for_the_partitioner():
    """Local shards are compressed. Nothing is gathered that is not gathered without compression."""
    train, plain = (
        tensor_parallel(plan=cgx.MaxMin(4, 64), optimizer=optax.adagrad(0.1), telemetry=True, momentum=0.5),
        tensor_parallel(plan=cgx.Raw()),
    )
    params, state, metrics = run(train, 20, SHARDED)
    expected = run(plain, 20, SHARDED)
    assert expected[2][-1].loss < 0.9 * expected[2][0].loss
    program = train.step.lower(params, state, X).compile().as_text()
    assert ("all-gather", "u8") in sent(program) and ("all-gather", "f32") not in sent(program)
    mesh = params["up"].sharding.mesh
    for name, spec in SPECS.items():
        for leaf in (params[name], state[1][0].sum_of_squares[name]):
            assert leaf.sharding.is_equivalent_to(NamedSharding(mesh, spec), leaf.ndim)
        for leaf in (state[0].residuals[name], state[0].momentum[name]):
            assert leaf.sharding.is_equivalent_to(NamedSharding(mesh, P("data", *spec)), leaf.ndim)
    assert state[0].residuals["up"].shape == (2, 30, 64)
    assert metrics[0].telemetry.uncompressed["up"] == 30 * 16 * 4  # of a shard
    assert 0 < metrics[0].telemetry.vnmse["up"] < 0.1


@NESTED
def test_a_loss_of_16_bits_beside_an_axis_for_the_partitioner():
    """XLA on CPUs aborts when it compiles a sum of 16-bit numbers over ranks beside an axis of the partitioner."""
    half = lambda tree: jax.tree.map(lambda x: x.astype(jnp.bfloat16), tree)
    params, _, metrics = run(tensor_parallel(plan=cgx.Raw()), 2, half(SHARDED), half(X))
    expected = run(tensor_parallel(plan=cgx.Raw()), 2, SHARDED, X)
    assert metrics[1].loss.dtype == params["up"].dtype == jnp.bfloat16
    np.testing.assert_allclose(metrics[1].loss, expected[2][1].loss, rtol=0.02)


@NESTED
def test_shards_have_factors_of_their_own():
    params, state, metrics = run(tensor_parallel(plan=cgx.PowerSGD(2)), 20, SHARDED)
    assert metrics[-1].loss < 0.95 * metrics[0].loss
    assert {name: x if x is None else x.shape for name, x in state[0].factors.items()} == {
        "up": (2, 4 * 16),
        "down": (2, 4 * 30),
        "bias": None,
    }
    assert (
        state[0]
        .factors["down"]
        .sharding.is_equivalent_to(NamedSharding(params["up"].sharding.mesh, P(None, "model")), 2)
    )
    assert np.linalg.matrix_rank(state[0].factors["down"]) == 2


@NESTED
def test_all_shards_wait_for_a_nan():
    """All shards wait, even if only one of them has the NaN."""
    train = tensor_parallel(plan=cgx.MaxMin(4, 64), skip_nonfinite=True)
    params, state, _ = run(train, 1, {**SHARDED, "bias": SHARDED["bias"].at[5].set(3e38)}, 0 * X)
    before = jax.tree.map(np.asarray, state[0].residuals)
    _, after, _ = train.step(params, state, X.at[3, 4].set(jnp.nan))
    assert_same_trees(after[0].residuals, before)


@NESTED
def test_norms_are_those_of_all_shards():
    """The norm is used where DGC clips.

    The momentum of raw leaves and of weight decay is sharded like the parameters.
    """
    options = dict(
        optimizer=optax.sgd(0.5),
        compress=cgx.dgc,
        min_size=10**6,
        clip_norm=0.05,
        clip_global_norm=0.05,
        weight_decay=0.1,
        nesterov=True,
    )
    (params, state, _), (expected, _, _) = (run(tensor_parallel(model, **options), 5, SHARDED) for model in (4, 1))
    for name, spec in SPECS.items():
        np.testing.assert_allclose(params[name], expected[name], rtol=1e-4, atol=1e-6)
        assert (
            state[0]
            .trace[name]
            .sharding.is_equivalent_to(NamedSharding(params[name].sharding.mesh, spec), SHARDED[name].ndim)
        )


def test_optimizers_that_want_the_loss():
    """Parameters may be Python numbers."""
    optimizer = optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau())
    with jax.numpy_dtype_promotion("standard"):
        params, state, (metrics,) = run(
            cgx.make_train_step(loss_fn, optimizer, mesh_of(4), plan=CODEC), 1, {**PARAMS, "b": 0.5}
        )
    assert state[1][1].best_value == metrics.loss and params["b"].shape == ()


def test_explain_sees_the_step():
    train = cgx.make_train_step(loss_fn, OPTIMIZER, mesh_of(4), plan=CODEC)
    report = cgx.explain(train.step, *train.init(PARAMS), X, show=False)
    assert report.bytes < 4 * 1240


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        (dict(loss_fn=3), TypeError, says("make_train_step", "loss_fn", expected="function", got="3")),
        (
            dict(optimizer=3),
            TypeError,
            says("make_train_step", "optimizer", expected="optax.GradientTransformation", got="3"),
        ),
        (dict(mesh="data"), TypeError, says("make_train_step", "mesh", expected="jax.sharding.Mesh", got="'data'")),
        (
            dict(data_axis="rows"),
            ValueError,
            says("make_train_step", "data_axis", expected="axis 'data' tuple", got="'rows'"),
        ),
        (dict(data_axis=()), ValueError, says("make_train_step", "data_axis", expected="axis 'data' tuple", got="()")),
        (dict(accumulate=0), ValueError, says("make_train_step", "accumulate", expected="positive integer", got="0")),
        (dict(has_aux=1), TypeError, says("make_train_step", "has_aux", expected="True False", got="1")),
        (dict(donate="no"), TypeError, says("make_train_step", "donate", expected="True False", got="'no'")),
        (dict(plan=4), TypeError, says("compress_gradients", "plan", expected="codec", got="4")),
        (
            dict(ratio=0.1),
            TypeError,
            says(
                "make_train_step",
                "ratio",
                expected="option compress_gradients (feedback",
                got="0.1",
                remedy="jaxcgx.dgc",
            ),
        ),
        (
            dict(axis_size=4),
            TypeError,
            says("make_train_step", "axis_size", expected="none ranks", got="4", remedy="out"),
        ),
        (
            dict(mesh=jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)),
            ValueError,
            says("make_train_step", "param_specs", expected="tree PartitionSpecs 'data'", got="None"),
        ),
        (
            dict(
                mesh=jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2),
                data_axis=cgx.Tcp("data"),
                param_specs=P(),
            ),
            ValueError,
            says("make_train_step", "data_axis", expected="axes 'model'", got="Tcp", remedy="write 'data'"),
        ),
    ],
)
def test_bad_arguments(arguments, error, words):
    with raises(error, words):
        cgx.make_train_step(
            **{"loss_fn": loss_fn, "optimizer": OPTIMIZER, "mesh": mesh_of(4), "plan": CODEC, **arguments}
        )


def test_a_plan_is_wanted():
    with raises(TypeError, says("make_train_step", "plan", expected="codec Plan", got="nothing", remedy="plan=")):
        cgx.make_train_step(loss_fn, OPTIMIZER, mesh_of(4))


def test_batches_that_cannot_be_split():
    train = cgx.make_train_step(loss_fn, OPTIMIZER, mesh_of(4), plan=CODEC, accumulate=4)
    with raises(ValueError, says("make_train_step", "accumulate", expected="batches 4", got="float32[6, 30]")):
        train.step(*train.init(PARAMS), X)


def test_a_state_from_another_plan():
    train, other = (
        cgx.make_train_step(loss_fn, OPTIMIZER, mesh_of(4), plan=plan)
        for plan in (CODEC, cgx.Plan(CODEC, min_size=100))
    )
    with raises(
        ValueError, says("compress_gradients", "state", at="leaf .residuals['b']", expected="float32[1 40]", got="None")
    ):
        train.step(*other.init(PARAMS), X)


@pytest.mark.parametrize("overlap", [None, "priority"])
@pytest.mark.parametrize("state", [{"n": jnp.ones(3)}, OPTIMIZER.init(PARAMS)], ids=["swapped", "optimizer"])
def test_what_is_no_state_of_a_step(state, overlap):
    train = cgx.make_train_step(loss_fn, OPTIMIZER, mesh_of(4), plan=CODEC, overlap=overlap)
    words = says(
        "train.step", "opt_state", expected="train.init", got=f"a {type(state).__name__}", remedy="model_state"
    )
    with raises(TypeError, words):
        train.step(PARAMS, state, X)


MEAN = lambda w, x: (x @ w["w"]).mean()
NUMBERS = {**PARAMS, "n": jnp.int32(3)}


@pytest.mark.parametrize(
    ("arguments", "params", "error", "words"),
    [
        (
            dict(loss_fn=lambda w, x: (MEAN(w, x), x)),
            PARAMS,
            TypeError,
            says("make_train_step", "loss_fn", expected="loss number", got="a tuple", remedy="has_aux=True"),
        ),
        (
            dict(loss_fn=MEAN, has_aux=True),
            PARAMS,
            ValueError,
            says("make_train_step", "loss_fn", expected="(loss, aux)", got="one that returns"),
        ),
        (
            dict(loss_fn=lambda w, x: x @ w["w"]),
            PARAMS,
            TypeError,
            says("make_train_step", "loss_fn", expected="number", got="float32[6, 40]", remedy="mean"),
        ),
        (
            dict(loss_fn=lambda w, x: 3),
            PARAMS,
            TypeError,
            says("make_train_step", "loss_fn", expected="floating point", got="3"),
        ),
        (
            {},
            NUMBERS,
            ValueError,
            says(
                "train.init", "params", at="leaf ['n']", expected="floating", got="int32[]", remedy='("n", jaxcgx.Skip'
            ),
        ),
        (
            {},
            {**PARAMS, "act": jnp.tanh},
            TypeError,
            says("train.init", "params", at="leaf ['act']", expected="array", got="<", remedy="eqx.partition"),
        ),
        (
            dict(optimizer=cgx.compressed(OPTIMIZER, "data", CODEC)),
            PARAMS,
            ValueError,
            says("make_train_step", "optimizer", expected="without plan=", got="one", remedy="plain optax.adam"),
        ),
    ],
    ids=["tuple", "no aux", "rows", "integer", "integer parameter", "function", "compressed"],
)
def test_what_cannot_be_trained(arguments, params, error, words):
    options = {"loss_fn": loss_fn, "optimizer": OPTIMIZER, "mesh": mesh_of(4), "plan": cgx.Raw(), **arguments}
    train = cgx.make_train_step(**options)
    with raises(error, words):
        train.step(*train.init(params), X)
