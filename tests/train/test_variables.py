"""Tests from_env: CGX's variables alone are enough, over any axes."""

import jax
import numpy as np
import optax
import pytest
from errors import raises, says
from helpers import assert_trees, normal
from ranks import mesh
from steps import run

import jaxcgx as cgx

BITS = {"CGX_COMPRESSION_QUANTIZATION_BITS": "4", "HOME": "/root"}
SRA = BITS | {"CGX_CROSS_REDUCTION_TYPE": "SRA", "CGX_INTRA_COMPRESS": "0"}
PARAMS = {"w": normal((40, 30), 1, scale=0.1), "b": np.zeros(30, np.float32)}
BATCH = normal((8, 40), 2)


def loss_fn(params, x):
    return ((x @ params["w"] + params["b"] - x[:, :1]) ** 2).mean()


def trained(exchange, sizes, axis):
    train = cgx.make_train_step(loss_fn, optax.sgd(0.1), mesh(*sizes), exchange, sharding=cgx.Sharding(axis))
    return jax.device_get(run(train, 2, PARAMS, BATCH)[0].params)


@pytest.mark.parametrize("sizes, axis", [((4,), "a"), ((2, 2), ("a", "b")), ((1, 4), ("a", "b"))], ids=str)
@pytest.mark.parametrize("keep", [False, True])
def test_the_axes_are_those_of_the_ranks(sizes, axis, keep):
    environ = SRA if keep else BITS
    plan = cgx.Plan.from_env(axis, environ)
    expected = trained(cgx.Feedback(plan, keep=keep), sizes, axis)
    assert_trees(np.testing.assert_array_equal, trained(cgx.from_env(environ, keep=keep), sizes, axis), expected)


def test_an_axis_of_one_rank_decides_nothing():
    """On one node, residuals can be kept, although CGX's default between nodes is a ring. On two, they can't."""
    exchange = cgx.from_env(BITS, keep=True)
    assert np.isfinite(trained(exchange, (1, 4), ("a", "b"))["w"]).all()
    with raises(ValueError, says("from_env", "plan", expected='"two_shot"', got='"ring"', remedy="keep=False")):
        trained(exchange, (2, 2), ("a", "b"))


def test_arguments():
    exchange = cgx.from_env(BITS, bits=8, bucket_size=64, min_size=1024, skip_1d=True)
    assert exchange.plan == cgx.Plan.from_env(None, BITS, bits=8, bucket_size=64, min_size=1024, skip_1d=True)
    assert not exchange.keep
