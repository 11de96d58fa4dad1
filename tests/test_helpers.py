"""Tests that the helpers of the other tests can fail."""

import jax.numpy as jnp
import numpy as np
import pytest
import ranks
from helpers import assert_same_bytes, assert_same_trees, assert_same_values, assert_trees


@pytest.mark.parametrize("empty", [{}, [], None, {"w": None}, ({}, [None])], ids=repr)
def test_trees_without_leaves(empty):
    for compare in (assert_same_trees, lambda a, b: assert_trees(np.testing.assert_array_equal, a, b)):
        with pytest.raises(AssertionError, match="no leaves"):
            compare(empty, empty)
    with pytest.raises(AssertionError, match="no cases"):
        ranks.assert_same({}, {})


@pytest.mark.parametrize(
    "other",
    [
        {"w": jnp.ones(3)},
        {"w": jnp.ones(2), "b": jnp.ones(2)},
        {"w": None},
        [jnp.ones(2)],
        {"w": jnp.array([1.0, 2.0])},
    ],
    ids=["shape", "more", "none", "structure", "value"],
)
def test_trees_that_differ(other):
    with pytest.raises((AssertionError, ValueError)):
        assert_same_trees({"w": jnp.ones(2)}, other)


def test_bits():
    zero, nan, other = jnp.float32([0.0, -0.0, 1.0]), *np.array([0x7FC00000, 0x7FC00001], np.uint32)[:, None]
    assert_same_bytes(zero, zero)
    with pytest.raises(AssertionError):
        assert_same_bytes(zero, -zero)
    with pytest.raises(AssertionError):
        assert_same_bytes(zero, zero.astype(jnp.float16))
    with pytest.raises(AssertionError):
        assert_same_bytes(nan.view(np.float32), other.view(np.float32))
    assert_same_values(nan.view(np.float32), other.view(np.float32))
    with pytest.raises(AssertionError):
        assert_same_values(nan.view(np.float32), np.float32([0]))
