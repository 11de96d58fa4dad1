"""Tests MaxMin: rounding, grids and tails."""

import jax.numpy as jnp
import numpy as np
from helpers import assert_same_bytes, normal, roundtrip
from jax import lax

import jaxcgx as cgx


def test_nearest_rounding_ties_to_even():
    x = np.array([0.0, 0.5, 1.5, 2.5, 15.0], np.float32)  # levels of 4 bits on [0, 15]
    np.testing.assert_array_equal(roundtrip(x, cgx.MaxMin(4)), [0, 0, 2, 2, 15])


def test_skip_incomplete_leaves_the_tail_as_it_is():
    codec = cgx.MaxMin(2, 64, skip_incomplete=True)
    for dtype in ("float32", "bfloat16", "float16"):
        x = normal(100, dtype=dtype)
        y = cgx.roundtrip(x, codec)
        assert_same_bytes(y[64:], x[64:])
        assert (np.asarray(y[:64], np.float32) != np.asarray(x[:64], np.float32)).any()
    assert_same_bytes(cgx.roundtrip(normal(63), codec), normal(63))
    nans = lax.bitcast_convert_type(jnp.array([0x7F81, 0xFFC1, 0x3F81], jnp.uint16), jnp.bfloat16)
    assert_same_bytes(cgx.roundtrip(nans, codec), nans)
