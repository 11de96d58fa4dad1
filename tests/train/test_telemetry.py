"""Tests the telemetry of exchanges."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exchanging import GRADS, RANKS, pmean, run
from helpers import assert_same_trees
from training import CODEC, PARAMS

import jaxcgx as cgx


@pytest.mark.filterwarnings("ignore:.*may lose too much")
@pytest.mark.parametrize("keep", [True, False])
def test_telemetry(keep):
    plan = cgx.Plan(CODEC, min_size=100)
    (_, _), (mean, state) = run(cgx.Feedback(plan, keep=keep, telemetry=True), 2)
    found = state.shared.telemetry
    residuals = jax.tree.map(jnp.zeros_like, GRADS)
    if keep:
        residuals = pmean(plan)[1]
    lost = pmean(plan, residuals=residuals)[1]["w"]
    meant = GRADS["w"] + residuals["w"]
    np.testing.assert_allclose(found.vnmse["w"], (lost**2).sum() / (meant**2).sum(), rtol=1e-5)
    np.testing.assert_allclose(found.saturation["w"], (jnp.abs(lost) >= jnp.abs(meant)).mean(), rtol=1e-5)
    assert 0 < found.saturation["w"] < 1
    assert (found.vnmse["b"], found.saturation["b"]) == (0, 0)
    assert {k: (int(found.bytes[k]), int(found.uncompressed[k])) for k in PARAMS} == {
        "w": (CODEC.wire_bytes((30, 40), jnp.float32), 4800),
        "b": (160, 160),
    }
    assert_same_trees(mean, run(cgx.Feedback(plan, keep=keep), 2)[1][0])
    assert keep == bool(jax.tree.leaves(state.own))


@pytest.mark.parametrize("own", ["raw", "encoded"])
def test_telemetry_of_both_roundings(own):
    """With own="raw", `lost` is the whole error of the mean. With "encoded", it doesn't include the second rounding."""
    ((mean, state),) = run(cgx.Feedback(cgx.Plan.every(CODEC, schedule="two_shot", own=own), telemetry=True))
    lost = state.own.residuals["w"]
    np.testing.assert_allclose(state.shared.telemetry.vnmse["w"], (lost**2).sum() / (GRADS["w"] ** 2).sum(), rtol=1e-5)
    assert np.allclose(GRADS["w"].mean(0) - mean["w"], lost.mean(0), atol=1e-5) == (own == "raw")


def test_telemetry_of_zeros_and_of_infinities():
    grads = {"w": jnp.zeros((RANKS, 30, 40)), "b": GRADS["b"].at[1, 0].set(jnp.inf)}
    ((_, state),) = run(cgx.Feedback(CODEC, telemetry=True), 1, grads)
    found = state.shared.telemetry
    assert (found.vnmse["w"], found.saturation["w"]) == (0, 0)
    assert not np.isfinite(found.vnmse["b"]) and found.saturation["b"] > 0
