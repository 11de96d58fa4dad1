"""Tests Micro against the standard formats of ml_dtypes."""

import pathlib

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from helpers import bias, each_codec, load_script, normal, roundtrip, vnmse

import jaxcgx as cgx
from jaxcgx.exchange.errors import drawn
from jaxcgx.native.packing import unpack

ELEMENTS = {"nvfp4": ml_dtypes.float4_e2m1fn, "mxfp4": ml_dtypes.float4_e2m1fn, "mxfp8": ml_dtypes.float8_e4m3fn}
BLOCK = {"nvfp4": 16, "mxfp4": 32, "mxfp8": 32}
FORMATS = pytest.mark.parametrize("name", list(ELEMENTS))


def numbers(n):
    """Returns blocks of many magnitudes, with zeros of both signs."""
    x = (
        np.array(normal(n))
        * np.float32(2.0) ** np.repeat(np.random.RandomState(1).randint(-14, 3, n // 16 + 1), 16)[:n]
    )
    x[5::50], x[9::50] = 0, -0.0
    x[64:96] = 0
    return x.astype(np.float32)


def parts(x, name):
    """Returns the sent values: the scale of the tensor or None, a scale per block, and a code per element."""
    bits = 8 if name == "mxfp8" else 4
    scales = 128 // BLOCK[name]
    payload = np.asarray(cgx.encode(x, cgx.Micro(name)))
    tensor = payload[:4].view(np.float32)[0] if name == "nvfp4" else None
    at, count = (16 if name == "nvfp4" else 0), -(-len(x) // 128)
    blocks = payload[at : at + count * (16 * bits + scales)].reshape(count, -1)
    codes = np.asarray(unpack(jnp.asarray(blocks[:, : 16 * bits]), bits, 128)).reshape(-1)
    return tensor, blocks[:, 16 * bits :].reshape(-1)[: -(-len(x) // BLOCK[name])], codes[: len(x)]


def of_blocks(x, block):
    return np.pad(x, (0, -len(x) % block)).reshape(-1, block)


@pytest.mark.parametrize("n", (1, 17, 1000))
@pytest.mark.parametrize("name", ("mxfp4", "mxfp8"))
def test_the_bits_of_mx(name, n):
    """The reference is section 6.3 of OCP's specification, in float64 and with the conversions of ml_dtypes."""
    dtype, x = ELEMENTS[name], numbers(n)
    largest = float(ml_dtypes.finfo(dtype).max)
    blocks = of_blocks(x, 32).astype(np.float64)
    top = np.abs(blocks).max(1, keepdims=True)
    power = np.where(top == 0, -127, np.frexp(top)[1] - 1 - (np.frexp(largest)[1] - 1))
    scale = (2.0**power).astype(np.float32).astype(ml_dtypes.float8_e8m0fnu)
    elements = np.clip(blocks / 2.0**power, -largest, largest).astype(np.float32).astype(dtype)
    _, scales, codes = parts(x, name)
    np.testing.assert_array_equal(scales, scale.view(np.uint8)[:, 0])
    np.testing.assert_array_equal(codes, elements.view(np.uint8).reshape(-1)[:n])
    expected = elements.astype(np.float32) * scale.astype(np.float32)
    np.testing.assert_array_equal(roundtrip(x, cgx.Micro(name)), expected.reshape(-1)[:n])


@pytest.mark.parametrize("n", (1, 17, 1000, 40_000))  # the last size has several stretches
def test_the_bits_of_nvfp4(n):
    x = numbers(n)
    tensor, scales, codes = parts(x, "nvfp4")
    assert np.abs(x).max() / 2688 <= tensor <= np.abs(x).max() / 2688 * (1 + 2.0**-15)
    blocks = of_blocks(x, 16) * (np.float32(1) / tensor)
    scale = (np.abs(blocks).max(1, keepdims=True) / np.float32(6)).astype(ml_dtypes.float8_e4m3fn)
    value = scale.astype(np.float32)
    elements = (blocks * np.where(value > 0, 1 / np.where(value > 0, value, 1), 0)).astype(ml_dtypes.float4_e2m1fn)
    np.testing.assert_array_equal(scales, scale.view(np.uint8)[:, 0])
    np.testing.assert_array_equal(codes, elements.view(np.uint8).reshape(-1)[:n])
    expected = tensor * (elements.astype(np.float32) * value)
    np.testing.assert_array_equal(roundtrip(x, cgx.Micro()), expected.reshape(-1)[:n])


@pytest.mark.parametrize("sign", (1, -1))
@FORMATS
def test_every_number_and_every_tie(name, sign):
    """Tests all numbers of a format, and the midpoints between neighbours, in blocks with scale 1."""
    codes = np.arange(128 if name == "mxfp8" else 8, dtype=np.uint8)
    of = codes.view(ELEMENTS[name]).astype(np.float32)
    of = of[np.isfinite(of)]
    x = np.sort(np.concatenate([of, (of[1:] + of[:-1]) / 2])).astype(np.float32)
    blocks = np.full((-(-len(x) // 8), BLOCK[name]), of[-1], np.float32)  # the largest number determines the scale
    blocks[:, :8] = np.resize(x, (len(blocks), 8))
    x = sign * blocks.reshape(-1)
    expected = x.astype(ELEMENTS[name]).astype(np.float32)
    if name == "nvfp4":  # the tensor's scale is 1
        x, expected = (np.concatenate([y, np.full(16, 2688, np.float32)]) for y in (x, expected))
    np.testing.assert_array_equal(roundtrip(x, cgx.Micro(name)), expected)


STOCHASTIC, EDEN = "stochastic", "eden"


@pytest.mark.parametrize(
    ("codec", "least", "most"),
    [
        (cgx.Micro("nvfp4"), 0.0085, 0.0092),
        (cgx.Micro("mxfp4"), 0.012, 0.0135),
        (cgx.Micro("mxfp8"), 0.0008, 0.0009),
        (cgx.Micro("nvfp4", STOCHASTIC), 0.0215, 0.023),
        (cgx.Micro("mxfp4", STOCHASTIC), 0.026, 0.028),
        (cgx.Micro("mxfp8", STOCHASTIC), 0.00135, 0.0015),
        (cgx.Micro("nvfp4", EDEN), 0.0088, 0.0094),  # less than half of that of stochastic rounding
    ],
    ids=str,
)
def test_errors_of_normal_numbers(codec, least, most):
    x = np.asarray(normal(2**18))
    assert least < vnmse(x, roundtrip(x, codec)) < most


def test_the_error_of_mxfp4_is_the_sum_that_the_docs_derive(monkeypatch):
    x = np.asarray(normal(2**18), np.float64)
    lost = np.square(roundtrip(x.astype(np.float32), cgx.Micro("mxfp4")) - x) / np.square(x).sum()
    y = np.abs(x / np.repeat(2 ** np.floor(np.log2(np.abs(x).reshape(-1, 32).max(1)) - 2), 32))
    parts = [lost[where].sum() for where in (y <= 0.25, (y > 0.25) & (y <= 6), y > 6)]
    figures = load_script(pathlib.Path(__file__).parents[2] / "scripts/figures.py", monkeypatch)
    np.testing.assert_allclose(figures.mxfp4(), parts, rtol=0.03)


@pytest.mark.parametrize(
    "codec", **each_codec([*(cgx.Micro(f, STOCHASTIC) for f in ELEMENTS), cgx.Micro("nvfp4", EDEN)])
)
def test_unbiased(codec):
    x = jnp.asarray(drawn("student", 1, 4096)[0])
    assert bias(codec, x) < 1.3
    assert bias(cgx.Micro(codec.format), x) > 100
    if codec == cgx.Micro("nvfp4", STOCHASTIC):  # also with scales of blocks that are denormals
        assert bias(codec, x.at[:16].set(2688 * 400)) < 1.3


def test_bytes():
    n = 2**20
    assert cgx.Micro("nvfp4").wire_bytes((n,), "float32") == 16 + n * 9 // 16
    assert cgx.Micro("mxfp4").wire_bytes((n,), "float32") == n * 17 // 32
    assert cgx.Micro("mxfp8").wire_bytes((n,), "float32") == n * 33 // 32
    assert cgx.Micro("nvfp4").wire_bytes((1,), "float32") == 16 + 80  # a block of 128, padded to 16 bytes


@pytest.mark.parametrize("value", (np.nan, np.inf, -np.inf))
@pytest.mark.parametrize("codec", **each_codec([cgx.Micro("mxfp4"), cgx.Micro("mxfp8")]))
def test_only_a_block_with_a_non_finite_number_becomes_nan(codec, value):
    x = np.array(normal(1000))
    clean = roundtrip(x, codec)
    x[777] = value
    y = roundtrip(x, codec)
    assert np.isnan(y[768:800]).all()
    np.testing.assert_array_equal(np.delete(y, slice(768, 800)), np.delete(clean, slice(768, 800)))


@FORMATS
def test_the_ends_of_float32(name):
    """Scales are clamped and don't wrap: the largest numbers stay finite, and the smallest become 0 or almost 0."""
    codec = cgx.Micro(name)
    y = roundtrip(np.full(100, 3e38, np.float32), codec)
    np.testing.assert_allclose(y, 3e38, rtol=0.21)
    tiny = np.float32([2**-149, -(2**-140), 2**-128, 3 * 2**-127])
    assert np.abs(roundtrip(tiny, codec) - tiny).max() <= 2**-127
    assert np.abs(roundtrip(tiny[:2], cgx.Micro()) - tiny[:2]).max() <= 2**-143
