"""Tests what becomes of each of GeoMX's variables."""

import pytest
from errors import raises, says

import jaxcgx as cgx
from jaxcgx.wan.geomx.environment import UNUSED, VARIABLES, from_env


def test_defaults_turn_nothing_on():
    found = from_env({"DMLC_ROLE": "worker"})
    assert len(VARIABLES) == 14 and found.hfa is None
    assert found.overlap is None and found.greed == found.owners == {} and found.size_bound == 200_000
    assert found.exchange(cgx.MaxMin(4)) == cgx.Feedback(cgx.MaxMin(4))


@pytest.mark.parametrize("value, rest", [("1", "drop"), ("2", "defer"), ("3", "quantize")])
def test_dgt(value, rest):
    adaptive = from_env({"ENABLE_DGT": value, "ADAPTIVE_K_FLAG": "1"})
    plan = cgx.Plan(cgx.MaxMin(4))
    assert adaptive.exchange(plan) == cgx.wan.Differential(plan, k=0.8, rest=rest, adaptive=0.2)
    half = from_env({"ENABLE_DGT": value, "DMLC_K": ".5"})
    assert half.exchange(plan) == cgx.wan.Differential(plan, k=0.5, rest=rest)


def test_the_others():
    found = from_env(
        {
            "ENABLE_P3": "1",
            "ENABLE_INTER_TS": "1",
            "ENABLE_INTRA_TS": "0",
            "MAX_GREED_RATE_TS": "0.75",
            "MXNET_KVSTORE_SIZE_LOWER_BOUND": "1000",
            "DMLC_NUM_GLOBAL_SERVER": "2",
            "DMLC_UDP_CHANNEL_NUM": "3",
            "MXNET_KVSTORE_USE_HFA": "1",
            "MXNET_KVSTORE_HFA_K2": "5",
        }
    )
    assert found.hfa == {"k1": 20, "k2": 5}
    assert found.exchange(cgx.Raw()) == cgx.wan.HFA(cgx.Raw(), k1=20, k2=5)
    assert found.overlap == cgx.Priority() and found.greed == {"dc": 0.75}
    assert found.owners == {"dc": 2} and found.size_bound == 1000


@pytest.mark.parametrize(
    "name, value", [("ENABLE_INTRA_TS", "1"), ("DMLC_NUM_SERVER", "3"), ("DMLC_UDP_CHANNEL_NUM", "7")]
)
def test_values_that_have_no_effect(name, value):
    """Each gives a warning of one line that names the variable. The default value, as in other tests, gives none."""
    with pytest.warns(UserWarning, match="has no effect") as seen:
        found = from_env({name: value})
    assert str(seen[0].message) == f"wan.from_env: variable {name}: {value!r} has no effect on training: {UNUSED[name]}"
    assert len(seen) == 1 and seen[0].filename == __file__
    assert found.greed == ({"local": 0.9} if name == "ENABLE_INTRA_TS" else {})
    assert found.owners == ({"local": 3} if name == "DMLC_NUM_SERVER" else {})


@pytest.mark.parametrize("name", VARIABLES)
def test_unknown_values(name):
    for text in ("", "-1", "two", "4.5", "1e400"):
        with raises(ValueError, says("wan.from_env", name, got=repr(text), remedy="unset")):
            from_env({name: text})


@pytest.mark.parametrize("name, near", [("ENABLE_DGTT", "ENABLE_DGT"), ("DMLC_KK", "DMLC_K")])
def test_names_that_are_nearly_right(name, near):
    with raises(ValueError, says("wan.from_env", name, got="none of these", remedy=near)):
        from_env({name: "1", "DMLC_NUM_WORKER": "2", "DMLC_NUM_GLOBAL_WORKER": "2", "DMLC_PS_ROOT_URI": "a"})
