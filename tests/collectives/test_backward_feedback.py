"""Tests exchanges in the backward pass with error feedback, and their order."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_same_bytes, planned
from jax import lax
from jax.sharding import PartitionSpec as P

import jaxcgx as cgx

RANKS = 4
MESH = jax.make_mesh((RANKS,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:RANKS])
CODEC = cgx.MaxMin(4, 64)
SMALL = planned(CODEC, fusion_mb=1e-6)  # a message for each leaf
PARAMS = {
    "w1": jax.random.normal(jax.random.key(0), (30, 40)),
    "b1": jnp.zeros(40),
    "w2": jax.random.normal(jax.random.key(1), (40, 7)).astype(jnp.bfloat16),
    "z": jnp.arange(3),  # the last leaf, so the others have the same numbers, and so the same noise, without it
}
RESIDUALS = {k: None if k == "z" else jnp.zeros((RANKS, *x.shape)) for k, x in PARAMS.items()}
BATCHES = jax.random.normal(jax.random.key(2), (3, RANKS * 8, 30))
CHECKS = pytest.mark.parametrize("check_vma", [True, False])


def loss(params, x):
    h = jnp.tanh(x @ params["w1"] + params["b1"])
    return ((h @ params["w2"].astype(jnp.float32)) ** 2).mean()


def floats(tree):
    return {k: x for k, x in tree.items() if k != "z"}


WITHOUT_ONE = {**RESIDUALS, "b1": None}  # b1 shares a message with leaves that have residuals


def steps(gradients, check_vma=True, residuals=RESIDUALS):
    """Returns the gradients and the residuals of the last of three steps. `gradients` makes those of a rank."""

    def of_a_rank(residuals, x):
        grads, new = gradients(jax.tree.map(lambda r: r[0], residuals), x)
        return grads, jax.tree.map(lambda r: r[None], new)

    step = jax.shard_map(
        of_a_rank, mesh=MESH, in_specs=(P("data"), P("data")), out_specs=(P(), P("data")), check_vma=check_vma
    )
    for x in BATCHES:
        grads, residuals = jax.jit(step)(residuals, x)
    return grads, residuals


def on_the_way(residuals, x, plan=CODEC, **arguments):
    def synchronised(given, residuals):
        carry = cgx.Carry(residuals=residuals)
        return loss(cgx.sync_in_backward({**PARAMS, **given}, "data", plan, carry=carry, **arguments), x)

    return jax.grad(synchronised, argnums=(0, 1))(floats(PARAMS), residuals)


def at_the_end(residuals, x, plan=CODEC, **arguments):
    _, grads = cgx.local_value_and_grad(lambda given: loss({**PARAMS, **given}, x), "data")(floats(PARAMS))
    grads, new = cgx.compressed_pmean(grads, "data", plan, carry=cgx.Carry(residuals=floats(residuals)), **arguments)
    return grads, {**new.residuals, "z": None}


def assert_same(found, expected):
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert_same_bytes(np.asarray(x), np.asarray(y))


@pytest.mark.parametrize(
    "arguments",
    [
        dict(),
        dict(plan=SMALL),
        dict(plan=planned(cgx.MaxMin(4, 64, "stochastic"), own="encoded", fusion_mb=1e-6), key=jax.random.key(5)),
        dict(plan=cgx.TopK(0.1)),
        dict(plan=cgx.PowerSGD(2)),
        dict(plan=cgx.Raw()),
        dict(plan=cgx.Plan(CODEC, min_size=0, rules=[("w2", cgx.Raw()), ("b1", cgx.Skip())])),
    ],
    ids=str,
)
@CHECKS
def test_as_at_the_end(check_vma, arguments):
    for residuals in (RESIDUALS, WITHOUT_ONE):
        way = steps(functools.partial(on_the_way, **arguments), check_vma, residuals)
        end = steps(functools.partial(at_the_end, **arguments), check_vma, residuals)
        assert_same(way, end)


def test_a_gradient_from_outside():
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
    assert_same(found, steps(on_the_way))


def test_levels_with_remat():
    """Two axes with a codec each, and jax.checkpoint around the loss."""
    codecs = {"node": CODEC, "local": cgx.Raw()}
    mesh = jax.make_mesh((2, 2), ("node", "local"), (jax.sharding.AxisType.Auto,) * 2, devices=jax.devices()[:RANKS])
    both = P(("node", "local"))

    def on_the_way(residuals, x):
        def synchronised(given, residuals):
            params = cgx.sync_in_backward(
                {**PARAMS, **given}, ("node", "local"), codecs, carry=cgx.Carry(residuals=residuals)
            )
            return loss(params, x)

        return jax.grad(jax.checkpoint(synchronised), argnums=(0, 1))(floats(PARAMS), residuals)

    def at_the_end(residuals, x):
        _, grads = cgx.local_value_and_grad(lambda g: loss({**PARAMS, **g}, x), ("node", "local"))(floats(PARAMS))
        grads, new = cgx.compressed_pmean(
            grads, ("node", "local"), codecs, carry=cgx.Carry(residuals=floats(residuals))
        )
        return grads, {**new.residuals, "z": None}

    results = []
    for gradients in (on_the_way, at_the_end):

        def of_a_rank(residuals, x, gradients=gradients):
            grads, new = gradients(jax.tree.map(lambda r: r[0], residuals), x)
            return grads, jax.tree.map(lambda r: r[None], new)

        step = jax.shard_map(of_a_rank, mesh=mesh, in_specs=(both, both), out_specs=(P(), both))
        results.append(jax.jit(step)(RESIDUALS, BATCHES[0]))
    assert_same(*results)


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
    assert_same(steps(gradients), steps(functools.partial(at_the_end, plan=SMALL)))
    program = jax.make_jaxpr(lambda r, x: gradients(r, x)[0], axis_env=[("data", RANKS)])(
        jax.tree.map(lambda r: r[0], RESIDUALS), BATCHES[0]
    )
    shapes = [x.shape for x in jax.tree.leaves(PARAMS)]
    expected = [2, 1, 0] if order is None else [i for i in order if i != 3]
    assert list(sent(program.jaxpr)) == [shapes[i] for i in expected]
