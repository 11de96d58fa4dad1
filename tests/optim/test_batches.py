"""Tests how make_train_step splits a batch over ranks and micro-batches, against one program for the whole batch."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from errors import raises, says
from helpers import assert_trees, normal
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from training import NESTED, mesh_of

import jaxcgx as cgx

W = normal((8, 8), 1)
BATCH = {"x": normal((16, 8), 2), "y": jnp.arange(16) % 8, "cw": jnp.arange(1.0, 9.0)}
SPECS = {"x": P("data"), "y": P("data"), "cw": P()}
EXPLICIT = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:4])
ONE = says(
    "train.step",
    "batch",
    expected="first dimension",
    got="leaves ['cw'] of float32[8] and ['x'] of float32[16, 8]",
    remedy="batch_specs make_train_step",
)


def loss_fn(w, batch):
    losses = optax.softmax_cross_entropy_with_integer_labels(batch["x"] @ w, batch["y"])
    return (losses * batch["cw"][batch["y"]]).mean()


def close(found, expected):
    assert_trees(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), found, expected)


def step_of(loss=loss_fn, mesh=None, **options):
    """Returns a function of a batch that gives (loss, parameters) after a step of SGD."""
    mesh = mesh_of(4) if mesh is None else mesh
    train = cgx.make_train_step(loss, optax.sgd(1.0), mesh, **{"plan": cgx.Raw()} | options)

    def step(batch, key=None):
        params, _, metrics = train.step(*train.init(W), batch, key)
        return metrics.loss, params

    return step


def plain(batch, loss=loss_fn):
    value, grads = jax.value_and_grad(loss)(W, batch)
    return value, W - grads


@pytest.mark.parametrize("accumulate", [1, 4])
def test_specs(accumulate):
    """Specs also work for arrays whose examples are along another dimension."""
    close(step_of(batch_specs=SPECS, accumulate=accumulate)(BATCH), plain(BATCH))
    turned = {**BATCH, "x": BATCH["x"].T}
    loss = lambda w, batch: loss_fn(w, {**batch, "x": batch["x"].T})
    step = step_of(loss, batch_specs={**SPECS, "x": P(None, "data")}, accumulate=accumulate)
    close(step(turned), plain(BATCH))


def test_types_say_it():
    """On an Explicit mesh, the types give the specs. Types that make no sense are an error."""
    put = lambda specs: {name: jax.device_put(BATCH[name], NamedSharding(EXPLICIT, specs[name])) for name in BATCH}
    close(step_of(mesh=EXPLICIT, accumulate=2)(put(SPECS)), plain(BATCH))
    with raises(ValueError, ONE):
        step_of(mesh=EXPLICIT)(put(dict.fromkeys(SPECS, P())))
    with raises(ValueError, says("train.step", "batch", expected="first how split", got="leaves ['x']")):
        step_of(mesh=EXPLICIT)(put({**SPECS, "y": P()}))


def test_arrays_that_are_not_all_split_along_their_first_dimension():
    with raises(ValueError, ONE):
        step_of()(BATCH)
    turned = {"x": jax.device_put(BATCH["x"][:8], NamedSharding(mesh_of(4), P(None, "data")))}
    with raises(ValueError, says("train.step", "batch", at="leaf ['x']", expected="first", remedy="batch_specs")):
        step_of()(turned)
    key = jax.random.PRNGKey(0)
    words = says("train.step", "batch", expected="first", got="leaves ['cw'] of float32[16]", remedy="jax.random.key")
    with raises(ValueError, words):
        step_of()({**BATCH, "cw": jnp.ones(16), "key": key})
    with raises(ValueError, says("train.step", "batch", at="leaf ['x']", expected="4 evenly", got="float32[15, 8]")):
        step_of()({"x": BATCH["x"][:15], "y": BATCH["y"][:15], "cw": 1.0})


@NESTED
def test_meshes_with_axes_of_both_types():
    mesh = lambda *types: jax.make_mesh((2, 2), ("data", "model"), axis_types=types, devices=jax.devices()[:4])
    kinds = AxisType.Auto, AxisType.Explicit
    loss = lambda w, x: ((x @ w) ** 2).mean()
    close(step_of(loss, mesh=mesh(*kinds), param_specs=P(None, "model"))(BATCH["x"]), plain(BATCH["x"], loss))
    words = says("make_train_step", "mesh", expected="all Auto Explicit", got="one with 'model'", remedy="axis_types=")
    with raises(ValueError, words):
        step_of(mesh=mesh(*kinds[::-1]), param_specs=P(None, "model"))


@NESTED
@pytest.mark.parametrize("options", [dict(plan={0: cgx.Raw(), 1: cgx.MaxMin(8)}), dict(accumulate=2)], ids=str)
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_a_model_axis_with_a_schedule_of_plans_or_micro_batches(kind, options):
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(kind,) * 2, devices=jax.devices()[:4])
    loss = lambda w, x: ((x @ w) ** 2).mean()
    close(step_of(loss, mesh=mesh, param_specs=P(None, "model"), **options)(BATCH["x"]), plain(BATCH["x"], loss))


@pytest.mark.parametrize(
    ("specs", "error", "words"),
    [
        ("data", TypeError, says("make_train_step", "batch_specs", expected="PartitionSpec tree", got="'data'")),
        (P("model"), ValueError, says("make_train_step", "batch_specs", expected="'data'", got="'model'")),
        ({"x": P("data")}, ValueError, says("make_train_step", "batch_specs", expected="tree batch", got="{'x'")),
        (
            P(None, None, "data"),
            ValueError,
            says("make_train_step", "batch_specs", at="leaf ['cw']", expected="at most 1 dimensions"),
        ),
    ],
    ids=str,
)
def test_bad_specs(specs, error, words):
    with raises(error, words):
        step_of(batch_specs=specs)(BATCH)


MASK = jnp.linspace(0.1, 1.0, 16).at[jnp.array([0, 1, 5, *range(11, 16)])].set(0.0)  # the last rank has no weight


def sums(w, batch):
    return (((batch["x"] @ w) ** 2).mean(-1) * batch["mask"]).sum(), batch["mask"].sum()


@pytest.mark.parametrize("accumulate", [1, 4])
def test_weighted_means(accumulate):
    """Means are over all ranks and micro-batches, some of which have no weight."""
    batch = {"x": BATCH["x"], "mask": MASK}
    close(
        step_of(sums, weighted=True, accumulate=accumulate)(batch),
        plain(batch, lambda w, batch: jnp.divide(*sums(w, batch))),
    )


def test_the_type_of_weighted_means():
    """It is that of the sum, also where JAX has numbers of 64 bits."""
    with jax.enable_x64(True):
        train = cgx.make_train_step(sums, optax.sgd(1.0), mesh_of(4), plan=cgx.Raw(), weighted=True)
        given = jax.eval_shape(train.init, W), {"x": BATCH["x"], "mask": MASK}
        params, _, metrics = jax.eval_shape(train.step, *given[0], given[1])
    assert params.dtype == metrics.loss.dtype == jnp.float32


def test_weighted_means_of_shards_with_auxiliary_outputs_and_a_model_state():
    """Averages of auxiliary outputs and of the state use the weights of the examples. Some ranks have no weight."""
    masked = lambda batch: (batch["x"].mean(-1) * batch["mask"]).sum() / batch["mask"].sum()

    def loss(w, state, batch):
        return sums(w, batch), (state + batch["x"].mean(), {"mean": masked(batch)})

    batch = {"x": BATCH["x"], "mask": MASK}
    options = dict(plan=cgx.Raw(), weighted=True, has_aux=True, model_state="mean", param_specs=P("data"), accumulate=2)
    train = cgx.make_train_step(loss, optax.sgd(1.0), mesh_of(4), **options)
    params, state, _, metrics = train.step(*train.init(W, jnp.zeros(())), batch)
    close((metrics.loss, params), plain(batch, lambda w, batch: jnp.divide(*sums(w, batch))))
    close((state, metrics.aux["mean"]), (2 * batch["x"].mean(), masked(batch)))


@pytest.mark.parametrize(
    ("loss", "error", "words"),
    [
        (
            lambda w, x: (w.sum(), jnp.abs(w).sum()),
            ValueError,
            says("make_train_step", "loss_fn", expected="weight parameters", got="one", remedy="jax.lax.stop_gradient"),
        ),
        (
            lambda w, x: (x @ w).mean(),
            ValueError,
            says("make_train_step", "loss_fn", expected="((sum, weight))", got="one"),
        ),
        (
            lambda w, x: ((x @ w).sum(), x),
            TypeError,
            says("make_train_step", "loss_fn", expected="weight number", got="float32[4, 8]"),
        ),
    ],
)
def test_bad_weights(loss, error, words):
    with raises(error, words):
        step_of(loss, weighted=True)(BATCH["x"])


@pytest.mark.parametrize("accumulate", [1, 2])
def test_auxiliary_outputs_of_each_example(accumulate):
    """The examples may be along any dimension.

    The outputs are those of the whole batch. Outputs that don't depend on the batch are unchanged.
    """

    def loss(w, batch):
        @jax.jit
        def count(n, row):  # integers go through loops and inner programs together with the batch
            return jax.lax.scan(lambda n, x: (n + 1, x * 2), n, row)

        n, twice = count(jnp.int32(0), batch["x"][0])
        out = batch["x"] @ w
        return (out**2).mean() + 0 * twice.sum(), {
            "out": out,
            "turned": out.T,
            "y": batch["y"],
            "n": n,
            "mean": out.mean(),
        }

    train = cgx.make_train_step(loss, optax.sgd(1.0), mesh_of(4), plan=cgx.Raw(), has_aux=True, accumulate=accumulate)
    *_, metrics = train.step(*train.init(W), {"x": BATCH["x"], "y": BATCH["y"]})
    out = BATCH["x"] @ W
    close(metrics.aux, {"out": out, "turned": out.T, "y": BATCH["y"], "n": jnp.int32(8), "mean": out.mean()})


AUX = dict(has_aux=True)
STATE = dict(model_state="mean")


@pytest.mark.parametrize(
    ("found", "options", "words"),
    [
        (lambda y: (y == 0).sum(), AUX, dict(expected="means row", got="int32[]", remedy="return mean")),
        (lambda y: len(y), AUX, dict(expected="number of examples", got="4 of a rank's part, 16 of all")),
        (lambda y: len(y) * jax.lax.axis_size("data") // 8, AUX, None),
        (lambda y: jax.lax.psum(len(y), "data") // 4, dict(AUX, accumulate=2), None),
        (lambda y: jnp.outer(y, y), AUX, dict(expected="along one", got="int32[4, 4], and int32[8, 8]")),
        (lambda y: y.reshape(4), AUX, dict(expected="any number", got="one that fails", remedy="sizes shapes")),
        (lambda y: jax.lax.psum((y == 0).sum(), "data"), AUX, None),
        (
            lambda y: jax.lax.psum((y == 0).sum(), "data"),
            dict(AUX, accumulate=2),
            dict(expected="means", got="int32[]"),
        ),
        (
            lambda y: (y == 0).sum(),
            STATE,
            dict(expected="integers part", got="int32[]", remedy="jax.lax.psum per_rank"),
        ),
        (lambda y: jax.lax.psum((y == 0).sum(), "data"), STATE, None),
    ],
)
def test_integers_that_depend_on_the_batch(found, options, words):
    """They are an error if ranks have different ones."""

    def loss(w, *rest):
        return w.sum() * rest[-1].mean(), found(rest[-1].astype(jnp.int32))

    train = cgx.make_train_step(loss, optax.sgd(1.0), mesh_of(4), plan=cgx.Raw(), **options)
    start = train.init(W, jnp.int32(0)) if "model_state" in options else train.init(W)
    batch = BATCH["y"].astype(jnp.float32)
    if words is None:
        _, state, *_, metrics = train.step(*start, batch)
        assert (state if "model_state" in options else metrics.aux) == 2
    else:
        with raises(ValueError, says("make_train_step", "loss_fn", **words)):
            train.step(*start, batch)
