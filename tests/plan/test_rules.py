"""Tests which leaf gets which codec: rules, guards, Skip() and errors."""

import copy
import pickle

import jax
import jax.numpy as jnp
import pytest
from errors import table

import jaxcgx as cgx

FOUR, EIGHT, TWO = cgx.MaxMin(4), cgx.MaxMin(8), cgx.MaxMin(2, 128)
TREE = {
    "block": [
        {"kernel": jnp.zeros((64, 64)), "bias": jnp.zeros(2000)},
        {"kernel": jnp.zeros((128, 64), jnp.bfloat16), "scale": jnp.zeros(7)},
    ],
    "count": jnp.zeros((40, 40), jnp.int32),
    "embed": jnp.zeros((1000, 64)),
    "none": jnp.zeros((0, 3)),
    "temperature": jnp.zeros(()),
}


def assign(plan, tree=TREE):
    """Returns {path: (codec, reason to stay raw)}."""
    routes = plan.routes("test", "x", tree)
    return {jax.tree_util.keystr(r.path, simple=True, separator="/"): (r.codec, r.why_raw) for r in routes}


def codecs(plan, tree=TREE):
    return {name: codec for name, (codec, _) in assign(plan, tree).items()}


@pytest.mark.short
def test_guards():
    assert assign(cgx.Plan(FOUR)) == {
        "block/0/bias": (cgx.Raw(), "it has one dimension, and the plan has skip_1d=True"),
        "block/0/kernel": (FOUR, None),
        "block/1/kernel": (FOUR, None),
        "block/1/scale": (cgx.Raw(), "it has 7 elements, fewer than the plan's min_size=1024"),
        "count": (cgx.Raw(), "int32 is not float32, bfloat16 or float16"),
        "embed": (FOUR, None),
        "none": (cgx.Raw(), "it has no elements"),
        "temperature": (cgx.Raw(), "it has 1 element, fewer than the plan's min_size=1024"),
    }
    guarded = cgx.Raw(), "it has no dimension, and the plan has skip_1d=True"
    assert assign(cgx.Plan(FOUR, min_size=0))["temperature"] == guarded
    assert assign(cgx.Plan(FOUR, min_size=7, skip_1d=False))["block/1/scale"] == (FOUR, None)
    unguarded = assign(cgx.Plan(FOUR, min_size=0, skip_1d=False))
    assert {name for name, found in unguarded.items() if found != (FOUR, None)} == {"count", "none"}


@pytest.mark.parametrize(
    ("rule", "held"),
    [
        ("kernel$", {"block/0/kernel", "block/1/kernel"}),
        ("^block/1/", {"block/1/kernel", "block/1/scale"}),
        (lambda path, leaf: leaf.dtype == jnp.bfloat16, {"block/1/kernel"}),
        (cgx.Rule(EIGHT, min_size=2000, max_size=8192), {"block/0/bias", "block/0/kernel", "block/1/kernel"}),
        (cgx.Rule(EIGHT, ndim=1), {"block/0/bias", "block/1/scale"}),
        (cgx.Rule(EIGHT, path="block", where=lambda path, leaf: leaf.shape[0] == 64), {"block/0/kernel"}),
        (cgx.Rule(EIGHT), set(codecs(cgx.Plan(FOUR))) - {"count", "none"}),
    ],
    ids=["regex", "anchor", "predicate", "sizes", "ndim", "both", "all"],
)
def test_conditions(rule, held):
    plan = cgx.Plan(FOUR, [rule if isinstance(rule, cgx.Rule) else (rule, EIGHT)], min_size=0, skip_1d=False)
    assert codecs(plan) == {
        name: cgx.Raw() if name in ("count", "none") else EIGHT if name in held else FOUR
        for name in codecs(cgx.Plan(FOUR))
    }


def test_a_root_leaf_has_an_empty_path():
    assert codecs(cgx.Plan(FOUR, [("^$", EIGHT)]), jnp.zeros((64, 64))) == {"": EIGHT}


def test_guards_are_stronger_than_rules():
    def even(path, leaf):
        return leaf.size == 2000

    plan = cgx.Plan(
        FOUR, [("scale", EIGHT), (even, TWO), ("temperature", cgx.Raw()), cgx.Rule(EIGHT, ndim=0), ("count", EIGHT)]
    )
    before, found = assign(cgx.Plan(FOUR)), assign(plan)
    raw, expected = ({name for name in each if each[name][0] == cgx.Raw()} for each in (found, before))
    assert raw == expected
    # The reason names a rule that requested something else.
    added = {name: why.removeprefix(before[name][1]) for name, (_, why) in found.items() if why}
    assert added == {
        "block/0/bias": ", though Rule(codec=MaxMin(bits=2, bucket_size=128), where=<function "
        "test_guards_are_stronger_than_rules.<locals>.even>) names it",
        "block/1/scale": ", though Rule(codec=MaxMin(bits=8), path='scale') names it",
        "count": ", though Rule(codec=MaxMin(bits=8), path='count') names it",
        "none": "",
        "temperature": "",
    }


def test_no_rule_is_wrong_for_what_no_codec_can_take():
    rules = [("count", EIGHT), ("^count$", TWO), cgx.Rule({"node": EIGHT}, path="none")]
    assert codecs(cgx.Plan(FOUR, rules))["count"] == codecs(cgx.Plan(FOUR, rules))["none"] == cgx.Raw()


@pytest.mark.short
def test_optional_rules_may_hold_for_no_leaf():
    by_path = cgx.Rule(EIGHT, path="block/0/kernel", optional=True)
    plan = cgx.Plan(FOUR, [by_path, cgx.Rule(TWO, where=lambda path, leaf: path == "embed", optional=True)])
    assert codecs(plan)["block/0/kernel"] == EIGHT and codecs(plan)["embed"] == TWO
    assert codecs(plan, {"embed": TREE["embed"]}) == {"embed": TWO}
    assert codecs(plan, {"w": TREE["embed"]}) == {"w": FOUR}


def test_rules_are_not_compared(monkeypatch):
    """There are 1,400 leaves and 200 rules. A dataclass would compare field by field."""
    plan = cgx.Plan(FOUR, [(f"^layer/{i}/", cgx.MaxMin(1 + i % 8)) for i in range(20)])
    monkeypatch.setattr(cgx.Rule, "__eq__", None)
    assert codecs(plan, {"layer": [{"w": TREE["embed"]}] * 20})["layer/9/w"] == cgx.MaxMin(2)


def test_the_highest_priority_counts():
    high, low = cgx.Rule(TWO, path="block/0", priority=1), cgx.Rule(FOUR, path="0/kernel", priority=-1)
    found = codecs(cgx.Plan(cgx.Raw(), [cgx.Rule(EIGHT, path="kernel"), high, low]))
    assert (found["block/0/kernel"], found["block/1/kernel"], found["embed"]) == (TWO, EIGHT, cgx.Raw())


def test_rules_may_agree():
    assert codecs(cgx.Plan(FOUR, [("0/kernel", EIGHT), ("kernel", cgx.MaxMin(8))]))["block/0/kernel"] == EIGHT


def test_codecs_by_axis():
    wide, narrow = {"node": EIGHT, "local": cgx.Raw()}, {"node": FOUR, "local": cgx.Raw()}
    plan = cgx.Plan(narrow, [("embed", wide), ("0/kernel", TWO)], schedule={"node": "ring", "local": "auto"})
    found = codecs(plan)
    assert found["embed"] == wide and isinstance(found["embed"], dict)
    assert found["block/0/kernel"] == TWO and found["block/1/kernel"] == {"node": FOUR, "local": cgx.Raw()}
    wide["node"] = FOUR
    assert codecs(plan)["embed"]["node"] == EIGHT  # the plan has its own copy


@pytest.mark.parametrize(
    "change",
    [lambda d: d.__setitem__("node", TWO), lambda d: d.update(node=TWO), lambda d: d.popitem()],
    ids=["set", "update", "popitem"],
)
def test_codecs_by_axis_stay(change):
    plan = cgx.Plan({"node": FOUR}, schedule={"node": "ring"})
    for found in (plan.default, plan.schedule):
        with pytest.raises(TypeError, match="a plan's {'node': .*} can't be changed"):
            change(found)
    assert plan == cgx.Plan({"node": FOUR}, schedule={"node": "ring"})
    assert plan == copy.deepcopy(plan) == pickle.loads(pickle.dumps(plan)) and hash(plan) == hash(copy.deepcopy(plan))


@pytest.mark.short
def test_plans_are_static_under_jit():
    def make():
        rules = [("kernel", {"node": EIGHT, "local": FOUR}), cgx.Rule(TWO, ndim=2, priority=-1)]
        return cgx.Plan({"node": FOUR, "local": cgx.Raw()}, rules, schedule={"local": "auto", "node": "ring"})

    a, b = make(), make()
    assert a == b and hash(a) == hash(b) and a != cgx.Plan(FOUR)
    traces = []
    run = jax.jit(lambda x, plan: traces.append(plan) or x, static_argnums=1)
    run(1.0, a), run(1.0, b)
    assert len(traces) == 1


def test_a_predicate_sees_no_values():
    def rule(path, leaf):
        seen.append(leaf)
        return True

    seen = []
    codecs(cgx.Plan(FOUR, [(rule, EIGHT)]), {"w": jnp.ones((64, 64))})
    assert seen == [jax.ShapeDtypeStruct((64, 64), jnp.float32)]


class Unhashable:
    __hash__ = None

    def __call__(self, path, leaf):
        return True

    def __repr__(self):
        return "a predicate"


def test_a_rule_by_size_need_not_hold():
    found = codecs(cgx.Plan(FOUR, [cgx.Rule(EIGHT, min_size=10**6), cgx.Rule(EIGHT, ndim=7)]))
    assert set(found.values()) == {FOUR, cgx.Raw()}


LORA = {"lora": {"a": jnp.ones((64, 32)), "bias": jnp.ones(3)}, "w": jnp.ones((64, 64)), "ids": jnp.ones(3, jnp.int32)}


def skipped(plan):
    return {row.leaf for row in plan.explain(LORA, 4).rows if row.codec == cgx.Skip()}


@pytest.mark.parametrize(
    ("plan", "expected"),
    [
        (cgx.Plan(cgx.MaxMin(4), [("w", cgx.Skip())]), {"w"}),
        (cgx.Plan(cgx.MaxMin(4), [("bias|ids", cgx.Skip())]), {"lora/bias", "ids"}),
        (cgx.Plan(cgx.Skip(), [("lora", cgx.MaxMin(4))]), {"w", "ids"}),
        (cgx.Plan(cgx.MaxMin(4), [("lora", cgx.Skip()), cgx.Rule(cgx.Raw(), "bias", priority=1)]), {"lora/a"}),
    ],
    ids=["a rule", "stronger than guards", "the default", "of a lower priority"],
)
def test_leaves_that_a_plan_skips(plan, expected):
    assert skipped(plan) == expected


def test_a_table_says_what_is_skipped():
    found = cgx.Plan(cgx.Skip(), [("lora", cgx.MaxMin(4))]).explain(LORA, {"node": 2, "local": 2})
    rows = {row.leaf: row for row in found.rows}
    assert (rows["w"].bytes, rows["w"].raw_bytes, rows["w"].message, rows["w"].why) == (0, 0, None, None)
    assert found.raw_bytes == 4 * (64 * 32 + 3) and rows["lora/bias"].codec == cgx.Raw()
    assert "Skip()" in str(found)


TWO_RULES = cgx.Plan(FOUR, [("kernel", EIGHT), cgx.Rule({"a": TWO}, min_size=2000)])
TWO_OF_BIAS = cgx.Plan(FOUR, [("bias", cgx.Skip()), ("lora", EIGHT)])
statistics = lambda: cgx.gradient_statistics({"w": LORA["w"]}, codecs=[FOUR])
BAD_PLANS = {
    "Rule": [(lambda: cgx.Rule(FOUR, where=Unhashable()), TypeError, "where", "a predicate")],
    "test": [
        (lambda: assign(cgx.Plan(FOUR, [("kernal", EIGHT)])), ValueError, "x", "none for Rule(", "'block/0/kernel'"),
        (lambda: assign(TWO_RULES), ValueError, "x 'block/0/kernel'", "two: Rule(codec=MaxMin(bits=8), path='kernel')"),
        (lambda: assign(cgx.Plan(FOUR, [(lambda path, leaf: path, EIGHT)])), TypeError, "", "'block/0/bias'"),
    ],
    "Plan.explain": [(lambda: skipped(TWO_OF_BIAS), ValueError, "tree 'lora/bias'", "two", "priority")],
    "Plan.adapt": [(lambda: cgx.Plan(cgx.Skip()).adapt(statistics()), ValueError, "", "Skip()")],
}
test_bad_plans = table(BAD_PLANS)
