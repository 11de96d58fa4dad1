"""Tests that every technique keeps the replicas the same at every step, with few bits.

This holds for the parameters, and for all of the optimizer's state that isn't an array per rank.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxcgx as cgx
from jaxcgx.wan import Overlay, Tree

AXES = "dc", "local"
CODEC = cgx.MaxMin(3, 64, rounding="stochastic")  # each rank draws its own noise
BETWEEN = cgx.Plan({"dc": CODEC, "local": cgx.Raw()}, min_size=0)
INNER = optax.sgd(0.1, momentum=0.9)
SPARSE = dict(optimizer=optax.sgd(0.1), threshold=0.1, size_bound=100)
CENTERS = 3
TREES = Overlay((Tree((-1, 0, 1), 2), Tree((1, -1, 1), 1)))  # the first one is a chain
OVERLAYS = TREES, Overlay((Tree((2, 0, -1), 1),)), Overlay.owners(CENTERS, [2, 1, 1])
TECHNIQUES = {
    "P3": dict(plan=BETWEEN, overlap="priority", slice_elements=400),
    "mixed sync": dict(plan=BETWEEN, compress=cgx.wan.mixed_sync),
    "DGT, defer": dict(plan=BETWEEN, compress=cgx.wan.Differential(k=0.5, block_bytes=256)),
    "DGT, quantize": dict(plan=BETWEEN, compress=cgx.wan.Differential(k=0.5, block_bytes=256, rest="quantize")),
    "DGT, drop": dict(plan=BETWEEN, compress=cgx.wan.Differential(k=0.5, block_bytes=256, rest="drop")),
    "DGT, adaptive": dict(plan=BETWEEN, compress=cgx.wan.Differential(k=0.8, block_bytes=256, adaptive=0.2)),
    "DGT, no feedback": dict(
        plan=BETWEEN, compress=cgx.wan.Differential(k=0.5, block_bytes=256, rest="drop"), feedback=False
    ),
    "BSC": dict(compress=cgx.bsc, **SPARSE),
    "BSC along trees": dict(compress=cgx.bsc, pull="top", schedule={"dc": TREES, "local": "auto"}, **SPARSE),
    "BSC, no feedback": dict(compress=cgx.bsc, feedback=False, momentum_masking=False, **SPARSE),
    "MPQ, the top of sums": dict(compress=cgx.mpq, pull="top", **SPARSE),
    "FP16": dict(plan=cgx.Plan.fp16(axis_name=AXES)),
    "FP16, P3": dict(plan=cgx.Plan.fp16(axis_name=AXES), overlap="priority", slice_elements=400),
    "trees": dict(plan=BETWEEN, schedule={"dc": TREES, "local": "auto"}),
    "trees, P3": dict(plan=BETWEEN, schedule={"dc": TREES, "local": "auto"}, overlap="priority", slice_elements=400),
    "trees that change": dict(plan=BETWEEN),  # with each step, another one of OVERLAYS
    "MultiGPS": dict(plan=BETWEEN, schedule={"dc": OVERLAYS[-1], "local": "auto"}),
    "DiLoCo": dict(diloco=cgx.wan.diloco(INNER, every=2, axis_name="dc", plan=CODEC)),
    "HFA": dict(diloco=cgx.wan.hfa(INNER, k1=1, k2=2, axis_name="dc", plan=CODEC)),
    "HFA, streaming": dict(
        diloco=cgx.wan.hfa(
            INNER, k1=2, k2=2, axis_name="dc", plan=CODEC, fragments=2, overlap=1, alpha=0.5, telemetry=True
        )
    ),
    "SparseLoCo": dict(diloco=cgx.wan.sparseloco(INNER, every=2, ratio=0.1, axis_name="dc")),
}


def replicated(tree):
    """Returns {path: array} of the arrays that every rank has whole. The others are arrays per rank or per center."""
    return {
        jax.tree_util.keystr(path): x
        for path, x in jax.tree_util.tree_flatten_with_path(tree)[0]
        if x.sharding.is_fully_replicated
    }


def assert_same_parts(tree):
    """Checks that ranks which have the same part of an array have the same bits, such as the ranks of a center."""
    for path, x in jax.tree_util.tree_flatten_with_path(tree)[0]:
        parts = {}
        for shard in x.addressable_shards:
            bits = np.asarray(shard.data).tobytes()
            assert parts.setdefault(str(shard.index), bits) == bits, jax.tree_util.keystr(path)


@pytest.mark.parametrize("technique", TECHNIQUES)
def test_replicas_agree(technique):
    mesh = jax.make_mesh((CENTERS, 2), AXES, axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[: 2 * CENTERS])
    loss_fn = lambda params, x: jnp.mean((jnp.tanh(x @ params["w"]) @ params["v"] - 1) ** 2)
    random = np.random.default_rng(0)
    batches = random.standard_normal((6, 12, 40), np.float32)
    params = {"w": random.standard_normal((40, 30), np.float32), "v": random.standard_normal(30, np.float32)}
    options, changes = {"optimizer": INNER, **TECHNIQUES[technique]}, technique == "trees that change"
    schedules = [dict(schedule={"dc": overlay, "local": "auto"}) for overlay in OVERLAYS] if changes else [{}]
    trains = [cgx.make_train_step(loss_fn, mesh=mesh, data_axis=AXES, **options, **each) for each in schedules]
    check = jax.jit(
        jax.shard_map(
            lambda tree: cgx.check_replicas(tree, AXES), mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False
        )
    )
    state, seen, k1 = trains[0].init(params), [params["w"]], getattr(options.get("diloco"), "k1", None)
    for step, (batch, train) in enumerate(zip(batches, itertools.cycle(trains)), 1):
        *state, _ = train.step(*state, batch)
        same = replicated(state)
        assert len(same) > len(params), "the optimizer's state has no replicated array"
        check(same).check()
        assert_same_parts(state)
        if k1 and step % k1 == 0:  # the ranks of a center have just averaged their parameters
            for x in jax.tree.leaves(state[1].centers.rows.params):
                first, second = np.asarray(x).reshape(CENTERS, 2, -1).swapaxes(0, 1)
                np.testing.assert_array_equal(first, second)
        seen.append(np.asarray(state[0]["w"]))
    last, left = trains[0].finish(*state)
    check(replicated((last, left))).check()
    assert_same_parts((last, left))
    assert np.abs(np.asarray(last["w"]) - seen[0]).max() > 1e-3 and np.isfinite(last["w"]).all()
