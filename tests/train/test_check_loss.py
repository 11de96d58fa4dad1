"""Tests that check_loss names the cause of a loss that ranks can't compute in parts, and accepts all others."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from helpers import normal
from jax.sharding import PartitionSpec as P
from training import mesh_of

import jaxcgx as cgx
from jaxcgx.train.check_loss import check_loss

RANDOM = np.random.default_rng(0)
PARAMS = {"w": normal((6, 16), 1), "v": normal((16, 5), 2)}
BATCH = {
    "x": RANDOM.normal(size=(8, 6)).astype(np.float32),
    "y": RANDOM.integers(0, 5, 8).astype(np.int32),
    "mask": np.array([1, 1, 1, 1, 0.5, 1, 1, 1], np.float32),
}
STATE = {"mean": jnp.ones(6), "steps": jnp.int32(0), "key": jax.random.key(3)}
WITH_CLASSES = {**BATCH, "classes": jnp.asarray(RANDOM.random(8), jnp.float32)}
WITHOUT_PARTS = np.float32([0, 1, 0, 1, 1, 0, 1, 1])


def losses(params, batch):
    logits = jnp.tanh(batch["x"] @ params["w"]) @ params["v"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])


def mean(params, batch):
    return losses(params, batch).mean()


def masked(params, batch):
    return (losses(params, batch) * batch["mask"]).sum() / batch["mask"].sum()


def masked_sums(params, batch):
    return (losses(params, batch) * batch["mask"]).sum(), batch["mask"].sum()


def noisy(params, batch, key):
    return mean(params, {**batch, "x": batch["x"] + jax.random.normal(key, batch["x"].shape)})


def of_classes(params, batch):
    return (losses(params, batch) * batch["classes"][batch["y"]]).mean()


def normalized(params, batch, average=lambda x: x):
    x = batch["x"] @ params["w"]
    center = average(x.mean(0, keepdims=True))
    variance = average(((x - center) ** 2).mean(0, keepdims=True))
    return (((x - center) / jnp.sqrt(variance + 1e-3) @ params["v"]) ** 2).mean()


def with_aux(aux):
    return lambda params, batch: (mean(params, batch), aux(batch))


def with_state(new):
    return lambda params, state, batch: (mean(params, batch), {**state, **new(state, batch)})


def in_bfloat16(params, batch):
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    return mean(half, {**batch, "x": batch["x"].astype(jnp.bfloat16)}).astype(jnp.float32)


class Transformer(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(16, 16)(tokens)
        x = x + nn.MultiHeadDotProductAttention(2)(nn.LayerNorm()(x))
        return nn.Dense(16)(nn.gelu(nn.Dense(32)(nn.LayerNorm()(x))))


OPTIONS = dict(has_aux=True)
TWO_LENGTHS = dict(batch=BATCH | {"more": np.ones(12)}, batch_specs=P("data"))
SPECS_OF_CLASSES = dict.fromkeys(BATCH, P("data")) | {"classes": P()}
A_KEY_EACH = BATCH | {"keys": jax.random.split(jax.random.key(1), 8)}
CASES = {  # (loss, options, words of the remedy)
    "weighted mean": (masked, {}, "weighted=True here"),
    "weighted mean, with decay": (lambda p, b: masked(p, b) + 0.1 * (p["w"] ** 2).sum(), {}, "weighted=True here"),
    "no weight in a part": (masked, dict(batch=BATCH | {"mask": WITHOUT_PARTS}), "weighted=True here"),
    "means as sums": (lambda p, b: (masked(p, b), b["mask"].sum()), dict(weighted=True), "losses.sum()"),
    "sum": (lambda p, b: losses(p, b).sum(), {}, "losses.mean()"),
    "sum, of one example": (lambda p, b: losses(p, b).sum(), dict(ranks=8), "losses.mean()"),
    "sum, with decay": (lambda p, b: losses(p, b).sum() + 0.1 * (p["w"] ** 2).sum(), {}, "losses.mean()"),
    "constant size": (lambda p, b: losses(p, b).sum() / 8, {}, "losses.mean()"),
    "class weights": (of_classes, dict(batch=WITH_CLASSES), "batch_specs"),
    "class weights, one each": (of_classes, dict(batch=WITH_CLASSES, ranks=8), "batch_specs"),
    "two lengths": (lambda p, b: mean(p, b) + b["more"].mean(), TWO_LENGTHS, "batch_specs"),
    "closure": (lambda p, b: mean(p, BATCH), {}, "closure"),
    "closure over a mask": (lambda p, b: (losses(p, b) * BATCH["mask"]).mean(), {}, "closure"),
    "broadcast closure": (lambda p, b: (losses(p, b) * BATCH["mask"]).mean(), dict(ranks=8), "closure"),
    "noise": (noisy, dict(key=jax.random.key(0)), "dropout"),
    "hidden noise": (lambda p, b: noisy(p, b, jax.random.key(0)), {}, "noise"),
    "batch norm": (normalized, {}, "batch norm"),
    "aux count": (with_aux(lambda b: {"n": b["mask"].sum()}), OPTIONS, "aux_specs"),
    "aux count of one": (with_aux(lambda b: {"n": jnp.float32(len(b["x"]))}), OPTIONS | dict(ranks=8), "aux_specs"),
    "aux integer": (with_aux(lambda b: {"n": (b["mask"] == 1).sum()}), OPTIONS, "aux_specs"),
    "aux first": (with_aux(lambda b: (b["mask"] == 1).sum()), OPTIONS | dict(aux_specs="first"), "aux_specs"),
    "aux maximum": (with_aux(lambda b: {"n": b["x"].max()}), OPTIONS, "mean"),
    "aux rows": (with_aux(lambda b: b["x"] / b["x"].sum()), OPTIONS, "means or rows"),
    "state count": (with_state(lambda s, b: {"mean": s["mean"] + b["x"].sum(0)}), dict(model_state=STATE), "psum"),
    "state integer": (with_state(lambda s, b: {"steps": s["steps"] + len(b["x"])}), dict(model_state=STATE), "psum"),
}
GOOD = {
    "mean": (mean, {}),
    "one example each": (mean, dict(ranks=8)),
    "one rank": (masked, dict(ranks=1)),
    "large": (lambda p, b: 1e6 * mean(p, b), {}),
    "weighted": (masked_sums, dict(weighted=True)),
    "weighted by parameters": (
        lambda p, b: ((losses(p, b) * (w := b["mask"] * p["v"][0, 0] ** 2)).sum(), w.sum()),
        dict(weighted=True),
    ),
    "class weights": (of_classes, dict(batch=WITH_CLASSES, batch_specs=SPECS_OF_CLASSES)),
    "bfloat16": (in_bfloat16, {}),
    "unused key": (lambda p, b, key: mean(p, b), dict(key=jax.random.key(0))),
    "keys": (
        lambda p, b: mean(p, b | {"x": b["x"] + jax.vmap(lambda k: jax.random.normal(k, (6,)))(b["keys"])}),
        dict(batch=A_KEY_EACH),
    ),
    "batch norm over all": (lambda p, b: normalized(p, b, lambda x: jax.lax.pmean(x, "data")), {}),
    "aux": (
        with_aux(lambda b: {"rows": b["x"] ** 2, "mean": b["mask"].mean(), "n": jax.lax.psum(len(b["x"]), "data")}),
        OPTIONS | dict(aux_specs={"rows": None, "mean": "mean", "n": "first"}),
    ),
    "aux, declared": (
        with_aux(lambda b: ((b["mask"] == 1).sum(), b["x"].T, jax.random.key_data(jax.random.key(b["y"][0])))),
        OPTIONS | dict(aux_specs=("sum", P(None, "data"), "key"), axis=cgx.Tcp("data")),
    ),
    "state": (
        with_state(lambda s, b: {"mean": 0.9 * s["mean"] + 0.1 * b["x"].mean(0), "steps": s["steps"] + 1}),
        dict(model_state=STATE),
    ),
    "state, aux and key": (
        lambda p, s, b, key: (mean(p, b), (s, b["mask"].mean())),
        dict(model_state=STATE, has_aux=True, key=jax.random.key(0)),
    ),
}


def check(loss, ranks=4, params=PARAMS, batch=BATCH, **options):
    check_loss(loss, params, batch, mesh_of(ranks), **options)


@pytest.mark.parametrize("case", CASES)
def test_causes(case):
    loss, options, remedy = CASES[case]
    with pytest.raises(ValueError, match="check_loss: argument '(loss_fn|batch)'") as error:
        check(loss, **options)
    assert remedy in str(error.value).partition("; ")[2]
    assert case != "class weights" or "leaf ['classes']" in str(error.value)


@pytest.mark.parametrize("case", GOOD)
def test_good_losses(case):
    loss, options = GOOD[case]
    check(loss, **options)


def test_the_error_has_both_losses():
    with pytest.raises(ValueError, match="for 4 parts together") as error:
        check(lambda p, b: losses(p, b).sum())
    found = re.search(r"got ([\d.]+) for the whole batch, and ([\d.]+) for", str(error.value))
    assert [float(found[1]), 4 * float(found[2])] == pytest.approx([float(losses(PARAMS, BATCH).sum())] * 2, rel=1e-5)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_models(dtype):
    """A mean over all tokens has no false alarm. A mean over unmasked tokens is seen, although parts differ little."""
    tokens = RANDOM.integers(1, 16, (16, 12)).astype(np.int32)
    model = Transformer()
    params = jax.tree.map(lambda x: x.astype(dtype), jax.jit(model.init)(jax.random.key(0), tokens))

    def each(params, tokens):
        with jax.numpy_dtype_promotion("standard"):  # flax's LayerNorm needs it
            return optax.softmax_cross_entropy_with_integer_labels(model.apply(params, tokens), tokens)

    check(lambda p, b: each(p, b).mean(), params=params, batch=tokens)
    padded = np.where(np.arange(12) < RANDOM.integers(6, 13, (16, 1)), tokens, 0)
    mask = lambda b: (b > 0).astype(dtype)
    check(lambda p, b: ((each(p, b) * mask(b)).sum(), mask(b).sum()), params=params, batch=padded, weighted=True)
    with pytest.raises(ValueError, match="weighted=True"):
        check(lambda p, b: (each(p, b) * mask(b)).sum() / mask(b).sum(), params=params, batch=padded)
