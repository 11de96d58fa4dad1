"""Tests how make_train_step splits a batch over ranks and micro-batches, against one program for the whole batch."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from errors import refused, table
from helpers import assert_close, mesh_with, normal
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from training import NESTED, mesh_of

import jaxcgx as cgx

W = normal((8, 8), 1)
BATCH = {"x": normal((16, 8), 2), "y": jnp.asarray(np.arange(16, dtype=np.int32) % 8), "cw": jnp.arange(1.0, 9.0)}
SPECS = {"x": P("data"), "y": P("data"), "cw": P()}
EXPLICIT = mesh_of(4, AxisType.Explicit)


def loss_fn(w, batch):
    losses = optax.softmax_cross_entropy_with_integer_labels(batch["x"] @ w, batch["y"])
    return (losses * batch["cw"][batch["y"]]).mean()


def make(loss=loss_fn, mesh=None, exchange=cgx.Raw(), batch=None, params=None, **options):
    sharding, mesh = cgx.Sharding(batch=batch, params=params), mesh_of(4) if mesh is None else mesh
    return cgx.make_train_step(loss, optax.sgd(1.0), mesh, exchange, sharding=sharding, **options)


def step_of(loss=loss_fn, **options):
    """Returns a function of a batch that gives (loss, parameters) after a step of SGD."""
    train = make(loss, **options)

    def step(batch):
        state, metrics = train.step(train.init(W), batch)
        return metrics.loss, state.params

    return step


def put(specs):
    return {name: jax.device_put(BATCH[name], NamedSharding(EXPLICIT, specs[name])) for name in BATCH}


def plain(batch, loss=loss_fn):
    value, grads = jax.value_and_grad(loss)(W, batch)
    return value, W - grads


@pytest.mark.parametrize("accumulate", [1, 4])
def test_specs(accumulate):
    """Specs also work for arrays whose examples are along another dimension."""
    assert_close(step_of(batch=SPECS, accumulate=accumulate)(BATCH), plain(BATCH))
    turned = {**BATCH, "x": BATCH["x"].T}
    loss = lambda w, batch: loss_fn(w, {**batch, "x": batch["x"].T})
    step = step_of(loss, batch={**SPECS, "x": P(None, "data")}, accumulate=accumulate)
    assert_close(step(turned), plain(BATCH))


def test_types_say_it():
    """On an Explicit mesh, the types give the specs."""
    assert_close(step_of(mesh=EXPLICIT, accumulate=2)(put(SPECS)), plain(BATCH))


TURNED = {"x": jax.device_put(BATCH["x"][:8], NamedSharding(mesh_of(4), P(None, "data")))}
WITH_KEY = {**BATCH, "cw": jnp.ones(16), "key": jax.random.PRNGKey(0)}
TWO_SIZES = "leaves ['cw'] of float32[8] and ['x'] of float32[16, 8]"
BAD_BATCHES = {
    "train.step": [
        (lambda: step_of()(BATCH), ValueError, "batch", TWO_SIZES, "Sharding(batch=...)"),
        (lambda: step_of(mesh=EXPLICIT)(put(dict.fromkeys(SPECS, P()))), ValueError, "batch", TWO_SIZES),
        (lambda: step_of(mesh=EXPLICIT)(put({**SPECS, "y": P()})), ValueError, "batch ['y']", "int32[16]", "shard"),
        (lambda: step_of()(TURNED), ValueError, "batch ['x']", "", "Sharding(batch=...)"),
        (lambda: step_of()(WITH_KEY), ValueError, "batch", "leaves ['cw'] of float32[16]", "jax.random.key"),
    ]
}
test_bad_batches = table(BAD_BATCHES)


@NESTED
def test_meshes_with_axes_of_both_types():
    mesh = lambda *types: jax.make_mesh((2, 2), ("data", "model"), axis_types=types, devices=jax.devices()[:4])
    kinds = AxisType.Auto, AxisType.Explicit
    loss = lambda w, x: ((x @ w) ** 2).mean()
    assert_close(step_of(loss, mesh=mesh(*kinds), params=P(None, "model"))(BATCH["x"]), plain(BATCH["x"], loss))
    turned = lambda: step_of(mesh=mesh(*kinds[::-1]), params=P(None, "model"))
    refused("make_train_step", turned, ValueError, "mesh_or_comm", "one with 'model'", "axis_types=")


@NESTED
@pytest.mark.parametrize("options", [dict(exchange={0: cgx.Raw(), 1: cgx.MaxMin(8)}), dict(accumulate=2)], ids=str)
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_a_model_axis_with_a_schedule_of_plans_or_micro_batches(kind, options):
    mesh, loss = mesh_with(kind, data=2, model=2), lambda w, x: ((x @ w) ** 2).mean()
    assert_close(step_of(loss, mesh=mesh, params=P(None, "model"), **options)(BATCH["x"]), plain(BATCH["x"], loss))


BAD_SPECS = {
    "make_train_step": [
        ("data", TypeError, "sharding.batch ['cw']", "'data'"),
        ({"x": P("data")}, ValueError, "sharding.batch", "{'x'"),
    ]
}
test_bad_specs = table(BAD_SPECS, lambda given: step_of(batch=given)(BATCH))


# The last rank has no weight.
MASK = jnp.float32([0 if i in (0, 1, 5) or i > 10 else 0.1 + 0.06 * i for i in range(16)])


def sums(w, batch):
    return (((batch["x"] @ w) ** 2).mean(-1) * batch["mask"]).sum(), batch["mask"].sum()


def test_the_type_of_weighted_means():
    """It is that of the sum, also where JAX has numbers of 64 bits."""
    with jax.enable_x64(True):
        train = make(sums, weighted=True)
        state, metrics = jax.eval_shape(train.step, jax.eval_shape(train.init, W), {"x": BATCH["x"], "mask": MASK})
    assert state.params.dtype == metrics.loss.dtype == jnp.float32


def test_weighted_means_of_shards_with_auxiliary_outputs_and_a_model_state():
    """Averages of auxiliary outputs and of the state use the weights of the examples. Some ranks have no weight."""
    masked = lambda batch: (batch["x"].mean(-1) * batch["mask"]).sum() / batch["mask"].sum()

    def loss(w, state, batch):
        return sums(w, batch), (state + batch["x"].mean(), {"mean": masked(batch)})

    batch = {"x": BATCH["x"], "mask": MASK}
    train = make(loss, params=P("data"), weighted=True, has_aux=True, model_state="mean", accumulate=2)
    state, metrics = train.step(train.init(W, jnp.zeros(())), batch)
    assert_close((metrics.loss, state.params), plain(batch, lambda w, batch: jnp.divide(*sums(w, batch))))
    assert_close((state.model_state, metrics.aux["mean"]), (2 * batch["x"].mean(), masked(batch)))


@pytest.mark.parametrize("accumulate", [1, 2])
def test_auxiliary_outputs_of_each_example(accumulate):
    """Outputs with the examples in front are those of the whole batch. Specs say of others what they are."""

    def loss(w, batch):
        out = batch["x"] @ w
        aux = {"out": out, "turned": out.T, "y": batch["y"], "n": 8, "mean": out.mean()}
        aux |= {"square": out.T @ out / len(out), "hits": (batch["y"] == 0).sum(), "flag": jnp.bool_(True)}
        return (out**2).mean(), aux

    specs = {"out": None, "turned": P(None, "data"), "y": None, "n": P(), "mean": None, "square": None}
    train = make(loss, has_aux=True, accumulate=accumulate, aux_specs=specs | {"hits": "sum", "flag": "first"})
    _, metrics = train.step(train.init(W), {"x": BATCH["x"], "y": BATCH["y"]})
    out = BATCH["x"] @ W
    expected = {"out": out, "turned": out.T, "y": BATCH["y"], "n": jnp.int32(8), "mean": out.mean()}
    assert_close(metrics.aux, expected | {"square": out.T @ out / 16, "hits": jnp.int32(2), "flag": jnp.bool_(True)})


def test_a_batch_dimension_is_told_from_another():
    """Of a rank's 4 examples, an output [4] of features is no row of examples. The loss is traced twice for that."""

    def loss(w, x):
        traces.append(len(x))
        return (x @ w).mean(), {"features": (x @ w).mean(0)[:4], "rows": x[:, 0]}

    traces = []
    train = make(loss, has_aux=True)
    _, metrics = train.step(train.init(W), BATCH["x"])
    assert_close(metrics.aux, {"features": (BATCH["x"] @ W).mean(0)[:4], "rows": BATCH["x"][:, 0]})
    assert traces == [4, 8]


def step_with_aux(given):
    loss = lambda w, y: (w.sum() * y.mean(), given[0](y.astype(jnp.int32)))
    train = make(loss, has_aux=True, aux_specs=given[1])
    train.step(train.init(W), BATCH["y"].astype(jnp.float32))


BAD_AUX = {
    "make_train_step": [
        ((lambda y: y.reshape(4), None), ValueError, "loss_fn", "one that fails", "shapes"),
        ((lambda y: y, "max"), ValueError, "aux_specs", "'max'"),
        ((lambda y: y, {"y": "sum"}), ValueError, "aux_specs", "{'y': 'sum'}"),
    ]
}
test_auxiliary_outputs_that_are_refused = table(BAD_AUX, step_with_aux)
