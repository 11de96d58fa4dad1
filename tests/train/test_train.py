"""Tests that make_train_step gives the same as a step by hand, on meshes of every kind, with frozen parameters, too."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from errors import table
from exchanging import GRADS, exchange_state
from exchanging import run as run_exchange
from helpers import assert_close, assert_same_trees, mesh_with, sent
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from steps import run, tensor_parallel
from training import CODEC, NESTED, PARAMS, SHARDED, SPECS, STOCHASTIC, X, loss_fn, mesh_of
from training import train as by_hand

import jaxcgx as cgx
from jaxcgx.train.exchange import At
from jaxcgx.transports.xla import Axes

OPTIMIZER = optax.sgd(0.2, momentum=0.5)


def make(exchange=CODEC, loss=loss_fn, ranks=4, optimizer=OPTIMIZER, **options):
    return cgx.make_train_step(loss, optimizer, mesh_of(ranks), exchange, **options)


@pytest.mark.short
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_as_by_hand(axis_type):
    mesh, exchange = mesh_of(4, axis_type), cgx.Momentum(STOCHASTIC, 0.5, seed=3)
    state, metrics = run(cgx.make_train_step(loss_fn, optax.sgd(0.2), mesh, exchange))
    transformation = optax.chain(cgx.compress_gradients("data", exchange, axis_size=4), optax.sgd(0.2))
    params, (sent, rest), losses = by_hand(transformation)
    assert_same_trees((state.params, state.exchange, state.opt_state), (params, sent, rest))
    assert [float(m.loss) for m in metrics] == losses
    assert metrics[0].aux is metrics[0].telemetry is state.pending is None
    assert state.exchange.own.residuals["w"].addressable_shards[0].data.shape == (1, 30, 40)


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
    """The loss is traced once, and executed only by the compiled program. Micro-batches share an exchange."""

    def loss(params, x):
        traces.append(1)
        jax.debug.callback(lambda: calls.append(1))
        return loss_fn(params, x), {"mean": x.mean()}

    traces, calls = [], []
    train = make(exchange, loss, has_aux=True, accumulate=2)
    state, _ = run(train)
    jax.effects_barrier()
    assert len(traces) == train.step._cache_size() == 1 and len(calls) == 5 * 4 * 2
    explained = lambda train: cgx.explain(train.step, state, X, show=False).collectives
    sent = lambda train: [(c.operation, c.codec, c.times) for c in explained(train) if c.codec]
    assert sent(train) == sent(make(exchange, loss, has_aux=True)) and {times for *_, times in sent(train)} == {1}


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
    mesh = mesh_with(**dict(zip(axes, (2, 2, 2, 1, 1))))
    sums = lambda x: At(Axes(("data",))).of_shards([x])[0]
    program = jax.make_jaxpr(jax.shard_map(sums, mesh=mesh, in_specs=P(axes), out_specs=P("data")))(jnp.ones(8))
    assert re.findall(r"psum\w*\[\s*axes=\(([^)]*)\)", str(program)) == ["'b', 'c', 'd', 'e'"]


ON_RANKS = NamedSharding(mesh_of(4), P("data"))
CONSTRAINED = lambda params, x: loss_fn(params, jax.lax.with_sharding_constraint(x, ON_RANKS))
LEARNED_WEIGHT = lambda w, x: ((x @ w["w"]).mean(), w["w"].sum())
MODEL = mesh_with(data=2, model=4)
OVER_TCP = dict(mesh_or_comm=MODEL, sharding=cgx.Sharding(cgx.Tcp("data"), params=P()))
TWICE = optax.chain(cgx.compress_gradients("data", CODEC), OPTIMIZER)


def wrong(params=PARAMS, **options):
    """Returns the call of a step with some wrong arguments."""
    given = dict(loss_fn=loss_fn, optimizer=OPTIMIZER, mesh_or_comm=mesh_of(4), exchange=cgx.Raw()) | options
    return lambda: run(cgx.make_train_step(**given), 1, params)


OF_ANOTHER_PLAN = lambda: make(cgx.Plan(CODEC, min_size=100)).init(PARAMS)
COMPLEX = {"c": np.asarray(np.arange(8) * (1 + 2j), np.complex64), "w": np.ones(8, np.float32)}
GATHERED = cgx.Sharding(optimizer={"c": P("data"), "w": P("data")}, gather=cgx.Lossless())
ERRORS = {
    "Diloco": [(wrong(COMPLEX, exchange=cgx.wan.Diloco(cgx.Raw(), 1)), TypeError, "params ['c']", "complex64")],
    "make_train_step": [
        (wrong(COMPLEX, sharding=GATHERED), TypeError, "sharding.gather ['c']", "complex64"),
        (wrong(loss_fn=3), TypeError, "loss_fn", "3"),
        (wrong(optimizer=3), TypeError, "optimizer", "3"),
        (wrong(mesh_or_comm="data"), TypeError, "mesh_or_comm", "'data'"),
        (wrong(sharding=cgx.Sharding("rows")), ValueError, "sharding.axis", "'rows'"),
        (wrong(sharding=cgx.Sharding(())), ValueError, "sharding.axis", "()"),
        (wrong(sharding="data"), TypeError, "sharding", "'data'"),
        (wrong(accumulate=0), ValueError, "accumulate", "0"),
        (wrong(has_aux=1), TypeError, "has_aux", "1"),
        (wrong(donate="no"), TypeError, "donate", "'no'"),
        (wrong(exchange=4), TypeError, "exchange", "4"),
        (wrong(aux_specs="sum"), ValueError, "aux_specs", "'sum'"),
        (wrong(overlap="forward"), ValueError, "overlap", "'forward'"),
        (wrong(mesh_or_comm=MODEL), ValueError, "sharding.params", "None"),
        (wrong(**OVER_TCP), ValueError, "sharding.axis", "Tcp", "'data'"),
        (wrong(loss_fn=lambda w, x: x @ w["w"]), TypeError, "loss_fn", "float32[6, 40]", "mean"),
        (wrong(loss_fn=lambda w, x: 3), TypeError, "loss_fn", "3"),
        (wrong(loss_fn=LEARNED_WEIGHT, weighted=True), ValueError, "loss_fn", "one", "jax.lax.stop_gradient"),
        (wrong(optimizer=TWICE), ValueError, "optimizer", "one", "optax.adam"),
        (wrong(accumulate=4), ValueError, "accumulate", "float32[6, 30]"),
        (wrong(loss_fn=CONSTRAINED), ValueError, "loss_fn", "one", "PartitionSpec mesh"),
    ],
    "train.init": [
        (wrong({**PARAMS, "n": jnp.int32(3)}), ValueError, "params ['n']", "int32[]", "jaxcgx.Skip"),
        (wrong({**PARAMS, "act": jnp.tanh}), TypeError, "params ['act']", "<", "eqx.partition"),
    ],
    "train.step": [
        (lambda: make().step(OF_ANOTHER_PLAN(), X), ValueError, "state .own.residuals['b']", "None"),
        (lambda: make().step({"n": jnp.ones(3)}, X), TypeError, "state", "a dict"),
    ],
}
test_errors = table(ERRORS)


OPTAX = pytest.mark.usefixtures("promotion")


@OPTAX
def test_steps_of_complex_parameters_and_of_python_numbers_are_those_of_optax():
    loss = lambda params, x: jnp.mean(jnp.abs(params["c"] * x - params["n"]) ** 2) + jnp.mean(params["w"] ** 2)
    params, x = COMPLEX | {"n": 0.5}, np.arange(16, dtype=np.float32)[:, None] / 8
    state, _ = run(make(cgx.Lossless(), loss, 2, optax.sgd(0.1)), 1, params, x)
    expected = jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params, x))
    assert_close(state.params, expected, rtol=1e-5)


@OPTAX
def test_an_exchange_of_frozen_parameters():
    """Means are zeros, also with momentum and weight decay, and there is no state."""
    plan = cgx.Plan(cgx.TopK(0.5), [("w", cgx.Skip())], min_size=0, skip_1d=False)
    everything = dict(masking=True, weight_decay=0.1, beta=0.5, telemetry=True)
    ones = jax.tree.map(lambda g: jnp.ones(g.shape[1:]), GRADS)
    for mean, state in run_exchange(cgx.Momentum({0: plan, 5: plan}, 0.9, **everything), 2, params=ones):
        own, shared = (found := exchange_state(state)).own, found.shared
        assert not mean["w"].any() and mean["b"].any()
        for field in (own.residuals, own.momentum, shared.trace):
            assert field["w"] is None and field["b"] is not None
        sent = shared.telemetry
        assert sent.bytes["w"] == sent.uncompressed["w"] == 0 < sent.bytes["b"]


@jax.custom_vjp
def never_differentiated(x):
    return x


never_differentiated.defvjp(lambda x: (x, None), lambda _, ct: pytest.fail("a frozen parameter is differentiated"))


@OPTAX
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_frozen_parameters(kind):
    """Parameters act like constants of the loss, also with an optimizer that would change them without gradients."""
    params = {**PARAMS, "w ids": jnp.arange(40)}
    plan = cgx.Plan(cgx.Raw(), [("w", cgx.Skip())])
    mesh, optimizer = mesh_of(4, kind), optax.adamw(0.1, weight_decay=0.5)

    def loss(params, x):
        shuffled = {"w": never_differentiated(params["w"])[:, params["w ids"]], "b": params["b"]}
        return loss_fn(shuffled, x)

    train = cgx.make_train_step(loss, optimizer, mesh, cgx.Feedback(plan, telemetry=True), accumulate=2)
    expected, plain = {"b": params["b"]}, optimizer.init({"b": params["b"]})

    @jax.jit
    def plain_step(params, state):
        grads = jax.grad(lambda p: loss_fn({**PARAMS, **p}, X))(params)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    state = train.init(params)
    with_holes = optimizer.init({"b": PARAMS["b"], "w": None, "w ids": None})
    assert jax.tree.map(jnp.shape, state.opt_state) == jax.tree.map(jnp.shape, with_holes)
    for _ in range(3):
        state, metrics = train.step(state, X)
        expected, plain = plain_step(expected, plain)
    np.testing.assert_allclose(state.params["b"], expected["b"], rtol=1e-4, atol=1e-6)
    assert_same_trees((state.params["w"], state.params["w ids"]), (PARAMS["w"], params["w ids"]))
    assert metrics.telemetry.uncompressed["w"] == 0
    sent = cgx.explain(train.step, state, X, show=False)
    assert max(c.raw_bytes for c in sent.collectives) <= 2 * 4 * 40  # nothing as large as w
    assert {leaf.path: leaf.bytes for leaf in sent.raw} == {"['w']": 0, "['w ids']": 0, "['b']": 160}


@NESTED
@OPTAX
def test_frozen_shards():
    plan = cgx.Plan(cgx.MaxMin(4, 64), [("up", cgx.Skip())], min_size=0, skip_1d=False)
    state, _ = run(tensor_parallel(plan, 2), 5, SHARDED)
    residuals, trace = state.exchange.own.residuals, state.opt_state[0].trace
    assert_same_trees(state.params["up"], SHARDED["up"])
    assert residuals["up"] is None and trace["up"] is None
    assert residuals["down"].sharding.spec == P("data", "model")
    assert (state.params["down"] != SHARDED["down"]).any()
