"""Tests the forms in which XLA prints collectives."""

import pathlib

import pytest

from jaxcgx.report import hlo

PROGRAM = pathlib.Path(__file__).with_name("hlo_collectives.txt").read_text()


def test_every_collective_of_a_program_is_found():
    found = hlo.collectives(PROGRAM)
    assert [(c.operation, c.operands, c.times, c.branch) for c in found] == [
        ("all-reduce", (("f32", 32), ("u8", 32)), 1, False),
        ("all-gather", (("bf16", 8),), 1, False),
        ("all-gather", (("pred", 8),), 1, False),
        ("collective-permute", (("f32", 32),), 5, False),
        ("collective-permute", (("f32", 32),), None, False),
        ("all-reduce", (("f32", 32),), 1, True),
    ]
    assert found[0].groups == ((0, 2, 4, 6), (1, 3, 5, 7)) and found[0].name == "one"
    assert found[1].groups == ((0, 1), (2, 3), (4, 5), (6, 7)) and found[1].name == ""
    assert found[3].groups == ((0, 1), (1, 0)) and "all-reduce" in found[3].name
    assert found[5].groups == (tuple(range(8)),)
    assert hlo.ranks(PROGRAM) == 8


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("replica_groups={{0,1},{2,3}}, to_apply=%add", ((0, 1), (2, 3))),
        ("replica_groups={{0},{1}}", ((0,), (1,))),
        ("replica_groups={}, channel_id=1", ((0, 1, 2, 3),)),
        ("channel_id=1", ((0, 1, 2, 3),)),
        ("replica_groups=[2,2]<=[4], x={1}", ((0, 1), (2, 3))),
        ("replica_groups=[2,2]<=[2,2]T(1,0)", ((0, 2), (1, 3))),
        ("replica_groups=[1,4]<=[4]", ((0, 1, 2, 3),)),
        ("replica_groups=mesh['a'=2,'b'=2] {'b'}, use_global_device_ids=true", ((0, 1), (2, 3))),
        ("replica_groups=mesh['a'=2,'b'=2] {'a'}, x={'b'}", ((0, 2), (1, 3))),
        ("replica_groups=mesh['a'=2,'b'=2] {'a','b'}", ((0, 1, 2, 3),)),
        ("replica_groups=mesh['axis_0'=2,'axis_1'=1,'axis_2'=2] {'axis_0'}", ((0, 2), (1, 3))),
        ("replica_groups=@mesh<a=2,b=2> {a}", ((0, 2), (1, 3))),
        ("replica_groups=mesh['a'=2,'b'=2], device_ids=(3,2,1,0) {'b'}", ((3, 2), (1, 0))),
        ("replica_groups=mesh['a'=2,'b'=2], device_ids=([2,2]T(1,0)) {'b'}", ((0, 2), (1, 3))),
        ("replica_groups=mesh['a'=4] {'a':(1)2}", ((0, 2), (1, 3))),
        ("replica_groups=mesh['a'=4] {'a':(2)2}", ((0, 1), (2, 3))),
        ("source_target_pairs={{0,1},{1,0}}, metadata={}", ((0, 1), (1, 0))),
    ],
)
def test_groups_in_all_their_forms(text, groups):
    assert hlo._groups(", " + text, 4) == groups


CALLS = pathlib.Path(__file__).with_name("hlo_custom_calls.txt").read_text()


def test_exchanges_that_are_custom_calls():
    """Each counts as the collective of XLA that sends as many bytes. Kernels are not exchanges."""
    found = [(c.operation, c.operands, len(c.groups[0]), c.over) for c in hlo.collectives(CALLS)]
    assert found == [
        ("all-reduce", (("u8", 1600),), 2, "Tcp"),
        ("all-gather", (("u8", 1548),), 4, "Tcp"),
        ("all-to-all", (("u8", 3200),), 4, "Tcp"),
        ("all-gather", (("u8", 800),), 4, "Tcp"),
        ("collective-permute", (("u8", 800),), 3, "Tcp"),
        ("all-gather", (("u8", 800),), 4, "shared memory"),
        ("all-to-all", (("u8", 3200),), 4, "MPI"),
        ("all-gather", (("u8", 800),), 4, "MPI"),
    ]
    first = hlo.collectives(CALLS)[0]
    assert first.name == "sum" and first.groups == ((0, 2), (1, 3))
