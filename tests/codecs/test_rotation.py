"""Tests rotations alone, and as the first step of MaxMin and AbsMax."""

import dataclasses

import jax
import numpy as np
import pytest
from helpers import RANDOM_KEY, assert_same_bytes, normal, reference_decode, roundtrip, vnmse

import jaxcgx as cgx
from jaxcgx.codecs.rotation import sum_in_order
from jaxcgx.exchange.errors import drawn
from jaxcgx.native.layout import Layout


def test_sums_are_in_order():
    x = np.float32(np.random.RandomState(0).standard_normal((1, 512)) * 1e3)
    blocks = x.reshape(4, 8, 16)
    lanes = blocks[:, 0]
    for row in range(1, 8):
        lanes = lanes + blocks[:, row]
    lanes = (lanes[0] + lanes[1]) + (lanes[2] + lanes[3])
    for half in (8, 4, 2, 1):
        lanes = lanes[:half] + lanes[half : 2 * half]
    assert_same_bytes(np.asarray(jax.jit(sum_in_order)(x))[0], lanes)


@pytest.mark.parametrize("codec", [cgx.MaxMin(4, 512), cgx.MaxMin(4, 512, "stochastic"), cgx.AbsMax(4, 512)], ids=repr)
def test_heavy_tails_lose_no_more_than_normal_numbers(codec):
    xs = [drawn(distribution, 1, 2**17)[0] for distribution in ("normal", "student")]
    plain = [vnmse(x, roundtrip(x, codec)) for x in xs]
    errors = [vnmse(x, roundtrip(x, dataclasses.replace(codec, rotate=True))) for x in xs]
    assert plain[1] > 4 * plain[0]
    assert max(errors) < 1.05 * plain[0]


@pytest.mark.parametrize("exponent", [99, 100, 119, 122, 126])
@pytest.mark.parametrize("codec", [cgx.MaxMin(4, 4096, rotate=True), cgx.AbsMax(4, 4096, rotate=True), cgx.Eden(4)])
def test_large_numbers_are_finite(codec, exponent):
    """The two terms of a bucket's first element may be 2^6 times as large as the bucket."""
    x = np.float32(np.asarray(normal(4096)).clip(-3.9, 3.9) / 4 * 2.0**exponent)
    payload = cgx.encode(x, codec, RANDOM_KEY)
    y = np.asarray(cgx.decode(payload, codec, x.shape, x.dtype))
    assert np.isfinite(y).all()
    assert vnmse(x, y) < 0.03
    assert abs(y[0] - x[0]) < 2.0**exponent / 4
    layout = Layout.of(codec, [x])
    assert_same_bytes(reference_decode(layout)(payload[None])[0], y)


def test_rounding_to_nearest_needs_no_key():
    """The signs are the same everywhere, so a leaf has the same bytes if it is cut between buckets."""
    codec = cgx.MaxMin(4, 128, rotate=True)
    assert not codec.stochastic and codec.may_cut(256)
    x = normal(512)
    np.testing.assert_array_equal(roundtrip(x, codec)[256:], roundtrip(x[256:], codec))
