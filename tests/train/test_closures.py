"""Tests value_and_grad with losses that close over the batch."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from errors import raises, says
from gradients import CODEC, KINDS, MAPPED, PARAMS, X, close, errors_of, loss_fn, mesh_of, place
from jax.sharding import AxisType

import jaxcgx as cgx


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
