"""Tests what holds for every codec, and encoding and decoding one array."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import CODECS, FULL, GRIDS, RANDOM_KEY, assert_same_bytes, each_codec, normal, roundtrip

import jaxcgx as cgx


def buckets(x, codec):
    """Returns the numbers of each bucket of a flat array."""
    size = codec.bucket_size or len(x)
    return [x[i : i + size] for i in range(0, len(x), size)]


@pytest.mark.parametrize("codec", **each_codec())
def test_shapes_dtypes_and_bytes(codec):
    key = RANDOM_KEY if codec.stochastic else None
    shapes, dtypes = ((1025,), (), (0,), (1,), (17,), (3, 5, 7)), ("float32", "bfloat16", "float16")
    # By default the first shape has every dtype, and each of the other shapes has one. Codecs without kernels compile
    # slowly.
    xs = [
        normal(shape, dtype=dtype)
        for i, shape in enumerate(shapes)
        for j, dtype in enumerate(dtypes)
        if FULL or i == 0 or i % 3 == j
    ]

    @jax.jit  # one program compiles faster than many
    def run(xs):
        payloads = [cgx.encode(x, codec, key) for x in xs]
        return (
            payloads,
            [cgx.decode(p, codec, x.shape, x.dtype) for p, x in zip(payloads, xs)],
            [cgx.roundtrip(x, codec, key) for x in xs],
        )

    for x, payload, y, expected in zip(xs, *run(xs), strict=True):
        assert payload.dtype == jnp.uint8 and payload.shape == (codec.wire_bytes(x.shape, x.dtype),)
        assert y.shape == x.shape and y.dtype == x.dtype
        assert_same_bytes(y, expected)


@pytest.mark.parametrize(
    "codec, makes_codes, sums_grow, trims_sums",
    [
        (cgx.MaxMin(4), True, False, False),
        (cgx.TopK(0.1), True, True, False),
        (cgx.TopK(0.1, pull="top"), True, False, True),
        (cgx.PowerSGD(4), False, False, False),
        (cgx.Raw(), False, False, False),
        (cgx.Skip(), False, False, False),
    ],
    ids=str,
)
def test_what_follows_from_traits(codec, makes_codes, sums_grow, trims_sums):
    assert (codec.makes_codes, codec.sums_grow, codec.trims_sums) == (makes_codes, sums_grow, trims_sums)


def test_wire_bytes():
    """Bytes are metadata, then codes, each padded to 16 bytes."""
    n = 1_000_000
    assert cgx.MaxMin(4).wire_bytes((n,), "float32") == 1954 * 8 + (1953 * 256 + 32)
    assert cgx.MaxMin(4, 1024).wire_bytes((n,), "bfloat16") == 977 * 8 + 8 + 976 * 512 + 288
    assert cgx.MaxMin(1, 33).wire_bytes((66,), "float32") == 16 + 16
    assert cgx.ByteGrad().wire_bytes((n,), "float32") == 16 + n
    assert cgx.AbsMax(8, 256).wire_bytes((512,), "float32") == 16 + 512
    assert cgx.Sign(512).wire_bytes((n,), "float32") == 1954 * 4 + 8 + n // 8 + 8
    assert cgx.Cast("float16").wire_bytes((7,), "float32") == 16
    assert cgx.Raw().wire_bytes((7,), "float32") == 32 and cgx.Raw().wire_bytes((7,), "bfloat16") == 16
    assert cgx.MaxMin(4, 64, skip_incomplete=True).wire_bytes((67,), "float32") == 16 + 32 + 16


def bound(codec, x):
    """Returns the largest error that is allowed for a bucket with the numbers x."""
    lo, hi = float(x.min()), float(x.max())
    top = max(abs(lo), abs(hi))
    if codec.rotate:  # levels of normally distributed numbers; errors are spread over the bucket
        levels = 2 ** getattr(codec, "bits", 4) - 1
        return 16 * float(np.sqrt(np.square(x, dtype=np.float64).mean())) / levels + 2.0**-22 * top
    match codec:
        case cgx.MaxMin():
            unit = (hi - lo) / (2**codec.bits - 1)
        case cgx.ByteGrad():
            unit = (hi - lo + (1e-7 if codec.compatible else 0)) / 255
        case cgx.AbsMax():
            unit = top / codec.top
        case cgx.Float8():  # half a step of the largest binade
            unit = top / (14 if codec.format == "e4m3" else 7)
        case cgx.Micro():  # relative to a block's largest number; NVFP4's scale may round down, MX has powers of two
            return (
                top * {"nvfp4": 0.18, "mxfp4": 0.255, "mxfp8": 0.128}[codec.format] * (2.1 if codec.stochastic else 1)
            )
        case cgx.Sign():
            return 2 * top
        case cgx.Cast():
            unit = top * 2.0 ** (-8 if codec.dtype == "bfloat16" else -11) * 2
        case cgx.Lossless():
            return 0
    # `unit` is rounded up by at most 2^-15, and a level is up to 255 units. The rest is the rounding of float32.
    return unit * (1.0 if codec.stochastic else 0.5) * 1.01 + 2.0**-22 * top


@pytest.mark.parametrize("codec", **each_codec([c for c in CODECS if not c.raw and not c.skip_incomplete]))
@pytest.mark.parametrize("scale, offset", [(1e-38, 0.0), (1e-20, 3.0), (1e-3, 0.0), (1.0, 3.0), (1e30, 0.0)])
def test_error_bound(codec, scale, offset):
    if isinstance(codec, cgx.Cast) and codec.dtype == "float16" and not 1e-3 <= scale <= 1:
        return  # out of float16's range; see test_cast.py
    x = (np.random.RandomState(0).standard_normal(2000) + offset).astype(np.float32) * np.float32(scale)
    y = roundtrip(x, codec)
    for a, b in zip(buckets(x, codec), buckets(y, codec)):
        error = np.abs(a.astype(np.float64) - b.astype(np.float64)).max()
        assert error <= bound(codec, a) + 2e-45, (error, bound(codec, a))


@pytest.mark.parametrize(
    "codec",
    **each_codec(
        [c for c in GRIDS if c != cgx.ByteGrad(compatible=True) and type(c) is not cgx.Micro and not c.rotate]
    ),
)
@pytest.mark.parametrize("constant", (0.0, -3.14159, 1e-45, 1.17e-38, -3.4e38))
def test_a_constant_bucket_is_exact(codec, constant):
    x = np.full(700, constant, np.float32)
    np.testing.assert_array_equal(roundtrip(x, codec), x)


@pytest.mark.parametrize(
    "codec", **each_codec([*map(cgx.AbsMax, (2, 4, 8)), cgx.ByteGrad(), *map(cgx.Float8, ("e4m3", "e5m2"))])
)
def test_zero_is_exact(codec):
    """test_cast.py, test_micro.py, test_raw.py and test_golden.py have zeros of the other codecs that keep them."""
    x = np.array(normal(1000, 1) * 1e-3)
    x[::7] = 0
    assert (roundtrip(x, codec)[::7] == 0).all()


@pytest.mark.parametrize("codec", **each_codec([c for c in GRIDS if not c.skip_incomplete]))
@pytest.mark.parametrize("value", (np.nan, -np.inf))
def test_a_bucket_with_a_non_finite_number_becomes_nan(codec, value):
    x = np.array(normal(2000))
    clean = roundtrip(x, codec)
    x[777] = value
    y = roundtrip(x, codec)
    size = codec.bucket_size or 2000
    bucket = slice(777 // size * size, 777 // size * size + size)
    assert np.isnan(y[bucket]).all() and np.isfinite(clean).all()
    # The other buckets are unaffected.
    np.testing.assert_array_equal(np.delete(y, bucket), np.delete(clean, bucket))


@pytest.mark.parametrize("codec", **each_codec([cgx.MaxMin(4), cgx.MaxMin(1), cgx.ByteGrad()]))
def test_a_range_that_float32_cannot_hold_becomes_nan(codec):
    assert np.isnan(roundtrip([3e38, -3e38, 0.0], codec)).all()
    assert np.isfinite(roundtrip([1e38, -1e38, 0.0], codec)).all()
    # The largest level exceeds the largest float32, but the range doesn't.
    assert not np.isinf(roundtrip([1e38, 3.4028235e38, 2e38], codec)).any()


@pytest.mark.parametrize(
    "codec", [c for c in CODECS if c.stochastic and c.bucket_size != 33] + [cgx.MaxMin(2, 64, "stochastic")], ids=repr
)
def test_stochastic_rounding_is_unbiased(codec):
    x = normal(256)
    draws = 4000
    mean = jax.jit(lambda keys: jax.vmap(lambda k: cgx.roundtrip(x, codec, k))(keys).mean(0))(
        jax.random.split(jax.random.key(1), draws)
    )
    step = bound(codec, np.asarray(x))
    # A rounded number's standard deviation is at most half a step. The 256 means are within 5 standard deviations.
    np.testing.assert_allclose(mean, x, atol=5 * 0.5 * step / np.sqrt(draws) + 1e-6, rtol=0)
