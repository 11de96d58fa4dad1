"""Tests ByteGrad against Bagua's formula."""

import jax.numpy as jnp
import numpy as np
from helpers import normal, roundtrip

import jaxcgx as cgx


def test_bytegrad_is_baguas_grid():
    """Bagua's formula in float64 has the same codes, except at ties that its epsilon or the 16-bit unit decides."""
    for scale in (1.0, 1e-5):
        x = np.array(normal(4096, 5, scale=scale), np.float64)
        step = 255 / (x.max() - x.min() + 1e-7)
        upper = np.rint(x.max() * step)
        expected = (np.minimum(np.rint(x * step), upper)) / step
        got = roundtrip(x, cgx.ByteGrad(compatible=True))
        unit = 1 / step
        assert np.abs(got - expected).max() <= 1.01 * unit
        assert (np.abs(got - expected) < 0.01 * unit).mean() > 0.98
    tiny = normal(512, 6, scale=1e-10)
    relative = lambda c: float(jnp.linalg.norm(cgx.roundtrip(tiny, c) - tiny) / jnp.linalg.norm(tiny))
    assert relative(cgx.ByteGrad()) < 0.02 < 0.5 < relative(cgx.ByteGrad(compatible=True))
