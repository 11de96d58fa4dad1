"""Tests ByteGrad against Bagua's formula."""

import jax.numpy as jnp
import numpy as np
from helpers import normal, roundtrip
from ranks import mesh, on_ranks

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


def test_the_steps_of_bagua():
    """The first rank of a node quantizes the node's mean. All ranks get the mean of these over the nodes."""
    grads = jnp.round(normal((2, 4, 3000), 7) * 64)  # whole numbers, whose sums are exact in any order
    codecs = {"a": cgx.ByteGrad(), "b": cgx.Raw()}
    plan = cgx.Plan.every(codecs, schedule="one_shot", own="encoded", leader=True)
    found = on_ranks(lambda g: cgx.compressed_pmean(g, ("a", "b"), plan), mesh(2, 4), check_vma=False)(grads)
    expected = np.mean([roundtrip(node, cgx.ByteGrad()) for node in grads.mean(1)], 0)
    np.testing.assert_allclose(found, np.broadcast_to(expected, grads.shape), rtol=1e-6, atol=1e-6)
    assert np.abs(found - grads.mean((0, 1))).max() > 0.01
