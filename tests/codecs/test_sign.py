"""Tests Sign: one bit per element, and the mean magnitude of the bucket."""

import numpy as np
import pytest
from helpers import assert_same_bytes, normal, roundtrip

import jaxcgx as cgx


@pytest.mark.parametrize("size", [1, 7, 33, 512])
def test_signs_times_the_mean_magnitude(size):
    x = np.array(normal(1000, 2), np.float32)
    y = roundtrip(x, cgx.Sign(size))
    np.testing.assert_array_equal(np.signbit(y), np.signbit(x))
    for i in range(0, 1000, size):
        mean = np.abs(x[i : i + size].astype(np.float64)).mean()
        assert len(set(np.abs(y[i : i + size]))) == 1
        assert mean * (1 - 2**-20) <= abs(y[i]) <= mean * (1 + 2**-15 + 2**-20)  # units have 16 bits and are rounded up


def test_zeros_have_their_sign():
    """Among other numbers, it is that of the mean magnitude. A bucket of zeros becomes +0."""
    np.testing.assert_array_equal(roundtrip([0.0, -0.0, 3.0, -3.0], cgx.Sign()), [1.5, -1.5, 1.5, -1.5])
    zeros = np.zeros(5, np.float32)
    assert_same_bytes(roundtrip(zeros, cgx.Sign()), zeros)
    assert_same_bytes(roundtrip(-zeros, cgx.Sign()), zeros)


def test_a_bit_an_element():
    """Bit r of lane l's byte is 1 if the element of row r is positive."""
    x = np.ones(128, np.float32)
    x[[0, 16, 127]] = -1
    payload = np.asarray(cgx.encode(x, cgx.Sign(128)))
    assert payload[:4].view(np.float32) == 1 and len(payload) == 16 + 16
    np.testing.assert_array_equal(payload[16:], [0xFC, *[0xFF] * 14, 0x7F])
