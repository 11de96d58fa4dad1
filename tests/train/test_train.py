"""Tests that make_train_step gives the same as a step by hand, on meshes of every kind."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from errors import raises, refused, rows, says, table
from helpers import assert_same_trees, assert_trees, sent
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from steps import run, tensor_parallel
from training import CODEC, NESTED, PARAMS, SHARDED, SPECS, STOCHASTIC, X, loss_fn, mesh_of
from training import train as by_hand

import jaxcgx as cgx
from jaxcgx.train.exchange import At
from jaxcgx.transports.xla import Axes

OPTIMIZER = optax.sgd(0.2, momentum=0.5)
TWO = (AxisType.Auto,) * 2


def make(exchange=CODEC, loss=loss_fn, ranks=4, optimizer=OPTIMIZER, **options):
    return cgx.make_train_step(loss, optimizer, mesh_of(ranks), exchange, **options)


@pytest.mark.short
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_as_by_hand(axis_type):
    mesh = jax.make_mesh((4,), ("data",), axis_types=(axis_type,), devices=jax.devices()[:4])
    exchange = cgx.Momentum(STOCHASTIC, 0.5, seed=3)
    state, metrics = run(cgx.make_train_step(loss_fn, optax.sgd(0.2), mesh, exchange))
    transformation = optax.chain(cgx.compress_gradients("data", exchange, axis_size=4), optax.sgd(0.2))
    params, (sent, rest), losses = by_hand(transformation)
    assert_same_trees((state.params, state.exchange, state.opt_state), (params, sent, rest))
    assert [float(m.loss) for m in metrics] == losses
    assert metrics[0].aux is metrics[0].telemetry is state.pending is None
    assert state.exchange.own.residuals["w"].addressable_shards[0].data.shape == (1, 30, 40)


@pytest.mark.parametrize("plan", [cgx.Raw(), CODEC], ids=str)
def test_accumulation(plan):
    """The gradient is that of the whole batch, and is sent once."""

    def loss_and_aux(params, x):
        return loss_fn(params, x), {"mean": x.mean(), "count": len(x)}

    programs = {}
    for parts in (1, 3):
        options = dict(has_aux=True, aux_specs={"mean": "mean", "count": "sum"}, accumulate=parts)
        train = make(plan, loss_and_aux, **options)
        state, metrics = run(train, 3)
        programs[parts] = state, metrics, train.step.lower(state, X).compile().as_text().count("all-gather(")
    for name in PARAMS if plan == cgx.Raw() else ():
        np.testing.assert_allclose(programs[3][0].params[name], programs[1][0].params[name], rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(programs[3][1][0].loss, programs[1][1][0].loss, rtol=1e-6)
    np.testing.assert_allclose(programs[3][1][0].aux["mean"], X.mean(), rtol=1e-4)
    assert programs[3][1][0].aux["count"] == programs[1][1][0].aux["count"] == len(X)
    assert programs[3][2] == programs[1][2] == (plan != cgx.Raw())


def test_sixteen_bit_gradients_are_accumulated_in_float32():
    def loss(params, x):
        return (params * x.astype(jnp.bfloat16)).sum()

    train = make(cgx.Raw(), loss, 2, optax.sgd(1.0), accumulate=256)
    state, _ = run(train, 1, jnp.zeros(3, jnp.bfloat16), jnp.full((512, 3), 1.0).at[::2].set(2.0**-6))
    expected = jnp.bfloat16(-(256 + 256 * 2.0**-6) / 512)  # in bfloat16 the small numbers would vanish in the sum
    np.testing.assert_array_equal(state.params, jnp.full(3, expected))


@pytest.mark.short
def test_keys_for_the_loss():
    """Every rank and every micro-batch has its own key."""

    def loss(params, x, key):
        return params.sum(), jax.random.normal(key, (3,))

    key = jax.random.key(5)
    _, (metrics,) = run(make(CODEC, loss, has_aux=True, accumulate=2), 1, PARAMS["w"], X[:8], key)
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
        train = make(cgx.Raw(), loss, 4, optax.sgd(1.0), has_aux=True, accumulate=accumulate)
        state, (metrics,) = run(train, 1, jnp.zeros(30), batch)
        expected = -2.0 * X[:8].reshape(4 * accumulate, -1, 30).sum(1).mean(0)
        np.testing.assert_allclose(state.params, expected, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(metrics.aux[:2], (jax.random.normal(key, ()), 2.0), rtol=1e-6)
        assert metrics.aux[2] == key


@pytest.mark.parametrize("chained", [False, True])
def test_optimizers_that_take_no_value(chained):
    optimizer = optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.01), sync_period=2)
    optimizer = optax.chain(optax.identity(), optimizer) if chained else optimizer
    with jax.numpy_dtype_promotion("standard"):  # sam needs it
        found, _ = run(make(cgx.Raw(), ranks=2, optimizer=optimizer), 2)
        plain, state = PARAMS, optimizer.init(PARAMS)
        for _ in range(2):
            updates, state = optimizer.update(jax.grad(loss_fn)(plain, X), state, plain)
            plain = optax.apply_updates(plain, updates)
    assert_trees(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), found.params, plain)


@pytest.mark.parametrize("with_mesh", [False, True])
def test_a_sharding_constraint_over_the_axis_of_the_ranks(with_mesh):
    spec = NamedSharding(mesh_of(2), P("data")) if with_mesh else P("data")

    def loss(params, x):
        return loss_fn(params, jax.lax.with_sharding_constraint(x, spec))

    words = says("make_train_step", "loss_fn", got="one", remedy="PartitionSpec mesh")
    with raises(ValueError, words):
        run(make(CODEC, loss, 2), 1)


WAYS = {
    "momentum": cgx.Momentum(CODEC, weight_decay=0.1),
    "DGC": cgx.DGC(0.1),
    "BSC": cgx.BSC(size_bound=100),
    "MPQ": cgx.MPQ(size_bound=100),
    "DGT, drop": cgx.wan.Differential(cgx.Plan(CODEC, min_size=0), k=0.5, block_bytes=400, rest="drop"),
    "DGT, defer": cgx.wan.Differential(cgx.Plan(CODEC, min_size=0), k=0.5, block_bytes=400),
    "mixed sync": cgx.wan.MixedSync(CODEC),
    "feedback": CODEC,
    "factors": cgx.PowerSGD(2),
}


@pytest.mark.parametrize("name", WAYS)
def test_ranks_of_arrays_are_not_promoted(name):
    def loss(params, x):
        return loss_fn({"w": params["w"], "b": params["b"][None]}, x)

    with jax.numpy_rank_promotion("raise"):
        train = cgx.make_train_step(loss, optax.sgd(0.2), mesh_of(4), WAYS[name])
        jax.eval_shape(train.step, train.init(PARAMS), X)


@pytest.mark.parametrize("donate", [True, False])
def test_donation(donate):
    train = make(donate=donate)
    given = jax.device_put(PARAMS, NamedSharding(mesh_of(4), P()))
    before = train.init(given)
    train.step(before, X)
    assert {leaf.is_deleted() for leaf in jax.tree.leaves(before)} == {donate}
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(given))


@pytest.mark.parametrize("exchange", [{0: cgx.MaxMin(8), 2: CODEC, 3: cgx.MaxMin(2)}, cgx.PowerSGD(2)], ids=str)
def test_one_compilation(exchange):
    """The loss is traced once, and executed only by the compiled program."""

    def loss(params, x):
        traces.append(1)
        jax.debug.callback(lambda: calls.append(1))
        return loss_fn(params, x), {"mean": x.mean()}

    traces, calls = [], []
    train = make(exchange, loss, has_aux=True, accumulate=2)
    run(train)
    jax.effects_barrier()
    assert len(traces) == train.step._cache_size() == 1 and len(calls) == 5 * 4 * 2


@NESTED
def test_an_axis_for_the_partitioner():
    """Local shards are compressed. Nothing is gathered that is not gathered without compression."""
    exchange = cgx.Momentum(cgx.MaxMin(4, 64), 0.5, telemetry=True)
    train, plain = tensor_parallel(exchange, optimizer=optax.adagrad(0.1)), tensor_parallel(cgx.Raw())
    state, metrics = run(train, 20, SHARDED)
    _, expected = run(plain, 20, SHARDED)
    assert expected[-1].loss < 0.9 * expected[0].loss
    program = train.step.lower(state, X).compile().as_text()
    assert ("all-gather", "u8") in sent(program) and ("all-gather", "f32") not in sent(program)
    mesh = state.params["up"].sharding.mesh
    for name, spec in SPECS.items():
        for leaf in (state.params[name], state.opt_state[0].sum_of_squares[name]):
            assert leaf.sharding.is_equivalent_to(NamedSharding(mesh, spec), leaf.ndim)
        for leaf in (state.exchange.own.residuals[name], state.exchange.own.momentum[name]):
            assert leaf.sharding.is_equivalent_to(NamedSharding(mesh, P("data", *spec)), leaf.ndim)
    assert state.exchange.own.residuals["up"].shape == (2, 30, 64)
    assert metrics[0].telemetry.uncompressed["up"] == 30 * 16 * 4  # of a shard
    assert 0 < metrics[0].telemetry.vnmse["up"] < 0.1


@NESTED
def test_a_loss_of_16_bits_beside_an_axis_for_the_partitioner():
    """XLA on CPUs aborts when it compiles a sum of 16-bit numbers over ranks beside an axis of the partitioner."""
    half = lambda tree: jax.tree.map(lambda x: x.astype(jnp.bfloat16), tree)
    state, metrics = run(tensor_parallel(cgx.Raw()), 2, half(SHARDED), half(X))
    _, expected = run(tensor_parallel(cgx.Raw()), 2, SHARDED)
    assert metrics[1].loss.dtype == state.params["up"].dtype == jnp.bfloat16
    np.testing.assert_allclose(metrics[1].loss, expected[1].loss, rtol=0.02)


@NESTED
def test_shards_have_factors_of_their_own():
    state, metrics = run(tensor_parallel(cgx.PowerSGD(2)), 20, SHARDED)
    assert metrics[-1].loss < 0.95 * metrics[0].loss
    factors, mesh = state.exchange.shared.factors, state.params["up"].sharding.mesh
    shapes = {name: x if x is None else x.shape for name, x in factors.items()}
    assert shapes == {"up": (2, 4 * 16), "down": (2, 4 * 30), "bias": None}
    assert factors["down"].sharding.is_equivalent_to(NamedSharding(mesh, P(None, "model")), 2)
    assert np.linalg.matrix_rank(factors["down"]) == 2


@NESTED
def test_all_shards_wait_for_a_nan():
    """All shards wait, even if only one of them has the NaN."""
    train = tensor_parallel(cgx.Feedback(cgx.MaxMin(4, 64), skip_nonfinite=True))
    state, _ = run(train, 1, {**SHARDED, "bias": SHARDED["bias"].at[5].set(3e38)}, 0 * X)
    before = jax.tree.map(np.asarray, state.exchange.own.residuals)
    after, _ = train.step(state, X.at[3, 4].set(jnp.nan))
    assert_same_trees(after.exchange.own.residuals, before)


@NESTED
def test_norms_are_those_of_all_shards():
    """Where DGC clips. The momentum of raw leaves and of weight decay is sharded like the parameters."""
    clip = dict(clip_norm=0.05, clip_global_norm=0.05)
    exchange = cgx.DGC(min_size=10**6, weight_decay=0.1, nesterov=True, **clip)
    make = lambda model: tensor_parallel(exchange, model, optax.sgd(0.5))
    (state, _), (expected, _) = (run(make(model), 5, SHARDED) for model in (4, 1))
    for name, spec in SPECS.items():
        np.testing.assert_allclose(state.params[name], expected.params[name], rtol=1e-4, atol=1e-6)
        trace, place = state.exchange.shared.trace[name], NamedSharding(state.params[name].sharding.mesh, spec)
        assert trace.sharding.is_equivalent_to(place, trace.ndim)


def test_axes_of_sums():
    """Every process makes the same program, whatever the order of its sets."""
    axes = ("data", "e", "d", "c", "b")  # ranks, and shards in an order that is not alphabetical
    mesh = jax.make_mesh((2, 2, 2, 1, 1), axes, axis_types=(AxisType.Auto,) * 5)
    sums = lambda x: At(Axes(("data",))).of_shards([x])[0]
    program = jax.make_jaxpr(jax.shard_map(sums, mesh=mesh, in_specs=P(axes), out_specs=P("data")))(jnp.ones(8))
    assert re.findall(r"psum\w*\[\s*axes=\(([^)]*)\)", str(program)) == ["'b', 'c', 'd', 'e'"]


def test_optimizers_that_want_the_loss():
    """Parameters may be Python numbers."""
    optimizer = optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau())
    with jax.numpy_dtype_promotion("standard"):
        state, (metrics,) = run(make(optimizer=optimizer), 1, {**PARAMS, "b": 0.5})
    assert state.opt_state[1].best_value == metrics.loss and state.params["b"].shape == ()


MESHES = {4: mesh_of(4), "model": jax.make_mesh((2, 4), ("data", "model"), axis_types=TWO)}


BAD_ARGUMENTS = {
    "make_train_step": [
        (dict(loss_fn=3), TypeError, "loss_fn", "3"),
        (dict(optimizer=3), TypeError, "optimizer", "3"),
        (dict(mesh_or_comm="data"), TypeError, "mesh_or_comm", "'data'"),
        (dict(sharding=cgx.Sharding("rows")), ValueError, "sharding.axis", "'rows'"),
        (dict(sharding=cgx.Sharding(())), ValueError, "sharding.axis", "()"),
        (dict(sharding="data"), TypeError, "sharding", "'data'"),
        (dict(accumulate=0), ValueError, "accumulate", "0"),
        (dict(has_aux=1), TypeError, "has_aux", "1"),
        (dict(donate="no"), TypeError, "donate", "'no'"),
        (dict(exchange=4), TypeError, "exchange", "4"),
        (dict(aux_specs="sum"), ValueError, "aux_specs", "'sum'"),
        (dict(overlap="forward"), ValueError, "overlap", "'forward'"),
        (dict(mesh_or_comm=MESHES["model"]), ValueError, "sharding.params", "None"),
        (
            dict(mesh_or_comm=MESHES["model"], sharding=cgx.Sharding(cgx.Tcp("data"), params=P())),
            ValueError,
            "sharding.axis",
            "Tcp",
            "'data'",
        ),
    ]
}


@pytest.mark.parametrize("row", rows(BAD_ARGUMENTS))
def test_bad_arguments(row):
    given = dict(loss_fn=loss_fn, optimizer=OPTIMIZER, mesh_or_comm=MESHES[4], exchange=CODEC)
    refused(*row, run=lambda options: cgx.make_train_step(**given | options))


MEAN = lambda w, x: (x @ w["w"]).mean()
NUMBERS = {**PARAMS, "n": jnp.int32(3)}


OF_ANOTHER_PLAN = make(cgx.Plan(CODEC, min_size=100)).init(PARAMS)
STATES = {
    "train.step": [
        ((OF_ANOTHER_PLAN, None), ValueError, "state .own.residuals['b']", "None"),
        (({"n": jnp.ones(3)}, None), TypeError, "state", "a dict"),
        (({"n": jnp.ones(3)}, cgx.Priority()), TypeError, "state", "a dict"),
        ((OPTIMIZER.init(PARAMS), None), TypeError, "state", "a tuple"),
        ((OPTIMIZER.init(PARAMS), cgx.Priority()), TypeError, "state", "a tuple"),
    ]
}
test_what_is_no_state_of_a_step = table(STATES, lambda given: make(overlap=given[1]).step(given[0], X))


WHAT_CANNOT_BE_TRAINED = {
    "make_train_step": [
        ((dict(loss=lambda w, x: (MEAN(w, x), x)), PARAMS), TypeError, "loss_fn", "a tuple", "has_aux=True"),
        ((dict(loss=MEAN, has_aux=True), PARAMS), ValueError, "loss_fn", "one that returns"),
        ((dict(loss=lambda w, x: x @ w["w"]), PARAMS), TypeError, "loss_fn", "float32[6, 40]", "mean"),
        ((dict(loss=lambda w, x: 3), PARAMS), TypeError, "loss_fn", "3"),
        (
            (dict(optimizer=optax.chain(cgx.compress_gradients("data", CODEC), OPTIMIZER)), PARAMS),
            ValueError,
            "optimizer",
            "one",
            "optax.adam",
        ),
        ((dict(accumulate=4), PARAMS), ValueError, "accumulate", "float32[6, 30]"),
    ],
    "train.init": [
        (({}, NUMBERS), ValueError, "params ['n']", "int32[]", "jaxcgx.Skip"),
        (({}, {**PARAMS, "act": jnp.tanh}), TypeError, "params ['act']", "<", "eqx.partition"),
    ],
}
test_what_cannot_be_trained = table(
    WHAT_CANNOT_BE_TRAINED, lambda given: run(make(**dict(exchange=cgx.Raw()) | given[0]), 1, given[1])
)
