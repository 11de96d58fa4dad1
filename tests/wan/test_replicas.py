"""Tests that every technique keeps the replicas the same at every step, with few bits.

This holds for the parameters, and for all of the optimizer's state that isn't an array per rank.
"""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import mesh_with

import jaxcgx as cgx
from jaxcgx.wan import Overlay, Tree
from jaxcgx.wan.geomx import differential

AXES = "dc", "local"
CODEC = cgx.MaxMin(3, 64, rounding="stochastic")  # each rank draws its own noise
BETWEEN = cgx.Plan({"dc": CODEC, "local": cgx.Raw()}, min_size=0)
CENTERS = 3
TREES = Overlay((Tree((-1, 0, 1), 2), Tree((1, -1, 1), 1)))  # the first one is a chain
OVERLAYS = TREES, Overlay((Tree((2, 0, -1), 1),)), Overlay.owners(CENTERS, [2, 1, 1])
P3 = dict(overlap=cgx.Priority(slice_elements=400))
DGT = functools.partial(cgx.wan.Differential, BETWEEN, block_bytes=256)


def along(*overlays):
    """Returns the plan of compression between centers, along these overlays. None: one that it chooses."""
    return [dataclasses.replace(BETWEEN, schedule={"dc": overlay, "local": "auto"}) for overlay in overlays]


# {name: (exchange, or exchanges that take turns, options of make_train_step)}
TECHNIQUES = {
    "P3": (BETWEEN, P3),
    "mixed sync": (cgx.wan.MixedSync(BETWEEN), {}),
    "DGT, defer": (DGT(k=0.5), {}),
    "DGT, quantize": (DGT(k=0.5, rest="quantize"), {}),
    "DGT, drop": (DGT(k=0.5, rest="drop"), {}),
    "DGT, adaptive": (DGT(k=0.8, adaptive=0.2), {}),
    "DGT, no feedback": (DGT(k=0.5, rest="drop", keep=False), {}),
    "BSC": (cgx.BSC(0.1, 100), {}),
    "BSC along trees": (cgx.BSC(0.1, 100, pull="top", schedule={"dc": TREES, "local": "auto"}), {}),
    "MPQ, the top of sums": (cgx.MPQ(0.1, 100, pull="top"), {}),
    "FP16": (cgx.Plan.fp16(axis_name=AXES), {}),
    "FP16, P3": (cgx.Plan.fp16(axis_name=AXES), P3),
    "trees": (along(TREES), {}),
    "trees, P3": (along(TREES), P3),
    "trees that change": (along(*OVERLAYS), {}),
    "MultiGPS": (along(OVERLAYS[-1]), {}),
    "DiLoCo": (cgx.wan.Diloco(CODEC, 2, inside=cgx.MaxMin(8, 64, "stochastic")), {}),
    "HFA": (cgx.wan.HFA(CODEC, 1, 2), {}),
    "HFA, streaming": (cgx.wan.HFA(CODEC, 2, 2, fragments=2, overlap=1, alpha=0.5, telemetry=True), {}),
    "SparseLoCo": (cgx.wan.SparseLoCo(cgx.TopK(0.1, values=cgx.MaxMin(2)), every=2), {}),
}
with pytest.warns(UserWarning, match="may lose too much"):
    TECHNIQUES["BSC, no feedback"] = cgx.BSC(0.1, 100, keep=False, masking=False), {}


def assert_same_parts(tree):
    """Checks that ranks which have the same part of an array have the same bits.

    They are the ranks of a center, or, of an array that every rank has whole, all ranks.
    """
    for path, x in jax.tree_util.tree_flatten_with_path(tree)[0]:
        parts = {}
        for shard in x.addressable_shards:
            bits = np.asarray(shard.data).tobytes()
            assert parts.setdefault(str(shard.index), bits) == bits, jax.tree_util.keystr(path)


@pytest.mark.parametrize("technique", TECHNIQUES)
@jax.numpy_rank_promotion("raise")
def test_replicas_agree(technique, monkeypatch):
    monkeypatch.setattr(differential, "LEVELS", 4)  # each is a branch of the program
    mesh = mesh_with(dc=CENTERS, local=2)
    loss_fn = lambda params, x: jnp.mean((jnp.tanh(x @ params["w"]) @ params["v"] - 1) ** 2)
    random = np.random.default_rng(0)
    batches = random.standard_normal((6, 12, 40), np.float32)
    params = {"w": random.standard_normal((40, 30), np.float32), "v": random.standard_normal(30, np.float32)}
    exchange, options = TECHNIQUES[technique]
    optimizer = optax.sgd(0.1, momentum=None if isinstance(exchange, cgx.BSC) else 0.9)
    make = lambda each: cgx.make_train_step(loss_fn, optimizer, mesh, each, sharding=cgx.Sharding(AXES), **options)
    trains = list(map(make, exchange if isinstance(exchange, list) else [exchange]))
    state = trains[0].init(params)
    for batch, train in zip(batches, itertools.cycle(trains)):
        state, _ = train.step(state, batch)
        whole = sum(x.sharding.is_fully_replicated for x in jax.tree.leaves(state))
        assert whole > len(params), "the optimizer's state has no replicated array"
        assert_same_parts(state)
    last = trains[0].finish(state)
    assert_same_parts(last)
    assert np.abs(np.asarray(last.params["w"]) - params["w"]).max() > 1e-3 and np.isfinite(last.params["w"]).all()
