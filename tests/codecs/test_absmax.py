"""Tests AbsMax, whose levels are symmetric around an exact 0."""

import jax.numpy as jnp
import numpy as np
import pytest
from helpers import roundtrip

import jaxcgx as cgx


def test_nearest_rounding_ties_to_even():
    x = np.array([-7, -6.5, -2.5, -0.5, 0.5, 1.5, 2.5, 7], np.float32)  # levels of 4 bits are -7 to 7
    np.testing.assert_array_equal(roundtrip(x, cgx.AbsMax(4)), [-7, -6, -2, 0, 0, 2, 2, 7])


@pytest.mark.parametrize("bits", range(2, 9))
def test_numbers_on_the_grid_are_exact(bits):
    top = 2 ** (bits - 1) - 1
    x = np.arange(-top, top + 1, dtype=np.float32) * 0.25
    np.testing.assert_array_equal(roundtrip(x, cgx.AbsMax(bits)), x)


def test_all_codes_decode():
    """All codes include 2 top + 1, one level above the largest, which no encoder writes."""
    codec = cgx.AbsMax(8, 256)
    payload = np.concatenate([np.float32([0.5]).view(np.uint8), np.zeros(12, np.uint8), np.zeros(256, np.uint8)])
    codes = np.arange(256, dtype=np.uint8)
    # Blocks of 128 are 8 rows of 16 lanes: rows 0 to 3 of all lanes, then rows 4 to 7.
    payload[16:] = codes.reshape(2, 2, 4, 16).transpose(0, 1, 3, 2).reshape(-1)
    y = cgx.decode(jnp.asarray(payload), codec, (256,), "float32")
    np.testing.assert_array_equal(y, (codes.astype(np.float32) - 127) * 0.5)
