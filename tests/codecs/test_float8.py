"""Tests Float8 against the standard formats."""

import numpy as np
from helpers import normal, roundtrip

import jaxcgx as cgx


def test_float8_is_the_standard_format():
    import ml_dtypes

    for name, dtype, top in (("e4m3", ml_dtypes.float8_e4m3fn, 448.0), ("e5m2", ml_dtypes.float8_e5m2, 57344.0)):
        numbers = np.arange(256, dtype=np.uint8).view(dtype).astype(np.float32)
        numbers = numbers[np.isfinite(numbers)]
        x = np.concatenate([numbers, [top, -top]])  # the largest number makes the scale 1
        np.testing.assert_array_equal(roundtrip(x, cgx.Float8(name, 512)), x)
        x = np.clip(np.array(normal(500)) * top / 5, -top, top)
        x[0] = top
        np.testing.assert_array_equal(roundtrip(x, cgx.Float8(name, 512)), x.astype(dtype).astype(np.float32))
