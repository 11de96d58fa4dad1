"""Tests bad input over MPI: every rank gets the error, before any data moves."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from errors import named, names
from helpers import normal
from ranks import mesh, on_ranks

import jaxcgx as cgx

pytest.importorskip("mpi4jax", reason="needs the extra `mpi`")
from mpi4py import MPI
from processes import COMM

from jaxcgx.mpi import ranks
from jaxcgx.mpi.agreement import compare
from jaxcgx.native import registration
from jaxcgx.transports.mpi import Comm
from jaxcgx.transports.shm import Shm

N, R, CODEC = COMM.size, COMM.rank, cgx.MaxMin(4)
several = pytest.mark.skipif(N == 1, reason="needs 2 ranks or more: mpirun")


def psum(x, plan, comm=COMM, **given):
    return cgx.compressed_psum(x, comm, plan, **given)


def over_two_devices():
    return jax.device_put(normal((2, 8)), jax.NamedSharding(mesh(2), jax.P("a")))


def in_a_mesh():
    return on_ranks(lambda x: psum(x, CODEC), mesh(2), check_vma=False)(normal((2, 8)))


PSUM, BROADCAST, VALUE, TYPE = "compressed_psum", cgx.mpi.broadcast, ValueError, TypeError


# Other arguments are checked before it is known what moves the bytes (tests/collectives/test_errors.py).
@pytest.mark.parametrize(
    ("f", "error", "words"),
    [
        (lambda x: psum(x, CODEC, "world"), NameError, f"{PSUM} axis_name 'world'"),
        (lambda x: psum(x, CODEC, MPI.COMM_NULL), TYPE, f"{PSUM} axis_name MPI.COMM_NULL"),
        (lambda x: psum(x, cgx.mpi.hierarchy()), TYPE, f"{PSUM} plan handle="),
        (lambda x: psum(x, {"cross": CODEC, "inner": CODEC}), VALUE, f"{PSUM} plan {{'cross' jaxcgx.mpi.hierarchy()"),
        (lambda x: psum(x, {"node": CODEC}, cgx.mpi.hierarchy()), VALUE, f"{PSUM} plan {{'node'"),
        (lambda x: psum(over_two_devices(), CODEC), VALUE, f"{PSUM} x 2 devices process for each device mesh"),
        (lambda x: in_a_mesh(), VALUE, f"{PSUM} x 2 devices"),
        (lambda x: BROADCAST(x, N), VALUE, f"broadcast root {N}"),
        (lambda x: BROADCAST(x, 0.5), TYPE, "broadcast root 0.5"),
        (lambda x: BROADCAST({"w": object()}), TYPE, "broadcast x leaf ['w'] <object"),
        (lambda x: cgx.mpi.hierarchy("world"), TYPE, "hierarchy comm 'world'"),
        (lambda x: cgx.mpi.hierarchy(inner=4), TYPE, "hierarchy inner 4"),
    ],
)
def test_bad_arguments(f, error, words):
    with names(error, words):
        f(normal(8))


@pytest.mark.skipif(N < 3, reason="needs 3 ranks or more: mpirun")
def test_nodes_of_different_sizes():
    words = f"hierarchy comm 1, {N - 1} communicator itself"
    with names(ValueError, words):
        cgx.mpi.hierarchy(COMM, COMM.Split(int(R > 0), R))


def everywhere(error, f):
    """Returns the error of f(), which must be the same on every rank."""
    with pytest.raises(error) as raised:
        f()
    assert len(set(COMM.allgather(str(raised.value)))) == 1
    return str(raised.value)


def gather(x, plan):
    return cgx.compressed_all_gather(x, COMM, plan)


def short(x):
    return x[: 8 - (R == 1)]


RULES = [(str(i), cgx.MaxMin(4 + (R == i == 1))) for i in range(9)]


@several
@pytest.mark.parametrize(
    ("f", "words"),
    [
        (lambda x: psum({"w": short(x), "b": x}, CODEC), "float32[7] on rank 1"),
        (lambda x: psum(x.astype(jnp.bfloat16) if R == 1 else x, CODEC), "leaf x: float32[8] on rank 0"),
        (lambda x: psum([x, x] if R == 1 else [x], CODEC), "leaf [1]: nothing on rank 0"),
        (lambda x: psum(x, cgx.MaxMin(4 + (R == 1))), "argument 'plan': Plan(default=MaxMin(bits=4, bucket_size=512, "),
        (lambda x: psum(x, cgx.Plan(CODEC, RULES)), "... on rank 1"),  # of a long plan, only the part that differs
        (lambda x: psum(x, cgx.Plan(CODEC, min_size=(R == 1 and 9) or 5)), "argument 'plan': ..."),
        (lambda x: cgx.compressed_psum_scatter(x, COMM, CODEC, tiled=R == 1), "argument 'tiled': False on rank 0"),
        (lambda x: (psum if R == 1 else gather)(x, CODEC), "function: compressed_all_gather on rank 0"),
        (lambda x: jax.jit(lambda x: psum({"w": short(x)}, CODEC))(x), "leaf ['w']: float32[8] on rank 0"),
        (lambda x: psum([short(x)] * 9, CODEC), "and 4 more differences"),
        (lambda x: cgx.mpi.broadcast(x, int(R == 1)), "argument 'root': 0 on rank 0"),
    ],
)
def test_ranks_that_differ(f, words, monkeypatch):
    monkeypatch.setattr(cgx.mpi, "CHECK", True)
    said = everywhere(ValueError, lambda: f(normal(8)))
    assert "expected the same on every rank, got " in said and words in said


@several
@pytest.mark.parametrize(("level", "expected"), [("CROSS", "MPI"), ("INNER", "MPI or SHM")])
def test_variables_that_cannot_be(level, expected, monkeypatch):
    variable = f"CGX_{level}_COMMUNICATOR_TYPE"
    monkeypatch.setenv(variable, "NCCL")
    words = everywhere(ValueError, cgx.mpi.hierarchy)
    assert f"variable {variable}: expected {expected} between processes, got NCCL" in words


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
    """MPI replaces shared memory, also for other devices. If it was requested, all ranks get an error."""
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
    monkeypatch.setattr(cgx.mpi, "CHECK", True)
    if R == 0:
        with names(RuntimeError, "compressed_psum - jaxcgx.mpi.CHECK rank 0 waited 0.5 s make trace"):
            psum(normal(8), CODEC, comm)
    COMM.Barrier()
    for _ in range(2):
        with pytest.raises(RuntimeError) as raised:
            psum(normal(8), CODEC, comm)
    named(str(raised.value), "compressed_psum - earlier waited in vain")


@several
def test_ranks_that_come_to_their_communicators_in_other_orders(monkeypatch):
    comms = [COMM.Dup(), COMM.Dup()]
    monkeypatch.setattr(cgx.mpi, "MEET", 0.5)
    for _ in range(2):  # the second time, the error comes at once
        with names(RuntimeError, "compressed_psum - waited"):
            psum(normal(8), CODEC, comms[int(R == 1)])
    COMM.Barrier()
    comms[int(R != 1)].Idup()[1].Wait()  # otherwise MPI could not end


@several
def test_a_rank_that_does_not_come_to_the_hierarchy(monkeypatch):
    comm = COMM.Dup()
    monkeypatch.setattr(cgx.mpi, "MEET", 0.5)
    monkeypatch.setattr(cgx.mpi, "WAIT", 0.2)
    if R == 0:
        waits = pytest.warns(UserWarning, match=f"hierarchy: rank 0 has waited 0.2 s for all {N} ranks")
        with waits, names(RuntimeError, "hierarchy - first time in the same order"):
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
    np.testing.assert_array_equal(psum(jnp.ones(8), CODEC, again), N)


def test_different_functions_of_different_versions():
    of = lambda op, version: {"function": op, "version of jaxcgx": version, "x": op}
    words = "one - function: one on rank 0, two on rank 1; version of jaxcgx: 0.1 on rank 0, 0.2 on rank 1"
    with names(ValueError, words):
        compare("one", [of("one", "0.1"), of("two", "0.2")])


def test_ranks_that_agree(monkeypatch):
    """Differences that don't matter, such as those of memory addresses, are no error."""
    plan = cgx.Plan(CODEC, [(lambda path, leaf: path == "w", cgx.MaxMin(8))], min_size=0, skip_1d=False)
    monkeypatch.setattr(cgx.mpi, "CHECK", True)
    x = {"w": normal(100), "b": normal(7)}
    f = lambda x: psum(x, plan, key=jax.random.key(R), carry=cgx.init_carry(plan, x))
    with pytest.warns(UserWarning, match="argument 'key' is not used"):
        got, _ = jax.jit(f)(x)
    assert abs(got["w"] - N * x["w"]).max() < 0.1 * N


def test_numbers_of_python_may_differ(monkeypatch):
    monkeypatch.setattr(cgx.mpi, "CHECK", True)
    got = psum({"a": R + 0.5, "b": np.float64(R) if R == 1 else jnp.float32(R)}, cgx.Raw())
    assert got["a"] == sum(r + 0.5 for r in range(N)) and got["b"] == sum(range(N))
