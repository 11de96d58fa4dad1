"""Tests Cast against astype."""

import jax.numpy as jnp
import numpy as np
from helpers import normal, roundtrip

import jaxcgx as cgx


def test_cast_is_astype():
    x = np.concatenate(
        [
            np.array(normal(3000)),
            np.array(normal(500, 1, scale=1e-6)),
            [0, -0.0, 65519, 65520, 1e30, -1e30, np.inf, np.nan],
        ]
    )
    for dtype in (jnp.bfloat16, jnp.float16):
        with np.errstate(over="ignore"):
            expected = x.astype(np.float32).astype(dtype).astype(np.float32)
        np.testing.assert_array_equal(roundtrip(x, cgx.Cast(dtype)), expected)
