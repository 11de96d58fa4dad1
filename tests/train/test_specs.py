"""Tests how value_and_grad splits its arguments, what a loss closes over, and other axes of the mesh."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from errors import raises, says
from gradients import CODEC, KINDS, MAPPED, RANKS, close, errors_of, loss_fn, mesh_of, place
from helpers import normal, sent
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from training import NESTED, PARAMS, X

import jaxcgx as cgx


@NESTED
@KINDS
@MAPPED
def test_other_axes_stay_sharded(kind, ranks):
    """Shards over "model" are compressed on their devices."""
    mesh = mesh_of(kind, ("data", 2), ("model", 2))
    specs = {"w": P(None, "model"), "b": P("model")}
    params = jax.tree.map(lambda x, spec: place(mesh, x, spec), PARAMS, specs)

    def fun(params, x):
        h = x @ params["w"] + params["b"]
        return (h**2).mean()

    given = specs if kind == AxisType.Auto else None
    f = cgx.value_and_grad(fun, "data", None, param_specs=given, ranks=ranks)
    exchange = cgx.compress_gradients("data", cgx.MaxMin(8, 20), param_specs=specs)
    with jax.set_mesh(mesh):
        state = exchange.init(params)
        step = jax.jit(lambda p, x, s: (f(p, x)[0], exchange.update(f(p, x)[1], s, p)))
        value, (grads, state) = step(params, place(mesh, X), state)
        text = step.lower(params, place(mesh, X), state).compile().as_text()
    expected = jax.value_and_grad(fun)(PARAMS, X)
    np.testing.assert_allclose(value, expected[0], rtol=1e-5)
    for k, g in expected[1].items():
        np.testing.assert_allclose(grads[k], g, atol=0.02 * np.abs(g).max())
    assert grads["w"].sharding.shard_shape((30, 40)) == (30, 20)
    assert state.own.residuals["w"].sharding.shard_shape((2, 30, 40)) == (1, 30, 20)
    if kind == AxisType.Auto:  # on an Explicit mesh, JAX gathers all arguments and results of such a shard_map
        assert ("all-gather", "f32") not in sent(text)
    assert ("all-gather", "u8") in sent(text)


@NESTED
@MAPPED
def test_specs_that_programs_have(ranks):
    """Trees of NamedShardings, tuples of axes, one spec for several arguments, and what Flax NNX returns."""
    mesh = mesh_of(AxisType.Auto, ("data", 2), ("model", 2))
    specs = {"w": P(None, "model"), "b": P("model")}
    params = jax.tree.map(lambda x, spec: place(mesh, x, spec), PARAMS, specs)
    tuples, whole = {name: tuple(spec) for name, spec in specs.items()}, {"w": (None, "model"), "b": ()}
    for given in (jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs), tuples, whole):
        f = cgx.value_and_grad(loss_fn, "data", cgx.Raw(), param_specs=given, ranks=ranks)
        _, grads = found = f(params, place(mesh, X))
        close(found, jax.value_and_grad(loss_fn)(PARAMS, X))
        assert grads["w"].sharding.shard_shape((30, 40)) == (30, 20)
    of_two = lambda w, b, x: loss_fn({"w": w, "b": b}, x)
    options = dict(argnums=(0, 1), ranks=ranks)
    f = cgx.value_and_grad(of_two, "data", cgx.Raw(), param_specs=NamedSharding(mesh, P()), **options)
    close(f(params["w"], params["b"], place(mesh, X))[1], jax.grad(of_two, (0, 1))(PARAMS["w"], PARAMS["b"], X))


@NESTED
@MAPPED
@pytest.mark.parametrize("of", ["module", "state"])
def test_specs_of_nnx(ranks, of):
    """Gradients are what nnx.value_and_grad returns: an nnx.State of nnx.Params."""
    nnx = pytest.importorskip("flax.nnx", reason="needs the extra `test`")
    mesh = mesh_of(AxisType.Auto, ("data", 2), ("model", 2))
    sharded = nnx.with_partitioning(nnx.initializers.normal(), (None, "model"))

    class Model(nnx.Module):
        def __init__(self):
            self.inner = nnx.Linear(30, 40, rngs=nnx.Rngs(0), kernel_init=sharded)
            self.mean = nnx.BatchStat(jnp.zeros(()))

        def __call__(self, x):
            self.mean.set_value(x.mean())
            return jnp.tanh(self.inner(x)) ** 2

    with jax.set_mesh(mesh):
        model = Model()
    expected = nnx.value_and_grad(lambda model, x: model(x).mean())(model, X)
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    merged = lambda params, rest, x: nnx.merge(graph, params, nnx.clone(rest))(x).mean()
    fun, args = ((lambda model, x: model(x).mean()), (model,)) if of == "module" else (merged, (params, rest))
    for given in (nnx.get_partition_spec(params), nnx.get_named_sharding(params, mesh)):
        specs = (*[P()] * (len(args) - 1), P("data"))
        f = cgx.value_and_grad(fun, "data", cgx.Raw(), param_specs=given, batch_specs=specs, ranks=ranks)
        with jax.set_mesh(mesh):
            value, grads = f(*args, place(mesh, X))
        assert type(grads) is nnx.State and jax.tree.structure(grads) == jax.tree.structure(expected[1])
        close((value, grads), expected)
        assert grads["inner"]["kernel"].get_value().sharding.shard_shape((30, 40)) == (30, 20)


@NESTED
@KINDS
@MAPPED
def test_16_bits_beside_another_axis(kind, ranks):
    """XLA on CPUs aborts when it compiles a sum of 16-bit numbers over ranks beside an axis of the partitioner."""
    mesh = mesh_of(kind, ("data", 2), ("model", 2))
    params, x = jax.tree.map(lambda a: a.astype(jnp.bfloat16), (PARAMS, X))
    fun = lambda params, x: (loss_fn(params, x), x.max().astype(jnp.float16))
    options = dict(has_aux=True, param_specs={"w": P(), "b": P()}, ranks=ranks)
    f = cgx.value_and_grad(fun, "data", cgx.Raw(), **options)
    with jax.set_mesh(mesh):
        (value, aux), _ = jax.jit(f)(place(mesh, params, P()), place(mesh, x))
    assert value.dtype == jnp.bfloat16 and aux.dtype == jnp.float16
    np.testing.assert_allclose(value, loss_fn(PARAMS, X), rtol=0.02)
    np.testing.assert_allclose(aux, X.reshape(2, -1).max(1).mean(), rtol=0.01)


def test_errors_suggest_specs_for_the_call():
    """They number the arguments as the caller wrote them, and suggest what works."""

    def fun(batch, scale, params, y, *, shift):
        return (errors_of(params, batch["x"]).mean(-1) * scale[y] + shift[y]).mean()

    args = {"x": X, "n": jnp.arange(3.0)}, jnp.ones(8), PARAMS, jnp.arange(24) % 8
    specs, shift = ({"n": P(), "x": P("data")}, P(), P("data"), {"shift": P()}), jnp.ones(8)
    options = dict(argnums=2, mesh=mesh_of(AxisType.Auto))
    with pytest.raises(ValueError, match=re.escape(f"batch_specs={specs}")) as caught:
        cgx.value_and_grad(fun, "data", cgx.Raw(), **options)(*args, shift=shift)
    assert "leaf [0]['n']" in str(caught.value)
    f = cgx.value_and_grad(fun, "data", cgx.Raw(), **options, batch_specs=specs)
    close(f(*args, shift=shift), jax.value_and_grad(fun, 2)(*args, shift=shift))


def classes_fn(params, x, y, scale):
    """A loss with an argument that is not an example."""
    return (errors_of(params, x).mean(-1) * scale[y]).mean()


def test_an_argument_that_is_no_example():
    """It is passed next to a batch with a known sharding, and by keyword."""
    mesh, y, scale = mesh_of(AxisType.Auto), jnp.arange(24) % 8, jnp.arange(1.0, 9.0)
    expected = jax.value_and_grad(classes_fn)(PARAMS, X, y, scale)
    batch = place(mesh, (X, y))
    with raises(ValueError, says("value_and_grad", "batch_specs", got="leaves", remedy="P() keyword")):
        cgx.value_and_grad(classes_fn, "data", cgx.Raw())(PARAMS, *batch, scale)
    specs = P("data"), P("data")
    with raises(ValueError, says("value_and_grad", "batch_specs", remedy="keyword")):
        cgx.value_and_grad(classes_fn, "data", cgx.Raw(), batch_specs=specs)(PARAMS, *batch, scale=scale)
    with raises(ValueError, says("value_and_grad", "batch_specs")):
        of_z = {"y": P("data"), "scale": P(), "z": P()}  # no argument is called z
        f = cgx.value_and_grad(classes_fn, "data", cgx.Raw(), batch_specs=(P("data"), of_z))
        f(PARAMS, batch[0], y=batch[1], scale=scale)
    f = cgx.value_and_grad(classes_fn, "data", cgx.Raw(), batch_specs=(*specs, {"scale": P()}), mesh=mesh)
    close(jax.jit(f)(PARAMS, X, y, scale=scale), expected)
    f = cgx.value_and_grad(loss_fn, "data", cgx.Raw(), batch_specs={"x": P("data")}, mesh=mesh)
    close(f(PARAMS, x=X), jax.value_and_grad(loss_fn)(PARAMS, X))


@MAPPED
def test_one_example_of_a_rank_is_not_broadcast(ranks):
    mesh, x, y = mesh_of(AxisType.Auto), X[:RANKS], normal((RANKS, 40), 5)
    fun = lambda params, x, y: ((x @ params["w"] - y) ** 2).mean()
    options = dict(mesh=mesh, ranks=ranks)
    closing = lambda p, x, y: cgx.value_and_grad(lambda p, x: fun(p, x, y), "data", cgx.Raw(), **options)(p, x)
    for call in (closing, jax.jit(closing)):
        with raises(ValueError, says("value_and_grad", "loss_fn", got="one that closes over float32[4, 40]")):
            call(PARAMS, x, y)
    with raises(ValueError, says("value_and_grad", "batch_specs", at="leaf [2]", remedy="shard")):
        cgx.value_and_grad(fun, "data", cgx.Raw())(PARAMS, place(mesh, x), place(mesh, y, P()))
    bank = lambda params, x, y: (x @ params["w"] @ y.T).mean()
    f = cgx.value_and_grad(bank, "data", cgx.Raw(), batch_specs=(P("data"), P()))
    close(f(PARAMS, place(mesh, x), place(mesh, y, P())), jax.value_and_grad(bank)(PARAMS, x, y))


def test_two_words_or_a_batch_of_two():
    mesh, words = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2]), jnp.uint32([1, 3])
    fun = lambda params, x, ids: (x @ params["w"] * params["b"][ids][:, None] + params["w"][ids][:, :1]).mean()
    with raises(ValueError, says("value_and_grad", "batch_specs", at="leaf [2]", remedy="jax.random.key P()")):
        cgx.value_and_grad(fun, "data", cgx.Raw(), mesh=mesh)(PARAMS, X[:2], words)
    expected = jax.value_and_grad(fun)(PARAMS, X[:2], words)
    f = cgx.value_and_grad(fun, "data", cgx.Raw(), mesh=mesh)
    close(f(PARAMS, X[:2], place(mesh, words)), expected)


@MAPPED
def test_axes_in_another_order(ranks):
    mesh = mesh_of(AxisType.Auto, ("a", 2), ("b", 2))
    x = place(mesh, X, P(("b", "a")))
    with raises(ValueError, says("value_and_grad", "batch_specs", at="leaf [1]", remedy="name the axes")):
        cgx.value_and_grad(loss_fn, ("a", "b"), cgx.Raw())(PARAMS, x)
    f = cgx.value_and_grad(loss_fn, ("b", "a"), cgx.Raw(), ranks=ranks)
    close(f(PARAMS, x), jax.value_and_grad(loss_fn)(PARAMS, X))


@KINDS
@MAPPED
def test_a_loss_that_closes_over_the_batch(kind, ranks):
    """As a step of Flax defines it. Functions that the loss calls may close over the batch, too."""

    def step(params, batch, scale):
        x = batch["x"]

        def errors(params):
            return errors_of(params, x) * scale

        def loss(params, power=2, *, shift=1.0):
            return (errors(params) ** power * batch["y"][:, None]).mean() + shift

        rows = cgx.grad(loss, "data", None, ranks=ranks, closes_over="batch")(params)
        mean = jax.tree.map(lambda x: x.mean(0), rows)
        return mean, cgx.value_and_grad(loss, "data", cgx.Raw(), ranks=ranks, closes_over=(batch, x))(params)

    mesh, batch = mesh_of(kind), {"x": X, "y": jnp.arange(24.0)}
    with jax.set_mesh(mesh):
        found = jax.jit(step)(PARAMS, place(mesh, batch), 2.0)
    loss = lambda params: ((errors_of(params, X) * 2) ** 2 * batch["y"][:, None]).mean() + 1
    expected = jax.value_and_grad(loss)(PARAMS)
    close(found, (expected[1], expected))


def test_what_a_loss_does_not_close_over():
    loss = lambda params: loss_fn(params, X)
    f = cgx.value_and_grad(loss, "data", CODEC, mesh=mesh_of(AxisType.Auto), closes_over=(X + 0,))
    with raises(ValueError, says("value_and_grad", "closes_over", got="something", remedy="argument")):
        f(PARAMS)
    for function, remedy in (loss, ""), (jax.jit(loss), "without jax.jit"):
        with raises(ValueError, says("value_and_grad", "closes_over", got="'X'", remedy=remedy)):
            cgx.value_and_grad(function, "data", CODEC, closes_over="X")


def test_a_loss_that_holds_the_batch_elsewhere_too():
    """Uses that closes_over can't replace would see the examples of all ranks."""
    mesh = mesh_of(AxisType.Auto)
    for x in X, np.asarray(X):
        ratio = jax.jit(lambda x=x: jnp.mean(x))
        f = cgx.value_and_grad(lambda p: loss_fn(p, x) * ratio(), "data", CODEC, mesh=mesh, closes_over=(x,))
        with raises(ValueError, says("value_and_grad", "closes_over", got="float32[24, 30]", remedy="arguments")):
            f(PARAMS)


def test_functions_that_call_each_other_close_over_the_batch():
    x = X

    def even(params, n):
        return loss_fn(params, x) + (odd(params, n - 1) if n else 0)

    def odd(params, n):
        return 2 * loss_fn(params, x) + even(params, n - 1)

    loss = lambda params: even(params, 4)
    f = cgx.value_and_grad(loss, "data", cgx.Raw(), mesh=mesh_of(AxisType.Auto), closes_over=x)
    with_x = lambda params, x: 7 * loss_fn(params, x)
    close(f(PARAMS), jax.value_and_grad(with_x)(PARAMS, X))


def test_what_a_loss_closes_over_does_not_fit_to_its_part():
    """JAX's error says that shapes differ, and a note adds the reason."""
    closing = lambda p, x: ((errors_of(p, x) - X[:, :1]) ** 2).mean()
    with pytest.raises(TypeError, match="incompatible shapes") as caught:
        cgx.value_and_grad(closing, "data", CODEC, mesh=mesh_of(AxisType.Auto))(PARAMS, X)
    assert re.search("gets a rank's part .* must be an argument", " ".join(caught.value.__notes__))
