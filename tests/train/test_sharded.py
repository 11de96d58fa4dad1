"""Tests make_train_step with parameters (ZeRO-3, FSDP) or an optimizer's state (ZeRO-1) sharded over the ranks."""

import functools
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from errors import raises, says, table
from helpers import assert_close, assert_same_trees, assert_trees, mesh_with, normal, sent
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from steps import run as run_steps
from training import NESTED, mesh_of

import jaxcgx as cgx

RANKS = 4
LAYER = {
    "up": normal((8, 20), 1, scale=0.3),
    "bias": jnp.zeros(20),
    "down": normal((20, 8), 2, scale=0.3),
    "one": jnp.float32(0.5),
}
X = normal((16, 8), 3)
FORMS = ["params", "optimizer"]
pytestmark = pytest.mark.usefixtures("promotion")
CODEC = cgx.MaxMin(4, 64)
NOISE = cgx.MaxMin(4, 64, rounding="stochastic")


def loss_fn(params, x):
    hidden = jnp.tanh(x @ params["up"] + params["bias"])
    return ((hidden @ params["down"] * params["one"] - x[:, ::-1]) ** 2).mean()


def loss_of_all(params, x):
    return sum(loss_fn(layer, x) for layer in params.values())


def specs_of(params, mesh=None, axis="data"):
    return cgx.shard_specs(params, mesh_of(RANKS) if mesh is None else mesh, axis, min_size=20)


def make(exchange, tx=None, loss=loss_fn, mesh=None, axis="data", gather=cgx.Raw(), regather=True, **options):
    """Returns a step. `options` may have the specs of a Sharding."""
    specs = {form: options.pop(form) for form in FORMS if form in options}
    sharding, mesh = cgx.Sharding(axis, gather=gather, regather=regather, **specs), mesh or mesh_of(RANKS)
    return cgx.make_train_step(loss, tx or optax.sgd(0.1), mesh, exchange, sharding=sharding, **options)


def run(train, params=LAYER, steps=3, x=X, key=None):
    state, metrics = run_steps(train, steps, params, x, key)
    return state, metrics[-1]


def program(train, params=LAYER, x=X):
    return train.step.lower(train.init(params), x).compile().as_text()


OPTIMIZERS = {
    "adam": optax.adam(1e-2),
    "clipped": optax.chain(optax.clip_by_global_norm(0.05), optax.adamw(1e-2, weight_decay=0.1)),
    "lamb": optax.lamb(1e-2),
}


@functools.cache
def by_jax():
    """Returns the parameters after five steps of plain JAX with each optimizer."""

    @jax.jit
    def step(params, state):
        grads = jax.grad(loss_of_all)(params, X)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    optimizer = each_optimizer()
    params = dict.fromkeys(OPTIMIZERS, LAYER)
    state = optimizer.init(params)
    for _ in range(5):
        params, state = step(params, state)
    return params


def each_optimizer():
    """Returns an optimizer that uses every optimizer for one layer, so that one program has all."""
    return optax.multi_transform(OPTIMIZERS, {name: dict.fromkeys(LAYER, name) for name in OPTIMIZERS})


@pytest.mark.parametrize(
    "axis_type", [AxisType.Auto, pytest.param(AxisType.Explicit, marks=pytest.mark.short)], ids=str
)
@pytest.mark.parametrize("form", FORMS)
def test_plain_jax(form, axis_type):
    """Norms are those of whole arrays, leaves share messages, and all leaves are sent as bytes."""
    params = dict.fromkeys(OPTIMIZERS, LAYER)
    mesh = mesh_of(RANKS, axis_type)
    train = make(cgx.Raw(), each_optimizer(), loss_of_all, mesh, **{form: specs_of(params, mesh)})
    assert_close(run(train, params, 5)[0].params, by_jax(), atol=2e-6)
    assert train.step._cache_size() == 1
    text = program(train, params)
    assert sent(text) == {("all-gather", "u8"), ("all-to-all", "u8"), ("all-reduce", "f32")}
    assert text.count(" all-to-all(") == 1
    # XLA may join it with the second gather.
    assert text.count(" all-gather(") in ((1, 2) if form == "params" else (1,))
    summed = re.findall(r"= \(?(.*?)\)? all-reduce\(", text)
    assert set(re.findall(r"\w+\[[\d,]*\]", " ".join(summed))) == {"f32[]", "f32[3]"}  # norms, the loss, and all "one"


@pytest.mark.parametrize(
    ("form", "kind"), [("params", AxisType.Auto), ("optimizer", AxisType.Auto), ("optimizer", AxisType.Explicit)]
)
def test_nothing_is_lost(form, kind):
    """With a constant gradient, the updates plus the residuals of gradients and updates give the exact result."""
    params = {"cut": normal((8, 30), 1), "whole": normal((3, 3), 2)}
    x = {"cut": normal((RANKS, 8, 30), 3), "whole": normal((RANKS, 3, 3), 4)}
    loss = lambda p, x: sum((p[name] * x[name]).sum() for name in p)
    gather = cgx.Raw() if form == "params" else cgx.MaxMin(2, 64, "stochastic")
    exchange = cgx.Feedback(cgx.MaxMin(2, 64), skip_nonfinite=True, telemetry=True)
    train = make(exchange, optax.sgd(1.0), loss, mesh_of(RANKS, kind), gather=gather, **{form: specs_of(params)})
    state, metrics = run(train, params, 6, x)
    residuals, lost = state.exchange.own.residuals, state.lost
    shard = lambda x: x.sharding.shard_shape(x.shape)
    assert shard(residuals["cut"]) == (1, 8, 30)
    for name in params:
        assert np.abs(residuals[name]).max() > 0.1 and 0 < metrics.telemetry.vnmse[name] < 1
        total = np.float64(residuals[name]).mean(0) + params[name] - state.params[name]
        if lost and name == "cut":
            assert shard(lost[name]) == (8 // RANKS, 30) and np.abs(lost[name]).max() > 0.1
            total -= lost[name]
        np.testing.assert_allclose(total, 6 * x[name].mean(0), atol=1e-4)
    assert (lost is not None) == (form == "optimizer")


@pytest.mark.parametrize("form", FORMS)
def test_as_replicated(form):
    """Steps have micro-batches, auxiliary outputs and keys. A saved state continues with the same bits."""

    def loss(params, x, key):
        kept = jax.random.bernoulli(key, 0.8, x.shape)
        return loss_fn(params, x * kept), {"mean": x.mean(), "drawn": kept.mean()}

    options, given = dict(loss=loss, accumulate=2, has_aux=True), (LAYER, 3, X, jax.random.key(5))
    whole, metrics = run(make(cgx.Raw(), optax.adam(1e-2), **options), *given)
    options |= {form: specs_of(LAYER), "gather": cgx.Plan(NOISE, rules=[("up|down", cgx.Raw())])}
    train = make(cgx.Raw(), optax.adam(1e-2), **options)
    state, found = run(train, *given)
    of = lambda state, metrics: (state.params["up"], state.params["bias"], metrics.loss, metrics.aux)
    assert_close(of(state, found), of(whole, metrics), atol=2e-6)
    for moment in (state.opt_state[0].mu, state.opt_state[0].nu):
        assert moment["up"].sharding.is_equivalent_to(NamedSharding(mesh_of(RANKS), P(None, "data")), 2)
    saved = jax.tree.map(lambda x: jax.device_put(np.asarray(x), x.sharding), state)
    assert_same_trees(train.step(saved, *given[2:])[0].params, train.step(state, *given[2:])[0].params)


def test_weights_are_gathered_again():
    """By default weights are gathered again for the backward pass, as in FSDP. XLA joins both gathers on CPUs."""
    found = {}
    for regather in (True, False):
        train = make(CODEC, gather=CODEC, params=specs_of(LAYER), regather=regather, accumulate=2)
        traced = str(jax.make_jaxpr(train.step._jitted)(train.init(LAYER), X))
        in_loop = traced[traced.index(" scan[") :]
        found[regather] = run(train)[0].params, traced.count("= all_gather["), in_loop.count("= all_gather[")
    assert found[True][1:] == (2, 2) and found[False][1:] == (1, 0)
    assert_same_trees(found[True][0], found[False][0])


TWO_AXES = {"up": P("data", "model"), "bias": P("model"), "down": P("model", "data"), "one": P()}


@NESTED
@pytest.mark.parametrize("form", FORMS)
def test_other_axes(form):
    """Other axes are left to the partitioner, and each shard is compressed separately."""
    mesh = mesh_with(data=2, model=2)
    beside = {name: P(*(None if part == "data" else part for part in spec)) for name, spec in TWO_AXES.items()}
    specs = dict(params=TWO_AXES) if form == "params" else dict(params=beside, optimizer=TWO_AXES)
    lamb = OPTIMIZERS["lamb"]
    state, _ = run(make(cgx.Raw(), lamb, mesh=mesh, **specs))
    assert_close(state.params, run(make(cgx.Raw(), lamb))[0].params, atol=2e-6)
    for name, spec in TWO_AXES.items():
        moment = state.opt_state[0].mu[name]
        assert moment.sharding.is_equivalent_to(NamedSharding(mesh, spec), moment.ndim)
    text = program(make(CODEC, lamb, mesh=mesh, gather=CODEC, **specs))
    assert not {("all-gather", "f32"), ("reduce-scatter", "f32"), ("all-to-all", "f32")} & sent(text)


def test_a_tuple_of_axes():
    mesh, axes = mesh_with(node=2, local=2), ("node", "local")
    specs = specs_of(LAYER, mesh, axes)
    assert specs["up"] == P(None, axes)
    by_axis, options = {"node": CODEC, "local": cgx.Raw()}, dict(mesh=mesh, axis=axes, params=specs)
    expected, lossy = run(make(cgx.Raw()))[0].params, cgx.Feedback(by_axis, keep=False)
    for exchange, gather, near in (cgx.Raw(), cgx.Raw(), 1e-6), (lossy, by_axis, 0.05):
        found = run(make(exchange, gather=gather, **options))[0].params
        assert_trees(lambda a, b: np.testing.assert_allclose(a, b, atol=near), found, expected)
    # A hierarchy has no feedback of slices.
    with raises(ValueError, says("make_train_step", "exchange", got="a codec", remedy="no residuals")):
        run(make(by_axis, **options))


def test_shard_specs():
    shapes = {"a": (6, 8, 4), "b": (8, 8), "small": (4,), "odd": (7, 9), "none": (), "empty": (0, 400)}
    params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    expected = dict.fromkeys(shapes, P()) | {"a": P(None, "data"), "b": P("data")}
    assert cgx.shard_specs(params, mesh_of(4), min_size=10) == expected


def test_what_a_step_sends():
    """The table of docs/fsdp.md. Each row of both forms is tested with one of them, and the last row with both."""
    page = (pathlib.Path(__file__).parents[2] / "docs/fsdp.md").read_text()
    params = {"w": jax.ShapeDtypeStruct((1024, 1024), jnp.float32)}
    raw, four, eight, half = cgx.Raw(), cgx.MaxMin(4), cgx.MaxMin(8), cgx.Cast("bfloat16")
    first, second = FORMS
    for form, plan, gather, codecs in (
        (None, raw, None, "neither | `Raw()`"),
        (None, four, None, "neither | `MaxMin(4)`"),
        (first, raw, raw, "either | `Raw()`, `Raw()`"),
        (second, four, raw, "either | `MaxMin(4)`, `Raw()`"),
        (first, four, half, 'either | `MaxMin(4)`, `Cast("bfloat16")`'),
        (first, four, eight, "either | `MaxMin(4)`, `MaxMin(8)`"),
        (second, four, eight, "either | `MaxMin(4)`, `MaxMin(8)`"),
    ):
        options = {form: specs_of(params), "gather": gather} if form else {}
        train = make(plan, optax.sgd(1e-3), lambda p, x: (x @ p["w"]).sum(), **options)
        report = cgx.explain(train.step, jax.eval_shape(train.init, params), jnp.zeros((4, 1024)), show=False)
        gathered = sum(c.bytes for c in report.collectives if c.operation == "all-gather")
        shown = f"{gathered:,}" if form else ""
        assert " ".join(f"| {codecs} | {report.bytes:,} | {shown} |".split()) in page, codecs


SPECS = {"up": P(None, "data"), "bias": P(), "down": P("data"), "one": P()}
CUT = {**SPECS, "one": P("data")}
LEADS, LOW = cgx.Plan(CODEC, leader=True), cgx.PowerSGD(2)
gathered = lambda plan: dict(params=SPECS, gather=plan)
BAD_ARGUMENTS = {
    "make_train_step": [
        ((CODEC, dict(params={**SPECS, "up": P("data", "data")})), ValueError, "sharding.params ['up']"),
        ((CODEC, dict(optimizer={**SPECS, "up": P(("data", "model"))})), ValueError, "sharding.optimizer ['up']"),
        ((CODEC, dict(params=SPECS, optimizer={**SPECS, "up": P("data")})), ValueError, "sharding.optimizer ['up']"),
        ((CODEC, dict(params=SPECS, optimizer={"up": P()})), ValueError, "sharding.optimizer", "PyTreeDef"),
        ((cgx.DGC(), dict(params=SPECS)), ValueError, "exchange", "DGC", "whole"),
        ((cgx.Momentum(CODEC, 0.9), dict(params=SPECS)), ValueError, "exchange", "Momentum", "optimizer"),
        ((LOW, dict(params=SPECS)), ValueError, "exchange ['down']", "PowerSGD(rank=2)", "jaxcgx.MaxMin(4)"),
        ((LEADS, dict(params=SPECS)), ValueError, "exchange", "leader=True", "slices"),
        ((CODEC, gathered(cgx.TopK(0.1))), ValueError, "sharding.gather", "TopK(ratio=0.1)", "jaxcgx.MaxMin(8)"),
        ((CODEC, dict(gather=cgx.MaxMin(8))), ValueError, "sharding.gather", "none", "Sharding(params="),
        ((CODEC, gathered(cgx.Plan(CODEC, rules=[("kernel", CODEC)]))), ValueError, "sharding.gather", "none"),
        ((CODEC, dict(params=CUT)), ValueError, "sharding.params ['one']", "", "jaxcgx.shard_specs"),
        ((CODEC, dict(optimizer=CUT)), ValueError, "sharding.optimizer ['one']", "", "jaxcgx.shard_specs"),
    ]
}
test_bad_arguments = table(BAD_ARGUMENTS, lambda given: run(make(given[0], **given[1])))


@pytest.mark.parametrize("form", FORMS)
def test_frozen_parameters_and_a_model_state(form):
    """Frozen parameters may be sharded, too. They are gathered for the loss, and nothing else is sent for them."""

    def loss(params, state, x):
        return loss_fn(params, x - state["mean"]), {**state, "mean": 0.9 * state["mean"] + 0.1 * x.mean(0)}

    plan, found = cgx.Plan(cgx.Raw(), rules=[("up", cgx.Skip())]), {}
    sharded = {form: specs_of(LAYER), "gather": cgx.Raw() if form == "params" else CODEC}
    start = {"mean": jnp.zeros(8), "key": jax.random.key(3)}
    for name, options in {"whole": {}, form: sharded}.items():
        train = make(plan, optax.adam(1e-2), loss, model_state="mean", **options)
        state, _ = run_steps(train, 3, LAYER, X, model_state=start)
        assert state.model_state.pop("key") == jax.random.key(3)  # the loss left it unchanged
        found[name] = state.params, state.model_state
        np.testing.assert_array_equal(state.params["up"], LAYER["up"])
    if form == "optimizer":
        assert {name for name, lost in state.lost.items() if lost is not None} == {"bias", "down"}
    assert_trees(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-3), found["whole"], found[form])
