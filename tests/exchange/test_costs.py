"""Tests the schedules that schedule="auto" chooses."""

import jax
import pytest
from errors import raises, says
from helpers import normal, planned, sent
from ranks import mesh, on_ranks

import jaxcgx as cgx
from jaxcgx.exchange import costs


def choose(*load, mover="duplex", **sizes):
    return costs.choose(costs.Load(*load, **sizes), cgx.Network(mover=mover))


@pytest.mark.parametrize("mover", ["duplex", "gloo", "tcp"])
def test_two_ranks_need_one_exchange(mover):
    assert all(choose(2, 8 * wire, wire, mover=mover) == "one_shot" for wire in (16, 10_000, 10**8))


@pytest.mark.parametrize("ranks", [3, 8, 64])
def test_more_share_the_sum_of_what_is_large(ranks):
    for mover in ("duplex", "gloo", "tcp"):
        choices = [choose(ranks, 8 * 2**k, 2**k, mover=mover) for k in range(4, 30)]
        turn = choices.index("two_shot")
        assert turn > 0 and set(choices[turn:]) == {"two_shot"}


def test_a_plan_knows_the_network():
    """The constants are part of the plan, so all ranks have the same."""
    codec, x = cgx.MaxMin(4), normal((4, 2**20))
    slow, fast = cgx.Network(latency=10.0), cgx.Network(latency=0.0)
    for network, expected in ((slow, {"all-gather"}), (fast, {"all-to-all", "all-gather"})):
        plan = cgx.Plan(codec, skip_1d=False, network=network)
        run = on_ranks(lambda x, plan=plan: cgx.compressed_psum(x, "a", plan), mesh(4))
        assert {operation for operation, _ in sent(run.lower(x).compile().as_text())} == expected


def of_sparse(ranks, n, codec):
    return choose(
        ranks, 4 * n, codec.wire_bytes((n,), "float32"), codec.of_sum(ranks).wire_bytes((n,), "float32"), sparse=True
    )


def test_lists_go_to_all_until_their_sum_is_dense():
    n = 2**24
    found = [of_sparse(ranks, n, cgx.TopK(0.01)) for ranks in (2, 31, 32, 100)]
    assert found == ["one_shot", "one_shot", "two_shot", "two_shot"]
    # Sums of fewer elements stay sparse. Then two_shot sends fewer bytes, but by less than a tenth.
    assert {of_sparse(ranks, n, cgx.TopK(0.001)) for ranks in (2, 30, 100)} == {"one_shot"}


def test_the_top_of_a_sum_is_short():
    found = [of_sparse(ranks, 2**24, cgx.TopK(0.01, pull="top")) for ranks in (2, 3, 64)]
    assert found == ["one_shot", "two_shot", "two_shot"]


def test_what_one_list_has_no_room_for_is_cut():
    x = jax.ShapeDtypeStruct((4, 2**31), "float32")
    lower = lambda schedule: on_ranks(
        lambda x: cgx.compressed_psum(x, "a", planned(cgx.TopK(0.001), schedule=schedule)), mesh(4)
    ).lower(x)
    assert lower("auto").as_text() == lower("two_shot").as_text()
    words = says("TopK", got="2147483648")
    with raises(ValueError, words):
        lower("one_shot")


ONCE, TWICE = {("all-gather", "u8")}, {("all-to-all", "u8"), ("all-gather", "u8")}
PROGRAMS = {
    "short": (cgx.MaxMin(4), 100, ONCE),
    "long": (cgx.MaxMin(4), 100_000, TWICE),
    "lists": (cgx.TopK(0.05), 100_000, ONCE),
    "the top of sums": (cgx.TopK(0.05, pull="top"), 100_000, TWICE),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_does_so(name):
    codec, n, expected = PROGRAMS[name]
    run = on_ranks(lambda x: cgx.compressed_psum(x, "a", codec), mesh(4))
    assert sent(run.lower(normal((4, n))).compile().as_text()) == expected


def test_factors_over_tcp_are_sums_of_raw_leaves():
    leaf, codec = jax.ShapeDtypeStruct((60, 40), "float32"), cgx.PowerSGD(2)
    of = lambda schedule, mover=None: costs.sent(schedule, codec, [leaf], 4, mover)
    factors = 4 * 2 * (60 + 40)
    assert of("one_shot", "tcp") == 3 * factors
    assert of("psum") == of("psum", "tcp") == of("ring", "tcp") == 2 * 3 / 4 * factors
    assert factors < of("tree") == of("tree", "tcp")


def test_a_hierarchy_counts_shares_and_a_leader_the_whole():
    codec = cgx.MaxMin(4)
    n = next(n for n in range(1000, 10**6, 1000) if choose(4, 4 * n, codec.wire_bytes((n,), "float32")) == "two_shot")

    def lowered(schedule, leader):
        f = lambda x: cgx.compressed_psum(
            x, ("a", "b"), planned({"a": codec, "b": cgx.Raw()}, schedule=schedule, leader=leader)
        )
        return on_ranks(f, mesh(4, 2)).lower(normal((4, 2, n))).as_text()

    assert lowered("auto", leader=True) == lowered("two_shot", leader=True)
    assert lowered("auto", leader=False) == lowered("one_shot", leader=False)
