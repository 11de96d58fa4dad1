"""Tests complex parameters: exact where they travel raw, refused where a function computes in float32."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from errors import raises, says
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxcgx as cgx
from jaxcgx.train import sparse
from jaxcgx.train.exchange import At
from jaxcgx.transports.xla import Axes

pytestmark = pytest.mark.usefixtures("promotion")

PARAMS = {"c": jnp.asarray(np.arange(8) * (1 + 2j), jnp.complex64), "w": jnp.ones(8)}
SPECS = {"c": P("data"), "w": P("data")}


def loss_fn(params, batch):
    return jnp.mean(jnp.abs(params["c"] * batch - 1) ** 2) + jnp.mean(params["w"] ** 2)


def make(exchange, **sharding):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    return cgx.make_train_step(loss_fn, optax.sgd(0.1), mesh, exchange, sharding=cgx.Sharding(**sharding))


def test_complex_parameters_are_refused():
    words = says("Diloco", "params", "leaf ['c']", got="complex64")
    with raises(TypeError, words):
        make(cgx.wan.Diloco(cgx.Raw(), 1, outer="sgd")).init(PARAMS)
    words = says("make_train_step", "sharding.gather", "leaf ['c']", got="complex64")
    with raises(TypeError, words):
        make(cgx.Raw(), optimizer=SPECS, gather=cgx.Lossless()).init(PARAMS)


def test_without_them_steps_are_those_of_optax():
    train, batch = make(cgx.Lossless()), np.arange(16, dtype=np.float32)[:, None] / 8
    state, _ = train.step(train.init(PARAMS), batch)
    grads = jax.grad(loss_fn)(PARAMS, batch)
    expected = optax.apply_updates(PARAMS, jax.tree.map(lambda g: -0.1 * g, grads))
    for name in PARAMS:
        np.testing.assert_allclose(state.params[name], expected[name], rtol=1e-5)


def test_norms_have_both_parts():
    (square,) = sparse._squares([jnp.array([3 + 4j, 0, 12j])], At(Axes(("data",))))
    np.testing.assert_allclose(square, 169.0, rtol=1e-6)
