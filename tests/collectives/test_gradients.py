"""Tests gradients of one rank, and exchanges in the backward pass, their feedback and their order."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from errors import refused
from helpers import FULL, assert_same_trees, mesh_with, normal, planned
from jax import lax
from jax.sharding import PartitionSpec as P
from training import mesh_of

import jaxcgx as cgx

RANKS = 4
MESH = mesh_of(RANKS)
CODEC = cgx.MaxMin(4, 64)
STOCHASTIC = cgx.MaxMin(4, 64, rounding="stochastic")
PARAMS = {
    "w1": normal((30, 40), 0),
    "b1": jnp.zeros(40),
    "w2": normal((40, 7), 1, jnp.bfloat16),
    "z": jnp.arange(3),  # the last leaf, so the others have the same numbers, and so the same noise, without it
}
X = normal((RANKS * 8, 30), 2)
floats = lambda tree: {k: x for k, x in tree.items() if k != "z"}
CHECKS = pytest.mark.parametrize("check_vma", [True, False])


def loss(params, x):
    h = jnp.tanh(x @ params["w1"] + params["b1"])
    return ((h @ params["w2"].astype(jnp.float32)) ** 2).mean()


def on_mesh(function, check_vma, out=P()):
    return jax.jit(jax.shard_map(function, mesh=MESH, in_specs=(P(), P("data")), out_specs=out, check_vma=check_vma))


def gradients(function, params, x):
    """Returns the means of the float leaves."""
    return jax.grad(lambda given: function({**params, **given}, x))(floats(params))


plain = jax.jit(functools.partial(gradients, loss))


def assert_near_plain(found):
    """Checks that gradients are those of plain JAX, except for rounding."""
    for k, g in plain(PARAMS, X).items():
        rounded = 2**-7 if g.dtype == jnp.bfloat16 else 1e-5
        np.testing.assert_allclose(np.float32(found[k]), np.float32(g), atol=rounded * np.abs(np.float32(g)).max())


@pytest.mark.short
@CHECKS
def test_local_gradients_are_not_reduced(check_vma):
    """Without check_vma, a mean over the ranks in the loss changes nothing. `grad` exchanges nothing at all."""

    def step(params, x):
        of_rank = (lambda p: loss(p, x)) if check_vma else lambda p: lax.pmean(loss(p, x), "data")
        value, grads = cgx.value_and_grad(of_rank, "data", None)(floats(params))
        return jax.tree.map(lambda a: a[None], (value, grads))

    def grad(params, x):
        return jax.tree.map(lambda a: a[None], cgx.grad(lambda p: loss(p, x), "data", None)(floats(params)))

    assert "psum" not in str(jax.make_jaxpr(on_mesh(grad, check_vma, P("data")))(PARAMS, X))
    value, grads = on_mesh(step, check_vma, P("data"))(PARAMS, X)
    for r in range(RANKS):
        np.testing.assert_allclose(value[r], loss(PARAMS, X), rtol=1e-6)
        for k, g in plain(PARAMS, X[8 * r : 8 * r + 8]).items():
            np.testing.assert_allclose(np.float32(grads[k][r]), np.float32(g), rtol=1e-2, atol=1e-5)


@CHECKS
def test_gradients_of_a_rank_take_what_value_and_grad_takes(check_vma):
    f = lambda a, b, x: ((a * b * x).sum(), {"aux": x.sum()})

    def step(params, x):
        gradients_of = cgx.value_and_grad(f, ("data",), None, argnums=(0, -2), has_aux=True)
        (value, aux), (da, db) = gradients_of(params["a"], params["b"], x)
        return jax.tree.map(lambda y: y[None], (value, aux["aux"], da, db))

    x = jnp.arange(4.0)
    value, aux, da, db = on_mesh(step, check_vma, P("data"))({"a": jnp.float32(3), "b": jnp.float32(5)}, x)
    np.testing.assert_array_equal(value, np.full(RANKS, 15 * x.mean()))
    np.testing.assert_array_equal(aux, x)
    np.testing.assert_array_equal(da, 5 * x)
    np.testing.assert_array_equal(db, 3 * x)


@CHECKS
def test_a_ring_as_at_the_end(check_vma):
    """A ring has no residuals, with which the other schedules are compared below."""
    plan = planned(CODEC, fusion_mb=0.002, schedule="ring")

    def both(params, x):
        grads = cgx.grad(lambda p: loss(p, x), "data", None)(floats(params))
        on_the_way = lambda p, x: loss(cgx.sync_in_backward(p, "data", plan), x)
        return gradients(on_the_way, params, x), cgx.compressed_pmean(grads, "data", plan)

    assert_same_trees(*on_mesh(both, check_vma)(PARAMS, X))


def averaged(params, x):
    return lax.pmean(loss(cgx.sync_in_backward(params, "data", cgx.Raw()), x), "data")


def own(params, x):
    return loss(cgx.sync_in_backward(params, "data", cgx.Raw()), x)[None]


@pytest.mark.short
@pytest.mark.parametrize(
    ("inside", "out", "jit"),
    [
        *((inside, P(), jit) for inside in (averaged, jax.jit(averaged)) for jit in (True, False)),
        *((own, P("data"), jit) for jit in (True, *[False] * FULL)),  # without jit, each operation is compiled alone
    ],
)
def test_a_gradient_from_outside_is_that_of_plain_jax(inside, out, jit):
    """In the style of JAX's documentation, shard_map returns the loss, and jax.grad is applied outside."""
    shard_mapped = jax.shard_map(inside, mesh=MESH, in_specs=(P(), P("data")), out_specs=out)
    of_ranks = (lambda fun: jax.jit(fun)) if jit else (lambda fun: fun)
    found = of_ranks(lambda params, x: gradients(lambda p, x: shard_mapped(p, x).mean(), params, x))(PARAMS, X)
    assert_near_plain(found)


@pytest.mark.short
@pytest.mark.parametrize("wrap", [jax.jit, jax.checkpoint])
@pytest.mark.parametrize("order", ["inside first", "outside first"])
def test_one_function_for_gradients_from_inside_and_outside(wrap, order):
    """JAX caches the backward pass of a jitted function. It must not take the one for the other place."""
    synced = wrap(lambda params, x: loss(cgx.sync_in_backward(params, "data", cgx.Raw()), x))
    specs = dict(in_specs=(P(), P("data")), out_specs=P())
    mean = jax.shard_map(lambda params, x: lax.pmean(synced(params, x), "data"), mesh=MESH, **specs)
    inside = on_mesh(lambda params, x: gradients(synced, params, x), True)
    outside = jax.jit(lambda params, x: gradients(mean, params, x))
    for found in (inside, outside) if order == "inside first" else (outside, inside):
        assert_near_plain(found(PARAMS, X))


def test_a_gradient_from_outside_without_types():
    shard_mapped = jax.shard_map(averaged, mesh=MESH, in_specs=(P(), P("data")), out_specs=P(), check_vma=False)
    outside = lambda: jax.eval_shape(functools.partial(gradients, shard_mapped), PARAMS, X)
    refused("sync_in_backward", outside, ValueError, "params", "a gradient from outside with check_vma=False")


def test_identity_forward_and_layer_by_layer():
    layer = lambda w, x: jnp.tanh(x @ cgx.sync_in_backward(w, "data", CODEC))
    step = lambda params, x: jax.grad(lambda w: functools.reduce(lambda h, v: layer(v, h), w, x).sum())(params)
    weights = [jax.random.normal(jax.random.key(i), (30, 30)) / 6 for i in range(3)]
    # The exchange of the last layer comes before the backward pass of the first layer.
    program = str(jax.make_jaxpr(on_mesh(step, True))(weights, X))
    assert program.count("jaxcgx_psum") == 3
    assert program.find("jaxcgx_psum") < program.rfind("dot_general")
    forward = on_mesh(lambda w, x: layer(w, x), True, P("data"))
    np.testing.assert_array_equal(forward(weights[0], X), jax.jit(lambda w, x: jnp.tanh(x @ w))(weights[0], X))


def test_leaves_without_gradients_pass():
    """Such leaves are integers and random keys."""

    def step(params, x):
        synced = lambda w: cgx.sync_in_backward({**params, "w": w}, "data", CODEC)["w"]
        return jax.grad(lambda w: (synced(w) * x.sum()).sum())(params["w"])

    grads = on_mesh(step, True)({"w": jnp.ones(70), "key": jax.random.key(0), "z": jnp.arange(3)}, X)
    np.testing.assert_allclose(grads, X.sum() / RANKS, rtol=1e-4)


@CHECKS
def test_a_loss_that_is_constant(check_vma):
    """The loss doesn't depend on the parameters, so it doesn't matter whether all ranks have the same one."""
    stopped = lambda w, x: lax.pmean(x.sum() + lax.stop_gradient(w.sum()), "data")
    constants = [lambda w, x: 3.0, lambda w, x: x.sum(), stopped]
    step = lambda w, x: [cgx.compressed_pmean(cgx.grad(f, "data", None)(w, x), "data", CODEC) for f in constants]
    for gradient in on_mesh(step, check_vma)(jnp.ones((30, 40)), X):
        np.testing.assert_array_equal(gradient, jnp.zeros((30, 40)))


# Feedback and order

SMALL = planned(CODEC, fusion_mb=1e-6)  # a message for each leaf
RESIDUALS = {k: None if k == "z" else jnp.zeros((RANKS, *x.shape)) for k, x in PARAMS.items()}
BATCHES = normal((3, RANKS * 8, 30), 2)
WITHOUT_ONE = {**RESIDUALS, "b1": None}  # b1 shares a message with leaves that have residuals


def steps(gradients, check_vma=True, residuals=RESIDUALS, mesh=MESH):
    """Returns the gradients and the residuals of the last of three steps. `gradients` makes those of a rank."""

    def of_a_rank(residuals, x):
        grads, new = gradients(jax.tree.map(lambda r: r[0], residuals), x)
        return grads, jax.tree.map(lambda r: r[None], new)

    rows = P(mesh.axis_names)
    step = jax.shard_map(of_a_rank, mesh=mesh, in_specs=(rows, rows), out_specs=(P(), rows), check_vma=check_vma)
    # Residuals that lie where a step leaves them: it is compiled once.
    residuals, step = jax.device_put(residuals, jax.NamedSharding(mesh, rows)), jax.jit(step)
    for x in BATCHES:
        grads, residuals = step(residuals, x)
    return grads, residuals


def on_the_way(residuals, x, plan=CODEC, axes="data", wrap=lambda loss: loss, **arguments):
    def synchronised(given, residuals):
        carry = cgx.Carry(residuals=residuals)
        return loss(cgx.sync_in_backward({**PARAMS, **given}, axes, plan, carry=carry, **arguments), x)

    return jax.grad(wrap(synchronised), argnums=(0, 1))(floats(PARAMS), residuals)


def at_the_end(residuals, x, plan=CODEC, axes="data", **arguments):
    grads = cgx.grad(lambda given: loss({**PARAMS, **given}, x), axes, None)(floats(PARAMS))
    grads, new = cgx.compressed_pmean(grads, axes, plan, carry=cgx.Carry(residuals=floats(residuals)), **arguments)
    return grads, {**new.residuals, "z": None}


@pytest.mark.parametrize(
    "arguments",
    [
        dict(),
        dict(plan=SMALL),
        dict(plan=planned(STOCHASTIC, own="encoded", fusion_mb=1e-6), key=jax.random.key(5)),
        dict(plan=cgx.PowerSGD(2)),
        dict(plan=cgx.Plan(CODEC, min_size=0, rules=[("w2", cgx.Raw()), ("b1", cgx.Skip())])),
        dict(
            plan=cgx.Plan(CODEC, min_size=0, rules=[("w1", cgx.MaxMin(8)), ("w2", STOCHASTIC)]), key=jax.random.key(7)
        ),
    ],
    ids=str,
)
@CHECKS
def test_feedback_as_at_the_end(check_vma, arguments):
    # A message of leaves with residuals and of one without is made alike with check_vma and without.
    for residuals in (RESIDUALS, WITHOUT_ONE) if check_vma or FULL else (RESIDUALS,):
        way = steps(functools.partial(on_the_way, **arguments), check_vma, residuals)
        end = steps(functools.partial(at_the_end, **arguments), check_vma, residuals)
        assert_same_trees(way, end)


def test_feedback_of_a_gradient_from_outside():
    """The rows of all ranks are differentiated together, and shard_map hands each rank its own."""

    def of_a_rank(given, residuals, x):
        mine = jax.tree.map(lambda r: r[0], residuals)
        params = cgx.sync_in_backward({**PARAMS, **given}, "data", CODEC, carry=cgx.Carry(residuals=mine))
        return lax.pmean(loss(params, x), "data")

    around = jax.shard_map(of_a_rank, mesh=MESH, in_specs=(P(), P("data"), P("data")), out_specs=P())
    residuals = RESIDUALS
    for x in BATCHES:
        found = jax.jit(jax.grad(around, argnums=(0, 1)))(floats(PARAMS), residuals, x)
        residuals = found[1]
    assert_same_trees(found, steps(on_the_way))


def test_levels_with_remat():
    """Two axes with a codec each, and jax.checkpoint around the loss."""
    levels = dict(plan={"node": CODEC, "local": cgx.Raw()}, axes=("node", "local"))
    mesh = mesh_with(node=2, local=2)
    way = steps(functools.partial(on_the_way, wrap=jax.checkpoint, **levels), mesh=mesh)
    assert_same_trees(way, steps(functools.partial(at_the_end, **levels), mesh=mesh))


def test_layers_in_a_loop():
    """lax.scan hands each layer its residuals, and stacks the new ones."""
    layers = jax.random.normal(jax.random.key(3), (3, 30, 30)) / 6
    sync = functools.partial(cgx.sync_in_backward, axis_name="data", plan=CODEC)

    def in_a_loop(residuals, x):
        def layer(h, given):
            w, r = given
            return jnp.tanh(h @ sync(w, carry=cgx.Carry(residuals=r))), None

        total = lambda layers, residuals: (lax.scan(layer, x, (layers, residuals))[0] ** 2).mean()
        return jax.grad(total, argnums=(0, 1))(layers, residuals)

    def one_by_one(residuals, x):
        def total(layers, residuals):
            each = [sync(w, carry=cgx.Carry(residuals=r)) for w, r in zip(layers, residuals)]
            return (functools.reduce(lambda h, w: jnp.tanh(h @ w), each, x) ** 2).mean()

        return jax.grad(total, argnums=(0, 1))(layers, residuals)

    residuals = jnp.zeros((RANKS, *layers.shape))
    loop, unrolled = (steps(f, residuals=residuals) for f in (in_a_loop, one_by_one))
    for x, y in zip(loop, unrolled, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-6)
    assert np.abs(loop[1]).max() > 0


def sent(jaxpr):
    """Yields the shape of the first leaf of every exchange, in the order of the program."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "jaxcgx_psum":
            yield eqn.outvars[0].aval.shape
            continue
        for inner in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            if hasattr(inner := getattr(inner, "jaxpr", inner), "eqns"):
                yield from sent(inner)


@pytest.mark.parametrize("order", [None, (0, 1, 2, 3), (2, 0, 3, 1), (1, 2, 0, 3)])
def test_messages_are_sent_in_the_given_order(order):
    gradients = functools.partial(on_the_way, order=order, plan=SMALL)
    assert_same_trees(steps(gradients), steps(functools.partial(at_the_end, plan=SMALL)))
    of_a_rank = jax.tree.map(lambda r: r[0], RESIDUALS), BATCHES[0]
    program = jax.make_jaxpr(lambda r, x: gradients(r, x)[0], axis_env=[("data", RANKS)])(*of_a_rank)
    shapes = [x.shape for x in jax.tree.leaves(PARAMS)]
    expected = [2, 1, 0] if order is None else [i for i in order if i != 3]
    assert list(sent(program.jaxpr)) == [shapes[i] for i in expected]
