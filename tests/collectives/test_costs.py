"""What schedule="auto" takes."""
import pytest

import jaxcgx as cgx
from helpers import normal, sent
from jaxcgx.collectives import costs
from ranks import mesh, on_ranks


def test_two_ranks_need_one_exchange():
    assert all(costs.choose(2, 8 * wire, wire) == "one_shot" for wire in (16, 10_000, 10**8))


@pytest.mark.parametrize("ranks", [3, 8, 64])
def test_more_share_the_sum_of_what_is_large(ranks):
    choices = [costs.choose(ranks, 8 * 2**k, 2**k) for k in range(4, 30)]
    turn = choices.index("two_shot")
    assert turn > 0 and set(choices[turn:]) == {"two_shot"}


@pytest.mark.parametrize(("n", "operations"), [(100, {"all-gather"}), (100_000, {"all-to-all", "all-gather"})])
def test_a_program_does_so(n, operations):
    run = on_ranks(lambda x: cgx.compressed_psum(x, "a", cgx.MaxMin(4)), mesh(4))
    program = run.lower(normal((4, n))).compile().as_text()
    assert sent(program) == {(operation, "u8") for operation in operations}


def test_a_hierarchy_counts_shares_and_a_leader_the_whole():
    codec = cgx.MaxMin(4)
    n = next(n for n in range(1000, 10**6, 1000) if costs.choose(4, 4 * n, codec.wire_bytes((n,), "float32")) == "two_shot")

    def lowered(schedule, leader):
        f = lambda x: cgx.compressed_psum(x, ("a", "b"), {"a": codec, "b": cgx.Raw()}, leader=leader, schedule=schedule)
        return on_ranks(f, mesh(4, 2)).lower(normal((4, 2, n))).as_text()

    assert lowered("auto", leader=True) == lowered("two_shot", leader=True)
    assert lowered("auto", leader=False) == lowered("one_shot", leader=False)
