"""Tests bad input over MPI: every rank gets the error, before any data moves."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from errors import raises, says
from helpers import normal

import jaxcgx as cgx

pytest.importorskip("mpi4jax", reason="needs the extra `mpi`")
from mpi4py import MPI
from processes import COMM

from jaxcgx.mpi import ranks
from jaxcgx.native import registration
from jaxcgx.transports.mpi import Comm
from jaxcgx.transports.shm import Shm

N, R, CODEC = COMM.size, COMM.rank, cgx.MaxMin(4)
several = pytest.mark.skipif(N == 1, reason="needs 2 ranks or more: mpirun")


def allreduce(*args, **kwargs):
    return cgx.mpi.compressed_allreduce(*args, **kwargs)


def over_two_devices():
    mesh = jax.make_mesh((2,), ("a",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    return mesh, jax.device_put(normal((2, 8)), jax.NamedSharding(mesh, jax.P("a")))


def in_a_mesh():
    mesh, x = over_two_devices()
    return jax.jit(
        jax.shard_map(
            lambda x: allreduce(x, CODEC), mesh=mesh, in_specs=jax.P("a"), out_specs=jax.P("a"), check_vma=False
        )
    )(x)


@pytest.mark.parametrize(
    ("f", "error", "words"),
    [
        (
            lambda x: allreduce(x, CODEC, "world"),
            TypeError,
            says("compressed_allreduce", "comm", expected="mpi4py communicator MPI.Intracomm", got="'world'"),
        ),
        (
            lambda x: allreduce(x, CODEC, MPI.COMM_NULL),
            TypeError,
            says("compressed_allreduce", "comm", expected="mpi4py communicator MPI.Intracomm", got="MPI.COMM_NULL"),
        ),
        (
            lambda x: allreduce(x, CODEC, op="max"),
            ValueError,
            says("compressed_allreduce", "op", expected="'sum' 'mean'", got="'max'"),
        ),
        (lambda x: allreduce(x, 4), TypeError, says("compressed_allreduce", "codec", expected="codec", got="4")),
        (
            lambda x: allreduce(x, cgx.mpi.hierarchy()),
            TypeError,
            says("compressed_allreduce", "codec", expected="codec", got="Nodes("),
        ),
        (
            lambda x: allreduce(x, CODEC, schedule="star"),
            ValueError,
            says("compressed_allreduce", "schedule", expected="'auto' 'two_shot' 'one_shot' 'ring'", got="'star'"),
        ),
        (
            lambda x: allreduce(x, CODEC, check=1),
            TypeError,
            says("compressed_allreduce", "check", expected="True False", got="1"),
        ),
        (
            lambda x: allreduce(x, {"cross": CODEC, "inner": CODEC}),
            ValueError,
            says(
                "compressed_allreduce",
                "codec",
                expected='"cross" "inner" communicator',
                got="{'cross'",
                remedy="MaxMin(",
            ),
        ),
        (
            lambda x: allreduce(x, cgx.Plan.from_env(("cross", "inner"))),
            ValueError,
            says("compressed_allreduce", "codec", expected='"cross" "inner" communicator', got="Plan(default={'cross'"),
        ),
        (
            lambda x: allreduce(x, cgx.Plan(CODEC, [("w", {"cross": CODEC, "inner": CODEC})])),
            ValueError,
            says("compressed_allreduce", "codec", expected='"cross" "inner" communicator', got="Plan("),
        ),
        (
            lambda x: allreduce(x, cgx.Plan(CODEC, schedule={"cross": "ring", "inner": "ring"})),
            ValueError,
            says("compressed_allreduce", "codec", expected='"cross" "inner" communicator', got="Plan("),
        ),
        (
            lambda x: allreduce(x, CODEC, schedule={"cross": "ring", "inner": "ring"}),
            ValueError,
            says(
                "compressed_allreduce",
                "schedule",
                expected='"cross" "inner" communicator',
                got="{'cross'",
                remedy="comm=jaxcgx.mpi.hierarchy()",
            ),
        ),
        (
            lambda x: allreduce(x, CODEC, leader=True),
            ValueError,
            says(
                "compressed_allreduce",
                "leader",
                expected='"cross" "inner" communicator',
                got="True",
                remedy="comm=jaxcgx.mpi.hierarchy()",
            ),
        ),
        (
            lambda x: allreduce(x, {"node": CODEC}, cgx.mpi.hierarchy()),
            ValueError,
            says("compressed_allreduce", "codec", expected="codec axis 'cross' 'inner'", got="{'node'"),
        ),
        (
            lambda x: allreduce({"n": x.astype(jnp.int32)}, CODEC, strict=True),
            TypeError,
            says("compressed_allreduce", "x", at="leaf ['n']", expected="int32 float32 bfloat16 float16 strict=True"),
        ),
        (
            lambda x: allreduce(over_two_devices()[1], CODEC),
            ValueError,
            says(
                "compressed_allreduce",
                "x",
                expected="arrays device rank",
                got="2 devices",
                remedy="process for each device mesh",
            ),
        ),
        (
            lambda x: in_a_mesh(),
            ValueError,
            says("compressed_allreduce", "x", expected="arrays device rank", got="2 devices"),
        ),
        (
            lambda x: (
                cgx.mpi.compressed_reduce_scatter(jnp.ones(N + 1), CODEC, tiled=True)
                if N > 1
                else cgx.mpi.compressed_reduce_scatter(jnp.ones(2), CODEC)
            ),
            ValueError,
            says("compressed_reduce_scatter", "scatter_dimension", expected="dimension 0 elements"),
        ),
        (
            lambda x: cgx.mpi.compressed_allgather(x, CODEC, axis=3),
            ValueError,
            says("compressed_allgather", "axis", expected="dimension float32[8]", got="3"),
        ),
        (
            lambda x: cgx.mpi.compressed_alltoall(x, CODEC, split_axis=5),
            ValueError,
            says("compressed_alltoall", "split_axis", expected="dimension float32[8]", got="5"),
        ),
        (
            lambda x: cgx.mpi.broadcast(x, N),
            ValueError,
            says("broadcast", "root", expected=f"rank 0 {N - 1}", got=str(N)),
        ),
        (lambda x: cgx.mpi.broadcast(x, 0.5), TypeError, says("broadcast", "root", expected="integer", got="0.5")),
        (lambda x: cgx.mpi.broadcast(x, False), TypeError, says("broadcast", "root", expected="integer", got="False")),
        (
            lambda x: cgx.mpi.broadcast({"w": object()}),
            TypeError,
            says("broadcast", "x", at="leaf ['w']", expected="array", got="<object"),
        ),
        (
            lambda x: cgx.compressed_psum(x, MPI.COMM_WORLD, CODEC),
            TypeError,
            says(
                "compressed_psum",
                "axis_name",
                expected="name",
                got="a communicator, <mpi4py.MPI.Intracomm",
                remedy="jaxcgx.mpi.compressed_allreduce jaxcgx.make_train_step",
            ),
        ),
        (
            lambda x: cgx.mpi.hierarchy("world"),
            TypeError,
            says("hierarchy", "comm", expected="mpi4py communicator MPI.Intracomm", got="'world'"),
        ),
        (
            lambda x: cgx.mpi.hierarchy(inner=4),
            TypeError,
            says("hierarchy", "inner", expected="mpi4py communicator MPI.Intracomm", got="4"),
        ),
    ],
)
def test_bad_arguments(f, error, words):
    with raises(error, words):
        f(normal(8))


@pytest.mark.skipif(N < 3, reason="needs 3 ranks or more: mpirun")
def test_nodes_of_different_sizes():
    words = says("hierarchy", "comm", expected="ranks on every node", got=f"1, {N - 1}", remedy="communicator itself")
    with raises(ValueError, words):
        cgx.mpi.hierarchy(COMM, COMM.Split(int(R > 0), R))


@several
@pytest.mark.parametrize(
    ("f", "words"),
    [
        (
            lambda x: allreduce({"w": x[: 8 - (R == 1)], "b": x}, CODEC, check=True),
            "compressed_allreduce: expected the same on every rank, got leaf ['w']: float32[8] on rank 0",
        ),
        (lambda x: allreduce({"w": x[: 8 - (R == 1)], "b": x}, CODEC, check=True), "float32[7] on rank 1"),
        (
            lambda x: allreduce(x.astype(jnp.bfloat16) if R == 1 else x, CODEC, check=True),
            "leaf x: float32[8] on rank 0",
        ),
        (lambda x: allreduce([x, x] if R == 1 else [x], CODEC, check=True), "leaf [1]: nothing on rank 0"),
        (
            lambda x: allreduce(x, cgx.MaxMin(4 + (R == 1)), check=True),
            "argument 'codec': MaxMin(bits=4, bucket_size=512, rounding='nearest', skip_incomplete=False, "
            "rotate=False) on rank 0",
        ),
        (  # of a long plan, only the part that differs
            lambda x: allreduce(
                x, cgx.Plan(CODEC, rules=[(str(i), cgx.MaxMin(4 + (R == i == 1))) for i in range(9)]), check=True
            ),
            "... on rank 1",
        ),
        (lambda x: allreduce(x, cgx.Plan(CODEC, min_size=(R == 1 and 9) or 5), check=True), "argument 'codec': ..."),
        (
            lambda x: allreduce(x, CODEC, schedule="ring" if R == 1 else "auto", check=True),
            "argument 'schedule': 'auto' on rank 0",
        ),
        (lambda x: allreduce(x, CODEC, op="max" if R == 1 else "sum", check=True), "argument 'op': 'sum' on rank 0"),
        (
            lambda x: allreduce(x, CODEC, check=True) if R == 1 else cgx.mpi.compressed_allgather(x, CODEC, check=True),
            "function: compressed_allgather on rank 0",
        ),
        (
            lambda x: jax.jit(lambda x: allreduce({"w": x[: 8 - (R == 1)]}, CODEC, check=True))(x),
            "leaf ['w']: float32[8] on rank 0",
        ),
        (lambda x: allreduce([x[: 8 - (R == 1)]] * 9, CODEC, check=True), "and 4 more differences"),
        (lambda x: cgx.mpi.broadcast(x, int(R == 1), check=True), "argument 'root': 0 on rank 0"),
    ],
)
def test_ranks_that_differ(f, words):
    with pytest.raises(ValueError) as raised:
        f(normal(8))
    assert words in str(raised.value)
    assert len(set(COMM.allgather(str(raised.value)))) == 1


def everywhere(error, f):
    """Returns the error of f(), which must be the same on every rank."""
    with pytest.raises(error) as raised:
        f()
    assert len(set(COMM.allgather(str(raised.value)))) == 1
    return str(raised.value)


@several
def test_variables_of_one_rank(monkeypatch):
    for name, value in ("CGX_INTRA_BROADCAST", "yes"), ("CGX_BITS", "4"):
        with monkeypatch.context() as patch:
            if R == 1:
                patch.setenv(name, value)
            words = everywhere(ValueError, cgx.mpi.hierarchy)
        assert words.startswith(f"hierarchy: variable {name}: expected one of ") and words.endswith(", on rank 1")
    monkeypatch.setenv("CGX_INNER_COMMUNICATOR_TYPE", "MPI" if R == 1 else "SHM")
    words = everywhere(ValueError, cgx.mpi.hierarchy)
    assert words.startswith(
        "hierarchy: expected the same on every rank, got variable CGX_INNER_COMMUNICATOR_TYPE: SHM on rank 0"
    )
    assert words.endswith("MPI on rank 1")


@several
def test_a_rank_that_can_share_no_memory(monkeypatch):
    """If shared memory was requested, all ranks get an error. Otherwise MPI replaces it.

    MPI also replaces it for computations on other devices.
    """
    nodes = lambda: cgx.mpi.hierarchy(COMM.Dup())
    monkeypatch.delenv("CGX_INNER_COMMUNICATOR_TYPE", raising=False)
    assert isinstance(nodes().inner, Shm)
    with monkeypatch.context() as patch:
        if R == 1:
            patch.setattr(jax, "default_backend", lambda: "gpu")
        assert isinstance(nodes().inner, Comm)
    if R == 1:
        monkeypatch.setattr(registration, "MODULE", None)
    assert isinstance(nodes().inner, Comm)
    monkeypatch.setenv("CGX_INNER_COMMUNICATOR_TYPE", "SHM")
    words = everywhere(RuntimeError, nodes)
    assert words.startswith("hierarchy: Shm.over: rank 1: this transport needs the native module")
    assert words.endswith("; set CGX_INNER_COMMUNICATOR_TYPE=MPI, and MPI moves the bytes within a node")


@several
def test_after_a_checked_call_that_waited_in_vain(monkeypatch):
    """Ranks that waited raise at once. The other ranks don't take what these have sent for taking part."""
    comm = COMM.Dup()
    monkeypatch.setattr(cgx.mpi, "WAIT", 0.5)
    if R == 0:
        words = says("compressed_allreduce", "check", expected="rank 0 waited 0.5 s for the other ranks")
        with raises(RuntimeError, words):
            allreduce(normal(8), CODEC, comm, check=True)
    COMM.Barrier()
    for _ in range(2):
        with pytest.raises(RuntimeError) as raised:
            allreduce(normal(8), CODEC, comm, check=True)
    words = says("compressed_allreduce", "comm", expected="an earlier call over this communicator waited in vain")
    words.check(str(raised.value))


@several
def test_ranks_that_come_to_their_communicators_in_other_orders(monkeypatch):
    comms = [COMM.Dup(), COMM.Dup()]
    monkeypatch.setattr(cgx.mpi, "MEET", 0.5)
    for _ in range(2):  # the second time, the error comes at once
        with raises(RuntimeError, says("compressed_allreduce", "comm")):
            allreduce(normal(8), CODEC, comms[int(R == 1)])
    COMM.Barrier()
    comms[int(R != 1)].Idup()[1].Wait()  # otherwise MPI could not end


@several
def test_a_rank_that_does_not_come_to_the_hierarchy(monkeypatch):
    comm = COMM.Dup()
    monkeypatch.setattr(cgx.mpi, "MEET", 0.5)
    monkeypatch.setattr(cgx.mpi, "WAIT", 0.2)
    if R == 0:
        waits = pytest.warns(UserWarning, match=f"hierarchy: rank 0 has waited 0.2 s for all {N} ranks")
        with waits, raises(RuntimeError, says("hierarchy", "comm", remedy="first time in the same order")):
            cgx.mpi.hierarchy(comm)
    COMM.Barrier()
    if R != 0:
        comm.Ibarrier().Wait()  # otherwise MPI could not end


def test_communicators_are_freed_with_the_users():
    """MPI has a few thousand communicators, and gives the numbers of freed ones to new ones."""
    numbers = set()
    for _ in range(10):
        comm = COMM.Dup()
        nodes = cgx.mpi.hierarchy(comm)
        numbers |= {each.py2f() for each in (nodes.comm, nodes.cross.comm, ranks.over("test", comm).comm)}
        comm.Free()
    assert len(numbers) < 15
    again = COMM.Dup()  # a program that was compiled for a communicator with the same number serves this one
    np.testing.assert_array_equal(allreduce(jnp.ones(8), CODEC, again), N)


def test_ranks_that_agree():
    """Differences that don't matter, such as those of memory addresses, are no error."""
    plan = cgx.Plan(CODEC, [(lambda path, leaf: path == "w", cgx.MaxMin(8))], min_size=0, skip_1d=False)
    x = {"w": normal(100), "b": normal(7)}
    f = lambda x: allreduce(x, plan, key=jax.random.key(R), residuals=jax.tree.map(jnp.zeros_like, x), check=True)
    with pytest.warns(UserWarning, match="argument 'key' is not used"):
        got, _ = jax.jit(f)(x)
    assert abs(got["w"] - N * x["w"]).max() < 0.1 * N


def test_numbers_of_python_may_differ():
    got = allreduce({"a": R + 0.5, "b": np.float64(R) if R == 1 else jnp.float32(R)}, cgx.Raw(), check=True)
    assert got["a"] == sum(r + 0.5 for r in range(N)) and got["b"] == sum(range(N))
