"""Tests collectives with a plan: every leaf has a codec, an exchange and a reason. Leaves that it skips are zeros."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from errors import refused
from helpers import assert_same_bytes, assert_same_trees, assert_trees, normal, planned
from jax import lax
from jax.sharding import PartitionSpec as P
from ranks import mesh, on_ranks

import jaxcgx as cgx

KEY = jax.random.key(7)
STOCHASTIC = cgx.MaxMin(4, 64, rounding="stochastic")
PLAN = cgx.Plan(
    cgx.MaxMin(4), rules=[("embed", cgx.MaxMin(8)), ("raw", cgx.Raw()), (r"layers/\d+/noisy", STOCHASTIC)], min_size=100
)


def tree(*ranks):
    shapes = {"embed": (40, 30), "raw": (50, 50), "bias": (2000,), "tiny": (3, 3), "out": (64, 64)}
    leaves = {name: normal((*ranks, *shape), i) for i, (name, shape) in enumerate(shapes.items())}
    layers = [{"kernel": normal((*ranks, 30, 40), 10 + i), "noisy": normal((*ranks, 40, 30), 20 + i)} for i in range(2)]
    return leaves | {"layers": layers, "step": jnp.ones((*ranks, 5), jnp.int32)}


def test_every_leaf_as_with_its_codec_alone():
    """With own="encoded", other leaves don't matter: each leaf has the bits of a sum with one codec for all."""
    plan_of = lambda codec: planned(codec, schedule="two_shot", own="encoded")
    total = lambda codec, key: lambda t: cgx.compressed_psum(t, "a", plan_of(codec), key=key)
    run = lambda codec, key=KEY: on_ranks(total(codec, key), mesh(4))(tree(4))
    got, four, eight, noisy = run(PLAN), run(cgx.MaxMin(4), None), run(cgx.MaxMin(8), None), run(STOCHASTIC)
    plain = on_ranks(lambda t: lax.psum(t, "a"), mesh(4))(tree(4))
    assert_same_bytes(got["embed"], eight["embed"])
    assert_same_bytes(got["out"], four["out"])
    for i in range(2):
        assert_same_bytes(got["layers"][i]["kernel"], four["layers"][i]["kernel"])
        assert_same_bytes(got["layers"][i]["noisy"], noisy["layers"][i]["noisy"])
    for name in ("raw", "bias", "tiny", "step"):
        assert_same_bytes(got[name], plain[name])


@pytest.mark.short
def test_a_message_for_each_codec_and_a_reason_for_each_raw_leaf():
    f = lambda t: cgx.compressed_psum(t, "a", planned(PLAN, schedule="one_shot"), key=KEY)
    step = jax.shard_map(f, mesh=mesh(4), in_specs=P("a"), out_specs=P())
    found = cgx.explain(step, jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), tree(4)), show=False)
    compressed = [c for c in found.collectives if c.dtype == "uint8"]
    assert {len(c.leaves) for c in compressed} == {1, 2, 3}
    assert {c.codec.split("(")[0] for c in compressed} == {"MaxMin"}
    reasons = {leaf.path: leaf.reason for leaf in found.raw}
    assert set(reasons) == {"['raw']", "['bias']", "['tiny']", "['step']"}
    assert "min_size=100" in reasons["['tiny']"] and "skip_1d" in reasons["['bias']"] and "Raw()" in reasons["['raw']"]


@pytest.mark.parametrize("sizes", [(1, 4), (4, 1)])
def test_an_axis_of_one_rank_is_no_stage(sizes):
    codecs = {"a": cgx.MaxMin(4), "b": cgx.MaxMin(4)}
    schedule = {"a": "ring", "b": "two_shot"} if sizes[0] == 1 else {"a": "two_shot", "b": "ring"}
    plans = planned(codecs, schedule=schedule), planned(cgx.MaxMin(4), schedule="two_shot")
    f = lambda t: [cgx.compressed_psum(t, ("a", "b"), plan) for plan in plans]
    assert_trees(assert_same_bytes, *on_ranks(f, mesh(*sizes))(tree(*sizes)))


def test_a_key_is_of_use_on_one_node_too():
    codecs = {"a": STOCHASTIC, "b": cgx.Raw()}
    on_ranks(lambda x: cgx.compressed_psum(x, ("a", "b"), codecs, key=KEY), mesh(1, 2))(normal((1, 2, 40), 0))


def test_codecs_by_axis_there_and_back():
    x, codecs = normal((2, 4, 8, 100), 0), {"a": cgx.MaxMin(4), "b": cgx.MaxMin(8)}
    gathered = lambda plan: lambda x: cgx.compressed_all_gather(x, ("a", "b"), plan, backward_plan=codecs, tiled=True)
    grad = lambda plan: on_ranks(jax.grad(lambda x: gathered(plan)(x).sum()), mesh(2, 4))(x)
    assert_same_bytes(grad(cgx.Raw()), grad({"a": cgx.Raw(), "b": cgx.Raw()}))


def test_leaders_are_of_hierarchies():
    """A leaf with one codec for all ranks has no leader, even if other leaves of the plan have leaders."""
    codecs = {"a": cgx.MaxMin(4), "b": cgx.Raw()}
    plan = cgx.Plan(codecs, rules=[("embed", cgx.MaxMin(8))], min_size=100, leader=True)
    t = {name: tree(2, 4)[name] for name in ("embed", "out")}
    plans = plan, planned(codecs, leader=True), cgx.MaxMin(8)
    got, led, flat = on_ranks(lambda t: [cgx.compressed_psum(t, ("a", "b"), each) for each in plans], mesh(2, 4))(t)
    np.testing.assert_allclose(got["out"], led["out"], atol=3)
    np.testing.assert_allclose(got["embed"], flat["embed"], atol=0.3)


def test_a_codec_of_the_transpose_holds_where_a_guard_leaves_the_value_raw():
    plans = dict(plan=cgx.Plan(cgx.MaxMin(8)), backward_plan=cgx.MaxMin(4))
    f = jax.grad(lambda x: cgx.compressed_all_gather(x, "a", tiled=True, **plans).sum())
    step = jax.shard_map(f, mesh=mesh(4), in_specs=P("a"), out_specs=P("a"))
    found = cgx.explain(step, jnp.ones(4 * 4096), show=False)
    assert [c.codec for c in found.collectives if c.dtype == "uint8"] == ["MaxMin(bits=4)"]


def test_other_collectives_take_plans_and_transpose_by_them():
    x = {"embed": normal((2, 8, 4, 16), 0), "out": normal((2, 8, 4, 16), 1)}
    plan = cgx.Plan(cgx.MaxMin(4), rules=[("embed", cgx.MaxMin(8))], min_size=0)

    def each(codec):
        gathered = lambda t: cgx.compressed_all_gather(t, "a", cgx.Raw(), backward_plan=codec)
        f = lambda t: (
            cgx.compressed_psum_scatter(t, "a", codec, tiled=True),
            cgx.compressed_all_gather(t, "a", codec),
            cgx.compressed_all_to_all(t, "a", 0, 0, codec, tiled=True),
            jax.grad(lambda t: sum((v**2).sum() for v in jax.tree.leaves(gathered(t))))(t),
        )
        return on_ranks(f, mesh(2))(x)

    for got, eight, four in zip(each(plan), each(cgx.MaxMin(8)), each(cgx.MaxMin(4)), strict=True):
        assert_same_bytes(got["embed"], eight["embed"])
        assert_same_bytes(got["out"], four["out"])
        assert (got["out"] != eight["out"]).any()


def test_keys():
    """A key is required if a leaf of this tree draws noise, and of use if a leaf of any tree would draw noise."""
    run = lambda t, plan, key: on_ranks(lambda t: cgx.compressed_psum(t, "a", plan, key=key), mesh(2))(t)
    quiet = {"embed": normal((2, 40, 30), 0)}
    noisy = quiet | {"noise": normal((2, 40, 30), 1)}
    by_path = cgx.Rule(STOCHASTIC, where=lambda path, leaf: path == "noise")
    plan = cgx.Plan(cgx.MaxMin(4), rules=[by_path, ("embed", cgx.MaxMin(8))])
    refused("compressed_psum", lambda: run(noisy, plan, None), ValueError, "key", "None")
    run(noisy, plan, KEY)
    stochastic_default = cgx.Plan(STOCHASTIC, rules=[("embed", cgx.MaxMin(8))])
    run(quiet, stochastic_default, None)
    run(quiet, stochastic_default, KEY)  # doesn't warn; a warning would be an error here


@pytest.mark.parametrize("check_vma", [True, False])
def test_raw_leaves_with_a_codec_for_each_axis_go_by_axis(check_vma):
    """A rank sends only its share over the outermost axis. A flat sum would send 2 (W - 1) / W of the leaf there."""
    plan = cgx.Plan({"a": cgx.Raw(), "b": cgx.Raw()}, min_size=0, skip_1d=False)
    x = {"x": normal((2, 4, 10, 30)), "scalar": normal((2, 4)), "step": jnp.ones((2, 4, 3), jnp.int32)}
    run = lambda f: on_ranks(f, mesh(2, 4), check_vma=check_vma)
    same = dict(mesh=mesh(2, 4), in_specs=P("a", "b"), out_specs=P(), check_vma=check_vma)
    jax.eval_shape(jax.shard_map(lambda t: cgx.compressed_psum(t, ("a", "b"), plan), **same), x)
    for ours, plain in ((cgx.compressed_psum, lax.psum), (cgx.compressed_pmean, lax.pmean)):
        got, expected = (run(f)(x) for f in (lambda t: ours(t, ("a", "b"), plan), lambda t: plain(t, ("a", "b"))))
        assert_trees(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), got, expected)
        assert all(got[name].dtype == expected[name].dtype for name in x)
    found = cgx.explain(run(lambda t: cgx.compressed_psum({"x": t["x"]}, ("a", "b"), plan)), x, show=False)
    assert found.totals == {("b",): (2 * 3 * 300, 2 * 3 * 300), ("a",): (300, 300)} and len(found.raw) == 1
    planned_bytes = plan.explain(jax.ShapeDtypeStruct((10, 30), jnp.float32), {"a": 2, "b": 4}).totals
    assert planned_bytes == {("a",): (300, 300), ("b",): (1200, 1200)}


@pytest.mark.parametrize(
    "preset", [cgx.Plan.fp16, lambda axes: cgx.Plan.bsc(axis_name=axes)], ids=["fp16", "tiny leaves of bsc"]
)
def test_presets_send_a_share_between_centers(preset):
    def sent(axes):
        plan = planned(preset(axes), schedule="two_shot")
        f = on_ranks(lambda t: cgx.compressed_pmean(t, ("a", "b"), plan), mesh(2, 4))
        return cgx.explain(f, normal((2, 4, 64, 64)), show=False)

    flat, by_axis = sent(None), sent(("a", "b"))
    ((axes, (total, _)),) = flat.totals.items()
    # 4 of the 7 other ranks are in the other center
    assert axes == ("a", "b") and total * 4 / 7 == 4 * by_axis.totals["a",][0]


FREEZING = cgx.Plan(cgx.MaxMin(8), [("frozen", cgx.Skip())], min_size=100)
FROZEN = {"w": normal((4, 30, 40), 1), "frozen": {"w": normal((4, 30, 40), 2), "ids": jnp.ones((4, 3), jnp.int32)}}
zeros = lambda tree: jax.tree.map(jnp.zeros_like, tree)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("collective", [cgx.compressed_psum, cgx.compressed_pmean])
def test_sums_of_skipped_leaves_are_zeros(collective, check_vma):
    residuals = {"w": zeros(FROZEN["w"]), "frozen": {"w": 1 + zeros(FROZEN["w"]), "ids": None}}
    sums = lambda t, r: collective(t, "a", planned(FREEZING, strict=True), carry=cgx.Carry(residuals=r))
    found, carry = on_ranks(sums, mesh(4), check_vma)(FROZEN, residuals)
    assert_same_trees(found["frozen"], zeros(FROZEN["frozen"]))
    assert_same_trees(carry.residuals["frozen"], residuals["frozen"])
    assert found["w"].any() and carry.residuals["w"].any()
    plan = cgx.Plan(cgx.Raw(), [("frozen", cgx.Skip())])
    raw = on_ranks(lambda t: collective(t, "a", plan), mesh(4), check_vma)(FROZEN)
    assert_same_trees(raw["frozen"], zeros(FROZEN["frozen"]))
    total = FROZEN["w"].sum(0) / (4 if collective is cgx.compressed_pmean else 1)
    np.testing.assert_allclose(raw["w"][0], total, rtol=1e-5, atol=1e-5)


def test_nothing_is_sent_of_skipped_leaves():
    """It doesn't matter whether these leaves are the same on every rank."""
    f = lambda t, same: cgx.compressed_pmean({"w": t["w"], "frozen": (t["frozen"], same)}, "a", FREEZING)
    step = jax.shard_map(f, mesh=mesh(4), in_specs=(P("a"), P()), out_specs=P())
    found = cgx.explain(step, FROZEN, jnp.ones(3), show=False)
    assert {c.leaves for c in found.collectives} == {("['w']",)}
    frozen = [leaf for leaf in found.raw if "frozen" in leaf.path]
    assert {leaf.path for leaf in frozen} == {"['frozen'][0]['w']", "['frozen'][0]['ids']", "['frozen'][1]"}
    assert all((leaf.bytes, leaf.reason) == (0, "the plan skips it") for leaf in frozen)


def test_codecs_that_send_nothing_encode_nothing():
    refused("encode", lambda: cgx.encode(jnp.ones(3), cgx.Skip()), ValueError, "codec", "Skip()", "jaxcgx.Plan")
    assert cgx.Skip().wire_bytes((1000, 3), "bfloat16") == 0 and cgx.Skip() == cgx.Skip() and cgx.Skip().skips
