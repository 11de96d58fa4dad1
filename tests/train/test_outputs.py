"""Tests what value_and_grad makes of a loss's other outputs: auxiliary ones, random keys, and changes of modules."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from errors import raises, says
from gradients import CODEC, KINDS, MAPPED, RANKS, called, close, errors_of, loss_fn, mesh_of, place
from helpers import assert_same_trees
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from training import PARAMS, X

import jaxcgx as cgx


@KINDS
@MAPPED
def test_aux_keywords_and_what_is_no_array(kind, ranks):
    def fun(params, batch, *, scale, flag):
        assert flag is True and scale == 2.0
        found = errors_of(params, batch["x"])
        return scale * found.mean(), {"mean": found.mean(), "each": found.mean(-1)}

    f = cgx.value_and_grad(fun, "data", cgx.Raw(), has_aux=True, ranks=ranks)
    alone, mesh = cgx.grad(fun, "data", cgx.Raw(), has_aux=True), mesh_of(kind)
    with jax.set_mesh(mesh):
        batch = place(mesh, {"x": X})
        (value, aux), grads = jax.jit(lambda p, b: f(p, b, scale=2.0, flag=True))(PARAMS, batch)
        grads_alone, aux_alone = alone(PARAMS, batch, scale=2.0, flag=True)
    expected = errors_of(PARAMS, X)
    close((value, aux["mean"], aux["each"]), (2 * expected.mean(), expected.mean(), expected.mean(-1)))
    close(grads, jax.grad(lambda p: 2 * errors_of(p, X).mean())(PARAMS))
    close((grads_alone, aux_alone), (grads, aux))


@MAPPED
def test_a_module_that_changes(ranks):
    """NNX: a module keeps what it assigns to itself, such as statistics and counts."""
    nnx = pytest.importorskip("flax.nnx", reason="needs the extra `test`")

    class Model(nnx.Module):
        def __init__(self, axis_name, rngs):
            self.norm = nnx.BatchNorm(30, axis_name=axis_name, rngs=rngs)
            self.rnn = nnx.RNN(nnx.SimpleCell(30, 8, rngs=rngs))
            self.calls = nnx.Variable(jnp.zeros((), jnp.int32))

        def __call__(self, x):
            self.calls.set_value(self.calls.get_value() + 1)
            return self.rnn(self.norm(x).reshape(-1, 1, 30))

    def run(value_and_grad, axis_name, x):
        model = Model(axis_name, nnx.Rngs(0))
        step = nnx.jit(lambda model, x: value_and_grad(lambda model, x: (model(x) ** 2).mean())(model, x))
        for _ in range(2):
            loss, grads = step(model, x)
        return loss, grads, nnx.state(model)

    mesh = mesh_of(AxisType.Auto)
    with jax.numpy_dtype_promotion("standard"):
        expected = run(nnx.value_and_grad, None, X)
        with jax.set_mesh(mesh):
            found = run(lambda f: cgx.value_and_grad(f, "data", cgx.Raw(), ranks=ranks), "data", place(mesh, X))
    in_numbers = lambda x: jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
    close(*(jax.tree.map(in_numbers, tree) for tree in (found, expected)))


# Functions of (parameters, a rank's part): what `aux_specs` says, and what plain JAX has for the whole batch.
AUX = {
    "sum": (lambda params, x: len(x), 24),
    "first": (lambda params, x: lax.axis_size("data"), 4),
    "mean": (lambda params, x: x.mean(), X.mean()),
    P(None, "data"): (lambda params, x: x.T, X.T),
    None: (lambda params, x: jax.random.key(len(x) * 0), jax.random.key(0)),
}


@KINDS
@MAPPED
def test_auxiliary_outputs_are_declared(ranks, kind):
    outputs = lambda params, x: [output(params, x) for output, _ in AUX.values()]
    loss = lambda params, x: (loss_fn(params, x), [*outputs(params, x), loss_fn(params, x)])
    f = cgx.value_and_grad(loss, "data", cgx.Raw(), has_aux=True, aux_specs=[*AUX, None], ranks=ranks)
    (value, (*aux, again)), grads = called("context", mesh_of(kind), f, PARAMS, X)
    close((value, grads), jax.value_and_grad(loss_fn)(PARAMS, X))
    for said, found in zip(AUX, aux, strict=True):
        numbers = lambda x, said=said: jax.random.key_data(x) if said is None else x
        np.testing.assert_allclose(*map(numbers, (found, AUX[said][1])), rtol=1e-5, err_msg=str(said))
    np.testing.assert_allclose(again, value, rtol=1e-6)


def test_modules_that_a_pytree_does_not_have():
    """NNX: a variable in two places, a new attribute, and a changed attribute that is not an array."""
    nnx = pytest.importorskip("flax.nnx", reason="needs the extra `test`")

    class Model(nnx.Module):
        def __init__(self, tied=False):
            self.inner = nnx.Linear(30, 30, use_bias=False, rngs=nnx.Rngs(0))
            self.outer = self.inner if tied else nnx.Linear(30, 30, use_bias=False, rngs=nnx.Rngs(1))
            self.calls = 0

        def __call__(self, x):
            return self.outer(jnp.tanh(self.inner(x)))

    def sowing(model, x):
        model.mean = nnx.Intermediate(x.mean())  # as sow does
        return model(x).mean()

    def counting(model, x):
        model.calls += 1
        return model(x).mean()

    mesh = mesh_of(AxisType.Auto)
    for fun in (sowing, counting):
        with raises(ValueError, says("value_and_grad", "loss_fn", remedy="__init__ has_aux")):
            cgx.value_and_grad(fun, "data", cgx.Raw(), mesh=mesh)(Model(), X)
    loss = lambda model, x: (model(x) ** 2).mean()
    with raises(ValueError, says("value_and_grad", "loss_fn", at="leaf [0][0].outer.kernel", remedy="nnx.split")):
        cgx.value_and_grad(loss, "data", cgx.Raw(), mesh=mesh)(Model(tied=True), X)
    graph, params, rest = nnx.split(Model(tied=True), nnx.Param, ...)
    merged = lambda params, x: loss(nnx.merge(graph, params, rest), x)
    found = cgx.grad(merged, "data", cgx.Raw(), mesh=mesh)(params, X)
    close(found, jax.grad(merged)(params, X))
    with raises(TypeError, says("value_and_grad", "argnums", got="DiffState", remedy="cgx.Skip")):
        cgx.value_and_grad(loss, "data", CODEC, argnums=nnx.DiffState(0, nnx.Param))


class Statistics:
    """A module whose pytree doesn't have the names of its attributes."""

    def __init__(self, w, mean):
        self.w, self.mean = w, mean

    def __call__(self, x):
        self.mean = x.mean()
        return x @ self.w


jax.tree_util.register_pytree_node(Statistics, lambda m: ((m.w, m.mean), None), lambda _, leaves: Statistics(*leaves))


def test_a_change_that_would_be_lost_is_refused():
    f = cgx.value_and_grad(lambda model, x: model(x).mean(), "data", CODEC, mesh=mesh_of(AxisType.Auto))
    with raises(ValueError, says("value_and_grad", "loss_fn", at="leaf [0][0][<flat index 1>]", got="one")):
        f(Statistics(PARAMS["w"], jnp.zeros(())), X)
    popped = cgx.value_and_grad(lambda p, batch: loss_fn(p, batch.pop("x")), "data", cgx.Raw(), mesh=f.mesh)
    close(popped(PARAMS, {"x": X}), jax.value_and_grad(loss_fn)(PARAMS, X))


@MAPPED
@pytest.mark.parametrize("specs", [None, (P("data"), P())], ids=["guessed", "given"])
def test_kinds_of_keys(specs, ranks):
    """Each rank draws its own noise, with typed and with raw keys, one call after the other."""
    noise = lambda params, x, key: (jnp.sum(params * x), jax.random.normal(key, len(x)))
    options = dict(has_aux=True, batch_specs=specs, ranks=ranks)
    f = cgx.value_and_grad(noise, "data", cgx.Raw(), **options, mesh=mesh_of(AxisType.Auto))
    for key in jax.random.PRNGKey(3), jax.random.key(3), jax.random.PRNGKey(4):
        (_, drawn), _ = f(jnp.ones(30), X, key)
        for rank, part in enumerate(jnp.split(drawn, RANKS)):
            np.testing.assert_array_equal(part, jax.random.normal(jax.random.fold_in(key, rank), len(X) // RANKS))


@KINDS
@pytest.mark.parametrize(("make", "ranks"), [(jax.random.key, "vmap"), (jax.random.PRNGKey, "shard_map")])
def test_a_loss_that_returns_the_next_key(make, ranks, kind):
    """The key is that of plain JAX, though each rank draws noise of its own. XLA computes the rest of the loss once."""

    def threaded(params, x, seeds):
        key, noise = jax.random.split(seeds["dropout"])
        drawn = jax.random.normal(noise, len(x))
        center = lax.pmean(x.mean(), "data")
        return (errors_of(params, x).mean(-1) + drawn * center).mean(), {"seeds": {"dropout": key}, "drawn": drawn}

    seeds, mesh, floats = {"dropout": make(3)}, mesh_of(kind), []
    said = None if make is jax.random.key else {"seeds": "key", "drawn": None}
    for fun, specs in ((threaded, said), (lambda *args: (threaded(*args)[0], None), None)):
        f = cgx.value_and_grad(fun, "data", cgx.Raw(), has_aux=True, aux_specs=specs, ranks=ranks)
        step = jax.jit(lambda params, x, f=f: f(params, x, seeds))
        with jax.set_mesh(mesh):
            found = cgx.explain(step, PARAMS, place(mesh, X), show=False).collectives
        floats.append(sum(c.bytes for c in found if c.dtype == "float32"))
    assert floats[0] == floats[1] > 0
    f = cgx.value_and_grad(threaded, "data", cgx.Raw(), has_aux=True, aux_specs=said, ranks=ranks)
    (_, aux), _ = called("jit", mesh, lambda params, x: f(params, x, seeds), PARAMS, X)
    plain = jax.random.split(seeds["dropout"])[0]
    words = lambda key: jax.random.key_data(key) if make is jax.random.key else key
    assert_same_trees(words(aux["seeds"]["dropout"]), words(plain))
    drawn = [jax.random.normal(jax.random.split(jax.random.fold_in(seeds["dropout"], i))[1], 6) for i in range(RANKS)]
    np.testing.assert_array_equal(aux["drawn"], np.concatenate(drawn))
