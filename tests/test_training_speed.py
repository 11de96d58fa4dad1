"""Tests benchmarks/training_speed.py: its models, the quantization that is written by hand, the steps to a loss."""

import functools
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

BENCHMARKS = pathlib.Path(__file__).resolve().parent.parent / "benchmarks"


@pytest.fixture(autouse=True)
def benchmarks(monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path, str(BENCHMARKS)])


@pytest.mark.parametrize(
    "model, size, inputs, logits",
    [("transformer", 3_307_008, (2, 64), (2, 64, 256)), ("ResNet-20", 269_434, (2, 28, 28, 1), (2, 10))],
)
def test_models_have_their_size(model, size, inputs, logits):
    from training_speed_data import MAKERS
    from training_speed_models import PREDICT

    weights = MAKERS[model][0](np.random.default_rng(0))
    assert sum(w.size for w in weights.values()) == size
    dtype = jnp.int32 if model == "transformer" else jnp.float32
    assert jax.eval_shape(PREDICT[model], weights, jax.ShapeDtypeStruct(inputs, dtype)).shape == logits


@pytest.mark.parametrize("bits", [4, 8])
def test_the_quantization_by_hand_is_within_its_bound(bits):
    from training_speed_jax import BUCKET, compressed_mean, quantize

    ranks, sizes = 4, {"a": (30, 70), "b": (517,)}
    rng = np.random.default_rng(0)
    grads = {name: rng.standard_normal((ranks, *size)).astype(np.float32) for name, size in sizes.items()}
    lost = rng.standard_normal((ranks, 30 * 70 + 517)).astype(np.float32) * 0.1
    exchange = functools.partial(compressed_mean, encode=functools.partial(quantize, bits=bits))
    means, left = jax.jit(jax.vmap(exchange, axis_name="data"))(grads, lost)
    sums = np.concatenate([grads["a"].reshape(ranks, -1), grads["b"]], 1) + lost
    got = np.concatenate([np.asarray(means["a"]).reshape(ranks, -1), means["b"]], 1)
    assert (got == got[0]).all()
    rows = np.pad(sums, ((0, 0), (0, -sums.shape[1] % (ranks * BUCKET)))).reshape(ranks, -1, BUCKET)
    half = np.repeat(np.ptp(rows, axis=2), BUCKET, 1)[:, : sums.shape[1]] / (2**bits - 1) / 2
    assert (np.abs(left) <= 1.001 * half).all()
    assert (
        np.abs(got[0] - sums.mean(0)) <= 2.2 * half.mean(0)
    ).all()  # ranges of means are no larger, except for rounding
    np.testing.assert_allclose(got[0], (sums - left).mean(0), atol=1.1 * half.mean(0).max())


@pytest.mark.parametrize("count", [3, 8])
def test_the_steps_to_a_loss_have_no_lag(count):
    from training_speed import steps_to

    losses = 5.0 - np.arange(count)  # the loss after `every` * i steps
    target = float(losses[-2]) + 0.25
    assert steps_to(losses, target, every=10) == pytest.approx(10 * (count - 2.25), abs=0.1)
    assert steps_to(losses, losses[-2] - 0.01, every=10) is None
