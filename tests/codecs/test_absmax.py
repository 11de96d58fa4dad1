"""Tests AbsMax, whose levels are symmetric around an exact 0."""

import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_same_bytes, normal, roundtrip

import jaxcgx as cgx


def test_nearest_rounding_ties_to_even():
    x = np.array([-7, -6.5, -2.5, -0.5, 0.5, 1.5, 2.5, 7], np.float32)  # levels of 4 bits are -7 to 7
    np.testing.assert_array_equal(roundtrip(x, cgx.AbsMax(4)), [-7, -6, -2, 0, 0, 2, 2, 7])


@pytest.mark.parametrize("bits", range(2, 9))
def test_numbers_on_the_grid_are_exact(bits):
    top = 2 ** (bits - 1) - 1
    x = np.arange(-top, top + 1, dtype=np.float32) * 0.25
    np.testing.assert_array_equal(roundtrip(x, cgx.AbsMax(bits)), x)


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e-41, 1e35])
def test_errors_are_at_most_half_a_step(bits, scale):
    """The step is rounded up to 16 bits.

    It is the range of the magnitudes over the number of levels on one side.
    """
    codec, x = cgx.AbsMax(bits, 300), np.array(normal(300, bits), np.float32) * np.float32(scale)
    step = np.asarray(cgx.encode(x, codec)[:4]).view(np.float32)[0].astype(np.float64)
    largest, top = np.abs(x).max().astype(np.float64), 2 ** (bits - 1) - 1
    assert largest / top * (1 - 2**-23) <= step <= largest / top * (1 + 2**-15) + 2**-149
    assert (np.abs(roundtrip(x, codec) - x.astype(np.float64)) <= step / 2 + max(2**-21 * largest, 2**-149)).all()


@pytest.mark.parametrize("codec", [cgx.AbsMax(2, 7), cgx.AbsMax(5, 33), cgx.AbsMax()], ids=repr)
def test_the_negative_of_an_input_gives_the_negative(codec):
    x = normal(1000, 3)
    np.testing.assert_array_equal(roundtrip(-x, codec), -roundtrip(x, codec))


def test_zero_is_positive_and_exact_beside_any_range():
    x = np.array([-0.0, 0.0, 3.4e38, 1e-45, -0.0], np.float32)
    y = roundtrip(x, cgx.AbsMax(3))
    assert_same_bytes(y[[0, 1, 3, 4]], np.zeros(4, np.float32))
    assert np.isfinite(y[2])


@pytest.mark.parametrize("bits", [2, 8])
def test_the_largest_magnitude_decides_alone(bits):
    """An outlier of either sign makes its own bucket coarser, but not the next one."""
    codec = cgx.AbsMax(bits, 64)
    x = np.array(normal(128, 4), np.float32)
    x[5] = -1e6
    y = roundtrip(x, codec)
    assert (np.delete(y[:64], 5) == 0).all() and abs(y[5] / -1e6 - 1) < 2**-14
    np.testing.assert_array_equal(y[64:], roundtrip(x[64:], codec))


def test_all_codes_decode():
    """All codes include 2 top + 1, one level above the largest, which no encoder writes."""
    codec = cgx.AbsMax(8, 256)
    payload = np.concatenate([np.float32([0.5]).view(np.uint8), np.zeros(12, np.uint8), np.zeros(256, np.uint8)])
    codes = np.arange(256, dtype=np.uint8)
    # Blocks of 128 are 8 rows of 16 lanes: rows 0 to 3 of all lanes, then rows 4 to 7.
    payload[16:] = codes.reshape(2, 2, 4, 16).transpose(0, 1, 3, 2).reshape(-1)
    y = cgx.decode(jnp.asarray(payload), codec, (256,), "float32")
    np.testing.assert_array_equal(y, (codes.astype(np.float32) - 127) * 0.5)
