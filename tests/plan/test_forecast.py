"""Tests Plan.explain: every leaf's codec, message, bytes and reason to stay raw. The bytes are those of the program."""

import math

import jax
import jax.numpy as jnp
import pytest
from errors import table
from gradients import mesh_of
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxcgx as cgx
from jaxcgx.native.layout import Layout

FOUR, EIGHT, RAW = cgx.MaxMin(4), cgx.MaxMin(8, 64), cgx.Raw()
TREE = {
    "bias": jnp.zeros(2000),
    "count": jnp.zeros((40, 40), jnp.int32),
    "empty": jnp.zeros((0, 3)),
    "half": jnp.zeros((65, 33), jnp.bfloat16),
    "layer": [jnp.zeros((300, 101)), jnp.zeros((64, 64))],
    "scale": jnp.zeros(()),
}
KINDS = [FOUR, cgx.MaxMin(4, 64, skip_incomplete=True), cgx.ByteGrad(), cgx.Cast("bfloat16"), cgx.Sign(33)]


@pytest.mark.short
def test_rows():
    plan = cgx.Plan(FOUR, [("layer/1", EIGHT), ("half", RAW)])
    found = plan.explain(TREE, 8)
    layouts = [Layout(codec, (shape,), (jnp.float32,), 8) for codec, shape in ((FOUR, (300, 101)), (EIGHT, (64, 64)))]
    assert [(r.leaf, r.shape, r.dtype, r.axes, r.codec, r.message, r.raw_bytes, r.why) for r in found.rows] == [
        ("bias", (2000,), "float32", (), RAW, None, 8000, "it has one dimension, and the plan has skip_1d=True"),
        ("count", (40, 40), "int32", (), RAW, None, 6400, "int32 is not float32, bfloat16 or float16"),
        ("empty", (0, 3), "float32", (), RAW, None, 0, "it has no elements"),
        ("half", (65, 33), "bfloat16", (), RAW, None, 2 * 65 * 33, "its codec is Raw()"),
        ("layer/0", (300, 101), "float32", (), FOUR, 1, 4 * 30300, None),
        ("layer/1", (64, 64), "float32", (), EIGHT, 2, 4 * 4096, None),
        ("scale", (), "float32", (), RAW, None, 4, "it has 1 element, fewer than the plan's min_size=1024"),
    ]
    # 59 whole buckets and a short one; 64 buckets of 64.
    assert [r.bytes for r in found.rows if not r.why] == [8 * 60 + 256 * 59 + 48, 8 * 64 + 4096]
    assert all(r.bytes == r.raw_bytes and r.ratio == 1 for r in found.rows if r.why)
    assert found.bytes == 8000 + 6400 + 2 * 65 * 33 + 4 + sum(8 * layout.chunk_bytes for layout in layouts)
    assert found.raw_bytes == sum(r.raw_bytes for r in found.rows) == sum(x.nbytes for x in jax.tree.leaves(TREE))
    assert found.ratio == found.raw_bytes / found.bytes


def test_one_rank():
    found = cgx.Plan(FOUR).explain({"w": jnp.zeros((64, 64)), "b": jnp.zeros(3)}, 1)
    assert repr(found) == "<Forecast of leaves: 2, bytes: 16,396, ratio: 1.00>"
    assert [(r.leaf, r.why) for r in found.rows] == [
        ("b", "it has 3 elements, fewer than the plan's min_size=1024"),
        ("w", "there is one rank"),
    ]
    assert found.ratio == 1


def sent(tree, axes, plan):
    """Returns {axes: bytes} of a compiled compressed_psum."""
    names = tuple(name for name, _ in axes)
    psum, mesh = lambda x: cgx.compressed_psum(x, names, plan), mesh_of(AxisType.Auto, *axes)
    f = jax.shard_map(psum, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    return {axes: total for axes, (total, _) in cgx.explain(f, tree, show=False).totals.items() if total}


@pytest.mark.parametrize("codec", KINDS, ids=repr)
@pytest.mark.parametrize("ranks", [2, 5])
def test_bytes_are_those_of_a_program(codec, ranks):
    tree = TREE["layer"] + [TREE["half"], TREE["bias"]]
    plan = cgx.Plan(codec, min_size=0, skip_1d=False, schedule="two_shot")
    found = plan.explain(tree, ranks)
    assert sent(tree, [("data", ranks)], plan) == {("data",): 2 * (ranks - 1) * found.bytes // ranks}
    assert sum(r.bytes for r in found.rows) <= found.bytes < sum(r.bytes for r in found.rows) + ranks * 1000


def test_leaves_that_are_raw_on_every_axis():
    """They travel by shards, whose padding counts. An axis of one rank sends nothing."""
    sizes, tree = {"a": 2, "b": 2, "one": 1, "c": 2}, {"w": jnp.zeros((51, 21)), "v": jnp.zeros(101)}
    plan = cgx.Plan(dict.fromkeys(sizes, RAW), min_size=0, skip_1d=False)
    found = plan.explain(tree, sizes)
    assert [(r.leaf, r.axes, r.codec, r.bytes, r.raw_bytes, r.why) for r in found.rows] == [
        (leaf, (axis,), RAW, size, size, "its codec is Raw()")
        for leaf, share in (("v", 4 * 26), ("w", 4 * 268))
        for axis, size in (("a", share), ("b", 2 * share), ("c", 4 * share))
    ]
    assert sent(tree, list(sizes.items()), plan) == {axes: total for axes, (total, _) in found.totals.items()}


HIERARCHIES = {
    "compressed": ({"a": 2, "b": 4}, {"a": FOUR, "b": EIGHT}),
    "raw within": ({"a": 3, "b": 2}, {"a": FOUR, "b": RAW}),
    "raw between": ({"a": 2, "b": 2}, {"a": RAW, "b": FOUR}),
    "three": ({"a": 2, "b": 2, "c": 2}, {"a": FOUR, "b": RAW, "c": EIGHT}),
}


@pytest.mark.parametrize("name", HIERARCHIES)
def test_hierarchies_by_leaders(name):
    """Leaders pass on the encoded bytes that they receive."""
    sizes, codecs = HIERARCHIES[name]
    tree, plan = TREE["layer"], cgx.Plan(codecs, leader=True, schedule="two_shot")
    found = plan.explain(tree, sizes)
    ranks = lambda axes: math.prod(sizes[name] for name in axes)
    expected = {axes: 2 * (ranks(axes) - 1) * total // ranks(axes) for axes, (total, _) in found.totals.items()}
    assert sent(tree, list(sizes.items()), plan) == expected


def test_leaders_are_of_hierarchies():
    """A leaf with one codec for all ranks, or with one axis, has no leader."""
    tree, sizes = {"v": jnp.zeros((64, 64), jnp.bfloat16), "w": jnp.zeros((64, 64))}, {"a": 2, "b": 4}
    rules, by_axis = [("v", EIGHT)], {"a": FOUR, "b": RAW}
    led, flat = (cgx.Plan(by_axis, rules, leader=leader).explain(tree, sizes) for leader in (True, False))
    assert led.rows[0] == flat.rows[0] and led.totals != flat.totals
    half = cgx.Cast("float16")
    one, of_one = (cgx.Plan(codec, leader=True).explain(tree, {"a": 4}) for codec in (half, {"a": half}))
    assert one == of_one == cgx.Plan(half).explain(tree, {"a": 4})


def test_codecs_of_an_axis_of_one_rank_are_not_used():
    found = cgx.Plan({"a": FOUR, "b": EIGHT}).explain({"w": jnp.zeros((64, 64))}, {"a": 1, "b": 2})
    assert [(r.axes, r.codec) for r in found.rows] == [(("b",), EIGHT)]


def test_one_codec_over_several_axes():
    found = cgx.Plan(FOUR, [("b", RAW)]).explain({"w": jnp.zeros((64, 64)), "b": jnp.zeros((64, 64))}, {"a": 2, "b": 2})
    assert {r.leaf: (r.axes, r.codec) for r in found.rows} == {"w": (("a", "b"), FOUR), "b": (("a", "b"), RAW)}
    assert found.totals[("a", "b")][0] == 4 * Layout(FOUR, ((64, 64),), (jnp.float32,), 4).chunk_bytes + 4 * 4096


def test_an_empty_tree():
    found = cgx.Plan(FOUR).explain({}, 4)
    assert (found.rows, found.bytes, found.ratio) == ((), 0, 1)
    assert " ".join(str(found).split()[-5:]) == "in all 0 0 1.00"


BY_AXIS, explain = {"node": FOUR, "local": RAW}, cgx.Plan(FOUR).explain
LEVELS, A_RING = (cgx.Plan(FOUR, schedule={"node": "ring"} | rest) for rest in ({"local": "auto"}, {}))
UNUSED = cgx.Plan(FOUR, [("kernel", FOUR)])
BAD_INPUT = {
    "Plan.explain": [
        (lambda: explain(TREE, 0), ValueError, "axis_size", "0"),
        (lambda: explain(TREE, "data"), TypeError, "axis_size", "'data'"),
        (lambda: explain(TREE, {}), ValueError, "axis_size", "{}"),
        (lambda: explain(TREE, {"a": 2, "b": -1}), ValueError, "axis_size", "{'a'"),
        (lambda: cgx.Plan(BY_AXIS).explain(TREE, 8), ValueError, "axis_size", "8"),
        (lambda: cgx.Plan(FOUR, [("half", BY_AXIS)]).explain(TREE, {"node": 2}), ValueError, "axis_size", "{'node'"),
        (lambda: LEVELS.explain(TREE, 8), ValueError, "axis_size", "8"),
        (lambda: A_RING.explain({}, {"node": 2, "b": 2}), ValueError, "axis_size", "{'node'"),
        (lambda: explain({"w": [1.0]}, 2), TypeError, "tree 'w/0'", "1.0"),
        (lambda: UNUSED.explain({"w": jnp.zeros(3)}, 2), ValueError, "tree", "none for Rule("),
    ]
}
test_bad_input = table(BAD_INPUT)
