"""Tests what becomes of each of GeoMX's variables."""

import dataclasses

import optax
import pytest
from errors import raises, says
from ranks import mesh

import jaxcgx as cgx
from jaxcgx.wan.geomx.environment import CLASHES, UNUSED, VARIABLES, Overlaid, from_env


def test_defaults_turn_nothing_on():
    assert len(VARIABLES) == 14
    assert from_env({"DMLC_ROLE": "worker", "DMLC_NUM_GLOBAL_SERVER": "1"}) == (cgx.Feedback(cgx.Raw()), None, 1)
    given = {"MXNET_KVSTORE_HFA_K1": "5", "DMLC_UDP_CHANNEL_NUM": "7"}
    assert from_env(given, cgx.MaxMin(4)) == (cgx.Feedback(cgx.MaxMin(4)), None, 1)


@pytest.mark.parametrize("value, rest", [("1", "late-is-lost"), ("2", "defer"), ("3", "quantize")])
def test_dgt(value, rest):
    plan = cgx.Plan(cgx.MaxMin(4))
    adaptive = from_env({"ENABLE_DGT": value, "ADAPTIVE_K_FLAG": "1"}, plan)
    assert adaptive == (cgx.wan.Differential(plan, k=0.8, rest=rest, adaptive=0.2), None, 4)
    half = from_env({"ENABLE_DGT": value, "DMLC_K": ".5", "ENABLE_P3": "1", "DMLC_UDP_CHANNEL_NUM": "2"}, plan)
    assert half == (cgx.wan.Differential(plan, k=0.5, rest=rest), cgx.Priority(), 3)


def test_hfa():
    assert from_env({"MXNET_KVSTORE_USE_HFA": "1"}).exchange == cgx.wan.HFA(cgx.Raw())
    given = {"MXNET_KVSTORE_USE_HFA": "1", "MXNET_KVSTORE_HFA_K2": "5", "DMLC_UDP_CHANNEL_NUM": "3"}
    assert from_env(given).exchange == cgx.wan.HFA(cgx.Raw(), k1=20, k2=5)


def test_overlays():
    given = {"DMLC_NUM_GLOBAL_SERVER": "2", "ENABLE_INTRA_TS": "0"}
    assert from_env(given, cgx.BSC()).exchange == Overlaid(cgx.BSC(), owners=2, greed=None)
    given |= {"ENABLE_INTER_TS": "1", "MAX_GREED_RATE_TS": "0.75", "ENABLE_DGT": "2"}
    assert from_env(given).exchange == Overlaid(cgx.wan.Differential(cgx.Raw()), owners=2, greed=0.75)


def test_the_bound_of_small_leaves():
    given = {"MXNET_KVSTORE_SIZE_LOWER_BOUND": "1000"}
    for exchange in cgx.BSC(threshold=0.1), cgx.MPQ():
        assert from_env(given, exchange).exchange == dataclasses.replace(exchange, size_bound=1000)
    for codec in cgx.MaxMin(4), {"dc": cgx.MaxMin(4), "local": cgx.Raw()}:
        assert from_env(given, codec).exchange == cgx.Feedback(cgx.Plan.every(codec, min_size=1001))
    with pytest.warns(UserWarning, match="Plan says which leaves it compresses"):
        assert from_env(given, cgx.Plan(cgx.MaxMin(4))).exchange == cgx.Feedback(cgx.Plan(cgx.MaxMin(4)))


@pytest.mark.parametrize("name, value", [("ENABLE_INTRA_TS", "1"), ("DMLC_NUM_SERVER", "3")])
def test_values_that_have_no_effect(name, value):
    """Each gives a warning of one line that names the variable. The default value, as in other tests, gives none."""
    with pytest.warns(UserWarning, match="has no effect") as seen:
        found = from_env({name: value})
    assert str(seen[0].message) == f"wan.from_env: variable {name}: {value!r} has no effect on training: {UNUSED[name]}"
    assert len(seen) == 1 and seen[0].filename == __file__
    assert found == from_env({})


@pytest.mark.parametrize("one, other", CLASHES)
def test_what_does_not_combine(one, other):
    with raises(ValueError, says("wan.from_env", one, expected=other, got="both", remedy="unset one")):
        from_env({one: "1", other: "1"})


def test_what_takes_no_exchange():
    with raises(ValueError, says("wan.from_env", "ENABLE_DGT", got="BSC")):
        from_env({"ENABLE_DGT": "2"}, cgx.BSC())
    for exchange, got in (cgx.wan.Demo(), "Demo"), (cgx.Plan(cgx.MaxMin(4), schedule="one_shot"), "'one_shot'"):
        with raises(ValueError, says("wan.from_env", "exchange", got=got)):
            from_env({"ENABLE_INTER_TS": "1"}, exchange)


@pytest.mark.parametrize("name", VARIABLES)
def test_unknown_values(name):
    for text in ("", "-1", "two", "4.5", "1e400"):
        with raises(ValueError, says("wan.from_env", name, got=repr(text), remedy="unset")):
            from_env({name: text})


@pytest.mark.parametrize("name, near", [("ENABLE_DGTT", "ENABLE_DGT"), ("DMLC_KK", "DMLC_K")])
def test_names_that_are_nearly_right(name, near):
    with raises(ValueError, says("wan.from_env", name, got="none of these", remedy=near)):
        from_env({name: "1", "DMLC_NUM_WORKER": "2", "DMLC_NUM_GLOBAL_WORKER": "2", "DMLC_PS_ROOT_URI": "a"})


def test_more_servers_than_centers():
    given = from_env({"DMLC_NUM_GLOBAL_SERVER": "5"}).exchange
    with raises(ValueError, says("wan.from_env", "DMLC_NUM_GLOBAL_SERVER", expected="1 to 4", got="'5'")):
        cgx.make_train_step(lambda p, x: (p * x).sum(), optax.sgd(0.1), mesh(4), given, sharding=cgx.Sharding("a"))


@pytest.mark.parametrize(
    "row", [(ValueError, cgx.Sharding("other"), "sharding.axis"), (TypeError, "a", "sharding")], ids=lambda row: row[2]
)
def test_a_sharding_that_does_not_fit(row):
    """The errors are those of make_train_step without an overlay."""
    kind, sharding, argument = row
    for given in from_env({"DMLC_NUM_GLOBAL_SERVER": "2"}).exchange, cgx.Raw():
        with raises(kind, says("make_train_step", argument)):
            cgx.make_train_step(lambda p, x: (p * x).sum(), optax.sgd(0.1), mesh(4), given, sharding=sharding)
