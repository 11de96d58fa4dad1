"""Tests the size of Eden's error, and that it is unbiased."""

import functools
import math

import jax.numpy as jnp
import numpy as np
import pytest
from errors import table
from helpers import assert_same_bytes, bias, native_key, normal, reference_decode, roundtrip, vnmse

import jaxcgx as cgx
from jaxcgx.exchange.errors import drawn
from jaxcgx.native import ops
from jaxcgx.native.layout import Layout


@functools.cache
def gradients(distribution):
    return drawn(distribution, 1, 2**18)[0]


@pytest.mark.parametrize(("bits", "most"), [(2, 0.135), (3, 0.0365), (4, 0.0098), (5, 0.0026), (6, 0.00067)])
@pytest.mark.parametrize("distribution", ["normal", "laplace", "student"])
def test_the_error_is_that_of_normal_numbers(bits, most, distribution):
    x = gradients(distribution)
    assert vnmse(x, roundtrip(x, cgx.Eden(bits))) <= most


def test_one_bit_reaches_its_limit():
    x = drawn("normal", 1, 2**21)[0]
    assert abs(vnmse(x, roundtrip(x, cgx.Eden(1))) / (math.pi / 2 - 1) - 1) < 0.01


@pytest.mark.parametrize("bits", range(1, 7))
def test_the_kernel_has_the_levels_of_the_reference(bits):
    x, codec = normal((8, 4096)), cgx.Eden(bits, 4096)
    layout = Layout.of(codec, [x])
    payload = ops.encode(layout, [x], native_key(codec))
    for got, expected in zip(ops.decode(layout, payload), reference_decode(layout)(payload), strict=True):
        assert_same_bytes(got, expected)


@pytest.mark.parametrize("bits", [1, 2, 4])
def test_unbiased(bits):
    x = drawn("student", 1, 4096)[0]
    assert bias(cgx.Eden(bits), x) < 1.3
    assert bias(cgx.MaxMin(bits, 4096), x) > 100  # a biased codec would fail


def test_few_elements_that_have_most_of_the_norm_lose_more():
    """They rotate to a few values for every seed, and the error is a bias (docs/error-bounds.md)."""
    outlier = jnp.asarray(drawn("normal", 1, 4096)[0]).at[7].set(1000)
    two = jnp.zeros(4096).at[jnp.array([7, 100])].set(jnp.array([1, 0.04]))
    for x, most in ((outlier, 0.18), (two, 0.25)):
        assert 0.16 < vnmse(x, roundtrip(x, cgx.Eden(2))) < most
        assert bias(cgx.Eden(2), x) > 100
    equal = jnp.zeros(4096).at[jnp.array([7, 100])].set(1)
    assert vnmse(equal, roundtrip(equal, cgx.Eden(1))) == pytest.approx(1)
    one = jnp.zeros(4096).at[7].set(3)
    np.testing.assert_array_equal(roundtrip(one, cgx.Eden(1)), one)


def test_a_rest_takes_the_next_power_of_two():
    codec = cgx.Eden(4)
    assert codec.wire_bytes((4096,), "float32") == 16 + 2048
    assert codec.wire_bytes((4097,), "float32") == 16 + 2048 + 64
    assert codec.wire_bytes((5000,), "float32") == 16 + 2048 + 512
    assert codec.wire_bytes((1,), "float32") == 16 + 64
    x = np.asarray(normal(5000, 3))
    assert vnmse(x[4096:], roundtrip(x, codec)[4096:]) < 0.012


@pytest.mark.parametrize("scale", [1e-44, 1e-39, 1e-20, 1e30, 1e38])
def test_any_magnitude(scale):
    x = np.float32(np.asarray(normal(4096)).clip(-3, 3) * np.float64(scale))
    denormal = (2.0**-149 / scale) ** 2  # error per element from rounding to a denormal
    assert vnmse(x, roundtrip(x, cgx.Eden(4))) < 0.0105 + denormal


def test_zeros_stay():
    zeros = np.zeros(300, np.float32)
    assert_same_bytes(roundtrip(zeros, cgx.Eden(3)), zeros)
    assert_same_bytes(roundtrip(-zeros, cgx.Eden(3)), zeros)


ERRORS = {
    "Eden": [(lambda: cgx.Eden(7), ValueError, "bits", "7"), (lambda: cgx.Eden(4, 1000), ValueError, "block", "1000")]
}
test_errors = table(ERRORS)
