"""Tests the forms in which XLA prints collectives."""

import pytest

from jaxcgx.report import hlo

PROGRAM = """HloModule jit_f, is_scheduled=true, entry_computation_layout={(f32[8]{0})->f32[8]{0}}, replica_count=1, num_partitions=8

FileNames
1 "f.py"

StackFrames
1 {file_location_id=1 parent_frame_id=1}

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%body (p.1: (s32[], f32[8])) -> (s32[], f32[8]) {
  %p.1 = (s32[], f32[8]{0}) parameter(0)
  %x.1 = f32[8]{0} get-tuple-element(%p.1), index=1
  %permute = f32[8]{0} collective-permute(%x.1), channel_id=2, source_target_pairs={{0,1},{1,0}}, metadata={op_name="body \\"all-reduce(%x)\\""}
  ROOT %t.1 = (s32[], f32[8]{0}) tuple(%i, %permute)
}

%condition (p.2: (s32[], f32[8])) -> pred[] {
  %p.2 = (s32[], f32[8]{0}) parameter(0)
  ROOT %go = pred[] custom-call(%p.2), custom_call_target="go"
}

%branch (x.3: f32[8]) -> f32[8] {
  %x.3 = f32[8]{0} parameter(0)
  ROOT %gather = f32[8]{0} all-reduce(%x.3), replica_groups={}, to_apply=%add
}

%other (x.4: f32[8]) -> f32[8] {
  ROOT %x.4 = f32[8]{0} parameter(0)
}

%async (x.5: bf16[4]) -> bf16[8] {
  %x.5 = bf16[4]{0} parameter(0)
  ROOT %g.5 = bf16[8]{0} all-gather(%x.5), replica_groups=[4,2]<=[8], dimensions={0}
}

ENTRY %main.1_spmd (x: f32[8], y: u8[2,16], p: pred[8]) -> f32[8] {
  %x = f32[8]{0:T(128)} parameter(0), metadata={op_name="x"}
  %y = u8[2,16]{1,0} parameter(1)
  %p = pred[8]{0} parameter(2)
  %reduce = f32[] reduce(%x, %zero), dimensions={0}, to_apply=%add
  %all-reduce-start = (f32[8]{0}, u8[2,16]{1,0}) all-reduce-start(%x, /*index=1*/%y), channel_id=1, replica_groups=[2,4]<=[4,2]T(1,0), to_apply=%add, metadata={op_name="one"}
  %done = (f32[8]{0}, u8[2,16]{1,0}) all-reduce-done(%all-reduce-start)
  %async-start = ((bf16[4]{0}), bf16[8]{0}, u32[]) async-start(%half), calls=%async
  %async-done = bf16[8]{0} async-done(%async-start)
  %gather-start = (pred[8]{0}, pred[64]{0}) all-gather-start(pred[8]{0} %p), replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={0}
  %loop = (s32[], f32[8]{0}) while(%t.0), condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"5"}}
  %loop.2 = (s32[], f32[8]{0}) while(%loop), condition=%condition, body=%body
  ROOT %if = f32[8]{0} conditional(%which, %x, %x), branch_computations={%branch, %other}
}
"""  # noqa: E501  (lines as XLA writes them)


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


CALLS = """HloModule jit_f, replica_count=1, num_partitions=2

ENTRY %main (x: f32[3000], y: u8[4,800]) -> f32[3000] {
  %x = f32[1,3000]{1,0} parameter(0)
  %y = u8[4,800]{1,0} parameter(1)
  %row = u8[800]{0} parameter(2)
  %who = s32[3]{0} parameter(3)
  %token = token[] after-all()
  %a = (f32[1,3000]{1,0}, token[]) custom-call(%x, %who, %token), custom_call_target="jaxcgx_tcp_allreduce", metadata={op_name="sum"}, backend_config={batch = 1 : i64, bytes = 1600 : i64, chunks = 2 : i64, codec = {bits = 4 : i32}, ranks = 2 : i64, two_shot = true}
  %b = (f32[1,3000]{1,0}, token[]) custom-call(%x, %who, %token), custom_call_target="jaxcgx_tcp_allreduce", backend_config={bytes = 1548 : i64, ranks = 4 : i64, two_shot = false}
  %c = (u8[4,800]{1,0}, token[]) custom-call(%y, %who, %token), custom_call_target="jaxcgx_tcp_exchange", backend_config={operation = 0 : i64, targets = dense<> : tensor<0xi64>}
  %d = (u8[4,800]{1,0}, token[]) custom-call(%row, %who, %token), custom_call_target="jaxcgx_tcp_exchange", backend_config={operation = 1 : i64, targets = dense<> : tensor<0xi64>}
  %e = (u8[800]{0}, token[]) custom-call(%row, %who, %token), custom_call_target="jaxcgx_tcp_exchange", backend_config={operation = 2 : i64, targets = dense<[1, 2, 0]> : tensor<3xi64>}
  %f = (u8[4,800]{1,0}, token[]) custom-call(%row, %token), custom_call_target="jaxcgx_exchange", backend_config={operation = 1 : i64, argument = 0 : i64}
  %g = (u8[4,800]{1,0}, token[]) custom-call(%y, %token), custom_call_target="mpi_alltoall_ffi", backend_config={comm = 1 : i64, sendcount = 800 : i64}
  %h = (u8[4,800]{1,0}, token[]) custom-call(%row, %token), custom_call_target="mpi_allgather_ffi", backend_config={comm = 1 : i64}
  ROOT %i = f32[3000]{0} custom-call(%x), custom_call_target="jaxcgx_encode", backend_config={operation = 1 : i64}
}
"""  # noqa: E501


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
    assert hlo.collectives(CALLS)[0].name == "sum"
