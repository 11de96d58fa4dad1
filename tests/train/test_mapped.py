"""Tests value_and_grad(ranks="vmap"): the ranks are a mapped axis, which XLA's partitioner distributes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gradients import KINDS, RANKS, close, fed, loss_fn, mesh_of, place
from helpers import assert_same_trees, normal
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from training import NESTED, PARAMS, X

import jaxcgx as cgx


def products(params, x):
    """A loss whose sums have one order only."""
    return (x * params["w"][:, 0]).sum(-1)[0]


@KINDS
def test_the_bits_of_shard_map(kind):
    """Gradients, residuals and the state of an exchange."""
    mesh, found = mesh_of(kind), []
    for ranks in ("shard_map", "vmap"):
        f, (exchange, state) = cgx.grad(products, "data", None, mesh=mesh, ranks=ranks), fed(cgx.MaxMin(2), mesh)
        for x in (X, X[::-1]):
            grads, state = exchange.update(f(PARAMS, place(mesh, x)), state, PARAMS)
        found.append((grads, state))
    assert_same_trees(*found)
    assert np.any(found[0][1].own.residuals["w"])


def constrained(sharding, params, x):
    h = lax.with_sharding_constraint(jnp.tanh(x @ params["w"] + params["b"]), sharding)
    return lax.with_sharding_constraint((h**2).mean(), P())


def keeps_parts(mesh, fun):
    """Checks that a loss has the gradients of plain JAX, and that nothing is gathered."""
    with jax.set_mesh(mesh):
        x = place(mesh, X)
        step = jax.jit(cgx.value_and_grad(fun, "data", cgx.Raw(), ranks="vmap"))
        close(step(place(mesh, PARAMS, P()), x), jax.value_and_grad(fun)(PARAMS, x))
        found = cgx.explain(step, place(mesh, PARAMS, P()), x, show=False)
    assert {c.operation for c in found.collectives} == {"all-reduce"}


@pytest.mark.parametrize("spec", [P("data"), P(("data",)), P(None, None), P("data", P.UNCONSTRAINED)], ids=str)
def test_sharding_constraints(spec):
    """A constraint over the ranks' axis keeps a rank's part where it is. JAX makes a NamedSharding of a spec."""
    keeps_parts(mesh_of(AxisType.Auto), functools.partial(constrained, spec))


def test_shardings_of_a_jit():
    """They are constraints, too, also in a loss without others."""
    mesh = mesh_of(AxisType.Auto)
    tanh = jax.jit(jnp.tanh, out_shardings=NamedSharding(mesh, P(None, "data")))
    keeps_parts(mesh, lambda params, x: (tanh(x @ params["w"] + params["b"]) ** 2).mean())


@pytest.mark.parametrize("spec", [P("data"), P(None, "data"), P(None, None)], ids=str)
def test_sharding_constraints_of_a_weight(spec):
    """A rank has whole weights, in branches and loops of the loss, too. So they stay on its devices."""
    mesh = mesh_of(AxisType.Auto)
    constrain = lambda w: lax.with_sharding_constraint(w, NamedSharding(mesh, spec))

    def fun(params, x):
        w = lax.cond(params["b"][0] < 1, constrain, lambda w: w, params["w"][:28])
        body = lambda h, _: (jnp.tanh(h @ constrain(params["w"][2:, :28])), None)
        h, _ = lax.scan(jax.checkpoint(body), x[:, :28], length=2)
        return ((h @ constrain(w)) ** 2).mean()

    keeps_parts(mesh, fun)


@NESTED
@pytest.mark.parametrize("axes", ["data", ("pod", "data")], ids=str)
def test_constraints_over_several_axes(axes):
    """The model's axis stays in the constraint, the ranks' axes don't."""
    mesh = mesh_of(AxisType.Auto, ("pod", 2), ("data", 2), ("model", 2))
    fun = functools.partial(constrained, NamedSharding(mesh, P(("pod", "data"), "model")))
    f = cgx.value_and_grad(fun, axes, cgx.Raw(), ranks="vmap", param_specs={"w": P(None, "model"), "b": P("model")})
    with jax.set_mesh(mesh):
        params = {"w": place(mesh, PARAMS["w"], P(None, "model")), "b": place(mesh, PARAMS["b"], P("model"))}
        _, grads = found = jax.jit(f)(params, place(mesh, X, P(axes)))
    close(found, jax.value_and_grad(lambda p, x: (jnp.tanh(x @ p["w"] + p["b"]) ** 2).mean())(PARAMS, X))
    assert grads["w"].sharding.shard_shape((30, 40)) == (30, 20)


def eager(params, x):
    """Libraries such as Diffrax compute constants while they trace. JAX can't do that in shard_map."""
    with jax.ensure_compile_time_eval():
        steps = jnp.where(jnp.arange(3) < 2, 1.0, 0.5)
    return loss_fn(params, x) * steps.sum()


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def solved(function, x, *consts):
    return function(x, *consts)


solved.defvjp(
    lambda function, x, *consts: (function(x, *consts), (x, consts)),
    lambda function, kept, ct: jax.vjp(function, kept[0], *kept[1])[1](ct),
)


def closure_converted(params, x):
    function, consts = jax.closure_convert(lambda x: jnp.tanh(x @ params["w"] + params["b"]), x)
    return solved(function, x, *consts).mean()


def closing_rule(params, x):
    """A derivative rule that closes over what is being traced."""
    mean = x.mean()

    @jax.custom_vjp
    def scaled(h):
        return h * mean

    scaled.defvjp(lambda h: (h * mean, None), lambda _, ct: (ct * mean,))
    return scaled(x @ params["w"] + params["b"]).mean()


@KINDS
@pytest.mark.parametrize("fun", [eager, closure_converted, closing_rule])
def test_losses_that_close_over_traced_values(fun, kind):
    mesh = mesh_of(kind)
    total = lambda params, x: jnp.stack([fun(params, part) for part in x.reshape(RANKS, -1, 30)]).mean()
    with jax.set_mesh(mesh):
        found = jax.jit(cgx.value_and_grad(fun, "data", cgx.Raw(), ranks="vmap"))(PARAMS, place(mesh, X))
    close(found, jax.value_and_grad(total)(PARAMS, X))


def typed(error, params, x):
    """Libraries compare the types of old and new values. In shard_map, types name the mesh."""
    old, new = (jax.eval_shape(lambda value=value: value) for value in (params["b"][0], np.float32(0)))
    if old != new:
        raise error
    return loss_fn(params, x)


# Those of Equinox's stateful layers and of Diffrax. The last is plain JAX's, too.
@pytest.mark.parametrize(
    "error, noted",
    [(ValueError("Old and new values have different structures"), 1), (AssertionError(), 1), (KeyError(), 0)],
)
def test_a_loss_that_jax_refuses_in_shard_map(error, noted):
    mesh, fun = mesh_of(AxisType.Auto), functools.partial(typed, error)
    with pytest.raises(type(error)) as caught:
        cgx.value_and_grad(fun, "data", cgx.Raw(), mesh=mesh)(PARAMS, X)
    assert " ".join(getattr(caught.value, "__notes__", [])).count('pass ranks="vmap"') == noted
    f = cgx.value_and_grad(fun, "data", cgx.Raw(), mesh=mesh, ranks="vmap")
    close(f(PARAMS, X), jax.value_and_grad(loss_fn)(PARAMS, X))


def test_two_dimensions_of_a_batch():
    mesh = mesh_of(AxisType.Auto, ("a", 2), ("b", 2))
    fun = lambda w, x, y: (x.sum() * w + y * w**2).mean()
    f = cgx.value_and_grad(fun, ("a", "b"), cgx.Raw(), ranks="vmap", mesh=mesh, batch_specs=(P("b", "a"), P(None, "b")))
    g = cgx.value_and_grad(fun, ("a", "b"), cgx.Raw(), mesh=mesh, batch_specs=(P("b", "a"), P(None, "b")))
    close(f(2.0, X[:, :4], X[:3, :6]), g(2.0, X[:, :4], X[:3, :6]))


def convolution(params, x):
    return (lax.conv(x, params["w"], (1, 1), "SAME") ** 2).mean()


def embedding(params, words):
    return (params["w"][words] ** 2).mean()


# For each loss whether the partitioner gathers: a convolution's activations, where the gradient of its kernel is
# a convolution with a group for each rank.
GATHERED = {
    "dense": (loss_fn, PARAMS, X, False),
    "embedding": (embedding, {"w": normal((50, 8), 1)}, jnp.arange(24) % 50, False),
    "convolution": (convolution, {"w": normal((6, 4, 3, 3), 1)}, normal((8, 4, 5, 5), 2), True),
}


@pytest.mark.parametrize("name", GATHERED)
def test_what_the_partitioner_gathers(name):
    fun, params, x, gathers = GATHERED[name]
    mesh = mesh_of(AxisType.Auto)
    with jax.set_mesh(mesh):
        params, x = place(mesh, params, P()), place(mesh, x)
        for ranks in ("shard_map", "vmap"):
            step = jax.jit(cgx.value_and_grad(fun, "data", cgx.Raw(), ranks=ranks))
            found = cgx.explain(step, params, x, show=False).collectives
            others = [c for c in found if c.operation != "all-reduce"]
            assert bool(others) == (ranks == "vmap" and gathers), others
            close(step(params, x), jax.value_and_grad(fun)(params, x))
