"""Tests make_train_step with parameters (ZeRO-3, FSDP) or an optimizer's state (ZeRO-1) sharded over the ranks."""

import functools
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from errors import raises, says
from helpers import assert_same_trees, assert_trees, normal, sent
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from training import mesh_of

import jaxcgx as cgx

RANKS = 4
LAYER = {
    "up": normal((8, 20), 1, scale=0.3),
    "bias": jnp.zeros(20),
    "down": normal((20, 8), 2, scale=0.3),
    "one": jnp.float32(0.5),
}
X = normal((16, 8), 3)
FORMS = ["param_specs", "optimizer_specs"]
pytestmark = pytest.mark.usefixtures("standard_promotion")
CODEC = cgx.MaxMin(4, 64)
NOISE = cgx.MaxMin(4, 64, rounding="stochastic")
NESTED = pytest.mark.skipif(
    jax.__version_info__ < (0, 10), reason="jax 0.9 can't lower axis_index in a shard_map within a shard_map"
)


@pytest.fixture
def standard_promotion():
    """optax's adam relies on type promotion."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def loss_fn(params, x):
    hidden = jnp.tanh(x @ params["up"] + params["bias"])
    return ((hidden @ params["down"] * params["one"] - x[:, ::-1]) ** 2).mean()


def loss_of_all(params, x):
    return sum(loss_fn(layer, x) for layer in params.values())


def mesh_with(axis_type):
    return jax.make_mesh((RANKS,), ("data",), axis_types=(axis_type,), devices=jax.devices()[:RANKS])


def specs_of(params, mesh=None, axis="data"):
    return cgx.shard_specs(params, mesh_of(RANKS) if mesh is None else mesh, axis, min_size=20)


def run(train, params=LAYER, steps=3, x=X, key=None):
    params, state = train.init(params)
    for _ in range(steps):
        params, state, metrics = train.step(params, state, x, key)
    return params, state, metrics


def program(train, params=LAYER, x=X):
    return train.step.lower(*train.init(params), x).compile().as_text()


def assert_close(got, expected):
    assert_trees(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-6), got, expected)


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


@pytest.mark.short
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_plain_jax(form, axis_type):
    """Norms are those of whole arrays, leaves share messages, and all leaves are sent as bytes."""
    params = dict.fromkeys(OPTIMIZERS, LAYER)
    mesh = mesh_with(axis_type)
    train = cgx.make_train_step(loss_of_all, each_optimizer(), mesh, plan=cgx.Raw(), **{form: specs_of(params, mesh)})
    assert_close(run(train, params, 5)[0], by_jax())
    assert train.step._cache_size() == 1
    text = program(train, params)
    assert sent(text) == {("all-gather", "u8"), ("all-to-all", "u8"), ("all-reduce", "f32")}
    assert text.count(" all-to-all(") == 1
    # XLA may join it with the second gather.
    assert text.count(" all-gather(") in ((1, 2) if form == "param_specs" else (1,))
    summed = re.findall(r"= \(?(.*?)\)? all-reduce\(", text)
    assert set(re.findall(r"\w+\[[\d,]*\]", " ".join(summed))) == {"f32[]"}  # norms, the loss, and "one"


@pytest.mark.parametrize("form", FORMS)
def test_nothing_is_lost(form):
    """With a constant gradient, the updates plus the residuals of gradients and updates give the exact result."""
    params = {"cut": normal((8, 30), 1), "whole": normal((3, 3), 2)}
    x = {"cut": normal((RANKS, 8, 30), 3), "whole": normal((RANKS, 3, 3), 4)}
    loss = lambda p, x: sum((p[name] * x[name]).sum() for name in p)
    codec = cgx.MaxMin(2, 64)
    gather = cgx.Raw() if form == "param_specs" else codec
    options = dict(plan=codec, gather=gather, skip_nonfinite=True, telemetry=True)
    train = cgx.make_train_step(loss, optax.sgd(1.0), mesh_of(RANKS), **{form: specs_of(params)}, **options)
    after, (kept, _, *lost), metrics = run(train, params, 6, x)
    assert kept.residuals["cut"].shape == (RANKS, 8, 30) and kept.residuals["cut"].sharding.spec == P(("data",))
    for name in params:
        assert np.abs(kept.residuals[name]).max() > 0.1 and 0 < metrics.telemetry.vnmse[name] < 1
        total = np.float64(kept.residuals[name]).mean(0) + params[name] - after[name]
        if lost and name == "cut":
            assert lost[0][name].sharding.spec == P("data") and np.abs(lost[0][name]).max() > 0.1
            total -= lost[0][name]
        np.testing.assert_allclose(total, 6 * x[name].mean(0), atol=1e-4)
    assert len(lost) == (form == "optimizer_specs")


@pytest.mark.parametrize("form", FORMS)
def test_as_replicated(form):
    """Steps have micro-batches, auxiliary outputs and keys. A saved state continues with the same bits."""

    def loss(params, x, key):
        kept = jax.random.bernoulli(key, 0.8, x.shape)
        return loss_fn(params, x * kept), {"mean": x.mean(), "drawn": kept.mean()}

    options = dict(plan=cgx.Raw(), accumulate=2, has_aux=True)
    given = LAYER, 3, X, jax.random.key(5)
    params, _, metrics = run(cgx.make_train_step(loss, optax.adam(1e-2), mesh_of(RANKS), **options), *given)
    options |= {form: specs_of(LAYER), "gather": cgx.Plan(NOISE, rules=[("up|down", cgx.Raw())])}
    train = cgx.make_train_step(loss, optax.adam(1e-2), mesh_of(RANKS), **options)
    found = run(train, *given)
    assert_close(
        (found[0]["up"], found[0]["bias"], found[2].loss, found[2].aux),
        (params["up"], params["bias"], metrics.loss, metrics.aux),
    )
    for moment in (found[1][1][0].mu, found[1][1][0].nu):
        assert moment["up"].sharding.is_equivalent_to(NamedSharding(mesh_of(RANKS), P(None, "data")), 2)
    saved = jax.tree.map(lambda x: jax.device_put(np.asarray(x), x.sharding), found[:2])
    assert_same_trees(train.step(*saved, *given[2:])[0], train.step(*found[:2], *given[2:])[0])


def test_codecs_in_both_directions():
    """Every rank computes with the decoded weights. Each step has different noise."""
    found = []
    for form in FORMS:
        options = {form: specs_of(LAYER), "gather": NOISE, "plan": {0: NOISE, 2: CODEC}}
        train = cgx.make_train_step(loss_fn, optax.adam(3e-2), mesh_of(RANKS), **options)
        params, state, first = run(train, steps=1)
        assert sent(program(train)) == {("all-gather", "u8"), ("all-to-all", "u8"), ("all-reduce", "f32")}
        for _ in range(60):
            params, state, metrics = train.step(params, state, X)
        assert metrics.loss < 0.8 * first.loss
        found.append(float(first.loss))
    assert found[0] != found[1] == pytest.approx(float(loss_fn(LAYER, X)), rel=1e-5)
    whole = cgx.make_train_step(loss_fn, optax.adam(3e-2), mesh_of(RANKS), plan=CODEC, optimizer_specs=specs_of(LAYER))
    params, _, _ = run(whole, steps=2)
    for shard in params["up"].addressable_shards[1:]:
        np.testing.assert_array_equal(shard.data, params["up"].addressable_shards[0].data)


def test_weights_are_gathered_again():
    """By default weights are gathered again for the backward pass, as in FSDP. XLA joins both gathers on CPUs."""
    found = {}
    for regather in (True, False):
        options = dict(plan=CODEC, gather=CODEC, param_specs=specs_of(LAYER), regather=regather, accumulate=2)
        train = cgx.make_train_step(loss_fn, optax.sgd(0.1), mesh_of(RANKS), **options)
        params, state = train.init(LAYER)
        traced = str(jax.make_jaxpr(train.step._jitted)(params, state, X))
        in_loop = traced[traced.index(" scan[") :]
        found[regather] = run(train)[0], traced.count("= all_gather["), in_loop.count("= all_gather[")
    assert found[True][1:] == (2, 2) and found[False][1:] == (1, 0)
    assert_same_trees(found[True][0], found[False][0])


TWO_AXES = {"up": P("data", "model"), "bias": P("model"), "down": P("model", "data"), "one": P()}


@NESTED
@pytest.mark.parametrize("form", FORMS)
def test_other_axes(form):
    """Other axes are left to the partitioner, and each shard is compressed separately."""
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4])
    beside = {name: P(*(None if part == "data" else part for part in spec)) for name, spec in TWO_AXES.items()}
    specs = dict(param_specs=TWO_AXES) if form == "param_specs" else dict(param_specs=beside, optimizer_specs=TWO_AXES)
    exact = cgx.make_train_step(loss_fn, OPTIMIZERS["lamb"], mesh, plan=cgx.Raw(), **specs)
    expected = cgx.make_train_step(loss_fn, OPTIMIZERS["lamb"], mesh_of(RANKS), plan=cgx.Raw())
    params, state, _ = run(exact)
    assert_close(params, run(expected)[0])
    for name, spec in TWO_AXES.items():
        moment = state[1][0].mu[name]
        assert moment.sharding.is_equivalent_to(NamedSharding(mesh, spec), moment.ndim)
    train = cgx.make_train_step(loss_fn, OPTIMIZERS["lamb"], mesh, plan=CODEC, gather=CODEC, **specs)
    text = program(train)
    assert not {("all-gather", "f32"), ("reduce-scatter", "f32"), ("all-to-all", "f32")} & sent(text)


def test_a_tuple_of_axes():
    mesh = jax.make_mesh((2, 2), ("node", "local"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4])
    axes = ("node", "local")
    specs = specs_of(LAYER, mesh, axes)
    assert specs["up"] == P(None, axes)
    by_axis = {"node": CODEC, "local": cgx.Raw()}
    expected = run(cgx.make_train_step(loss_fn, optax.sgd(0.1), mesh_of(RANKS), plan=cgx.Raw()))[0]
    for options, tolerance in (
        (dict(plan=cgx.Raw()), 1e-6),
        (dict(plan=by_axis, gather=by_axis, feedback=False), 0.05),
    ):
        train = cgx.make_train_step(loss_fn, optax.sgd(0.1), mesh, data_axis=axes, param_specs=specs, **options)
        assert_trees(lambda a, b, t=tolerance: np.testing.assert_allclose(a, b, atol=t), run(train)[0], expected)


def test_a_hierarchy_has_no_feedback_of_slices():
    mesh = jax.make_mesh((2, 2), ("node", "local"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4])
    specs = specs_of(LAYER, mesh, ("node", "local"))
    words = says("compress_gradients", "plan", expected="one codec", got="a codec", remedy="feedback=False")
    with raises(ValueError, words):
        bad(mesh=mesh, data_axis=("node", "local"), param_specs=specs, plan={"node": CODEC, "local": cgx.Raw()})


def test_shard_specs():
    shapes = {"a": (6, 8, 4), "b": (8, 8), "small": (4,), "odd": (7, 9), "none": (), "empty": (0, 400)}
    params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    assert cgx.shard_specs(params, mesh_of(4), min_size=10) == {
        "a": P(None, "data"),
        "b": P("data"),
        "small": P(),
        "odd": P(),
        "none": P(),
        "empty": P(),
    }


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
        train = cgx.make_train_step(
            lambda p, x: (x @ p["w"]).sum(), optax.sgd(1e-3), mesh_of(RANKS), plan=plan, **options
        )
        shapes = jax.eval_shape(train.init, params), jnp.zeros((4, 1024))
        report = cgx.explain(train.step, *shapes[0], shapes[1], show=False)
        gathered = sum(c.bytes for c in report.collectives if c.operation == "all-gather")
        shown = f"{gathered:,}" if form else ""
        assert " ".join(f"| {codecs} | {report.bytes:,} | {shown} |".split()) in page, codecs


def bad(**options):
    return cgx.make_train_step(
        **{"loss_fn": loss_fn, "optimizer": optax.sgd(0.1), "mesh": mesh_of(RANKS), "plan": CODEC, **options}
    )


SPECS = {"up": P(None, "data"), "bias": P(), "down": P("data"), "one": P()}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            dict(param_specs={**SPECS, "up": P("data", "data")}),
            says("make_train_step", "param_specs", at="leaf ['up']", expected="'data' one dimension"),
        ),
        (
            dict(optimizer_specs={**SPECS, "up": P(("data", "model"))}),
            says("make_train_step", "optimizer_specs", at="leaf ['up']", expected="'data' one dimension alone"),
        ),
        (
            dict(param_specs=SPECS, optimizer_specs={**SPECS, "up": P("data")}),
            says("make_train_step", "optimizer_specs", at="leaf ['up']", expected="parameter"),
        ),
        (
            dict(param_specs=SPECS, optimizer_specs={"up": P()}),
            says("make_train_step", "optimizer_specs", expected="tree param_specs", got="PyTreeDef"),
        ),
        (
            dict(param_specs=SPECS, compress=cgx.dgc, plan=None),
            says(
                "make_train_step",
                "compress",
                expected="jaxcgx.compress_gradients 'data'",
                got="dgc",
                remedy="plan= whole",
            ),
        ),
        (
            dict(param_specs=SPECS, momentum=0.9),
            says("compress_gradients", "momentum", expected="None 'data'", got="0.9", remedy="optimizer"),
        ),
        (
            dict(param_specs=SPECS, plan=cgx.PowerSGD(2)),
            says("compress_gradients", "plan", expected="slices", got="PowerSGD(rank=2)", remedy="jaxcgx.MaxMin(4)"),
        ),
        (
            dict(param_specs=SPECS, plan=cgx.Plan(CODEC, leader=True)),
            says("compress_gradients", "leader", expected="False", got="True", remedy="slices"),
        ),
        (
            dict(param_specs=SPECS, gather=cgx.TopK(0.1)),
            says(
                "make_train_step", "gather", expected="every element", got="TopK(ratio=0.1)", remedy="jaxcgx.MaxMin(8)"
            ),
        ),
        (
            dict(gather=cgx.MaxMin(8)),
            says("make_train_step", "gather", expected="to gather", got="none", remedy="param_specs="),
        ),
    ],
)
def test_bad_arguments(options, words):
    with raises(ValueError, words):
        bad(**options)


@pytest.mark.parametrize("form", FORMS)
def test_dimensions_that_ranks_do_not_divide(form):
    words = says(
        "make_train_step", form, at="leaf ['bias']", expected="4 divide", got="dimension", remedy="jaxcgx.shard_specs"
    )
    with raises(ValueError, words):
        bad(**{form: {**SPECS, "bias": P("data")}}).init({**LAYER, "bias": jnp.zeros(21)})


def test_rules_of_the_gather_that_hold_for_no_leaf():
    gather = cgx.Plan(cgx.Raw(), rules=[("kernel", CODEC)])
    with raises(ValueError, says("make_train_step", "gather", expected="leaf every rule", got="none")):
        bad(param_specs=SPECS, gather=gather).init(LAYER)


@pytest.mark.parametrize("form", FORMS)
def test_frozen_parameters_and_a_model_state(form):
    """Frozen parameters may be sharded, too. They are gathered for the loss, and nothing else is sent for them."""

    def loss(params, state, x):
        return loss_fn(params, x - state["mean"]), {**state, "mean": 0.9 * state["mean"] + 0.1 * x.mean(0)}

    plan, found = cgx.Plan(cgx.Raw(), rules=[("up", cgx.Skip())]), {}
    sharded = {form: specs_of(LAYER), "gather": cgx.Raw() if form == "param_specs" else CODEC}
    for name, options in {"whole": {}, form: sharded}.items():
        train = cgx.make_train_step(loss, optax.adam(1e-2), mesh_of(RANKS), plan=plan, model_state="mean", **options)
        params, model_state, state = train.init(LAYER, {"mean": jnp.zeros(8), "key": jax.random.key(3)})
        for _ in range(3):
            params, model_state, state, _ = train.step(params, model_state, state, X)
        assert model_state.pop("key") == jax.random.key(3)  # the loss left it unchanged
        found[name] = params, model_state
        np.testing.assert_array_equal(params["up"], LAYER["up"])
    if form == "optimizer_specs":
        assert {name for name, lost in state[2].items() if lost is not None} == {"bias", "down"}
    assert_trees(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-3), found["whole"], found[form])
