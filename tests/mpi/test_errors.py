"""Bad input over MPI: the error on every rank, before any data moves."""

import jax
import jax.numpy as jnp
import pytest
from helpers import normal

import jaxcgx as cgx

pytest.importorskip("mpi4jax", reason="needs the extra `mpi`")
from mpi4py import MPI
from processes import COMM

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
            "compressed_allreduce: argument 'comm': expected an mpi4py communicator (MPI.Intracomm), got 'world'",
        ),
        (lambda x: allreduce(x, CODEC, MPI.COMM_NULL), TypeError, "got MPI.COMM_NULL"),
        (
            lambda x: allreduce(x, CODEC, op="max"),
            ValueError,
            "compressed_allreduce: argument 'op': expected one of 'sum', 'mean', got 'max'",
        ),
        (
            lambda x: allreduce(x, 4),
            TypeError,
            "compressed_allreduce: argument 'codec': expected a codec such as jaxcgx.MaxMin(bits=4), got 4",
        ),
        (lambda x: allreduce(x, CODEC, schedule="tree"), ValueError, "argument 'schedule': expected one of"),
        (
            lambda x: allreduce(x, CODEC, check=1),
            TypeError,
            "compressed_allreduce: argument 'check': expected True or False, got 1",
        ),
        (
            lambda x: allreduce(x, {"cross": CODEC, "inner": CODEC}),
            ValueError,
            'compressed_allreduce: argument \'codec\': expected nothing of "cross" and "inner" with a communicator, '
            "got {'cross': MaxMin(",
        ),
        (
            lambda x: allreduce(x, cgx.Plan.from_env(("cross", "inner"))),
            ValueError,
            'compressed_allreduce: argument \'codec\': expected nothing of "cross" and "inner" with a communicator, got Plan(',
        ),
        (
            lambda x: allreduce(x, cgx.Plan(CODEC, [("w", {"cross": CODEC, "inner": CODEC})])),
            ValueError,
            'argument \'codec\': expected nothing of "cross" and "inner" with a communicator, got Plan(',
        ),
        (
            lambda x: allreduce(x, cgx.Plan(CODEC, schedule={"cross": "ring", "inner": "ring"})),
            ValueError,
            'argument \'codec\': expected nothing of "cross" and "inner" with a communicator, got Plan(',
        ),
        (
            lambda x: allreduce(x, CODEC, schedule={"cross": "ring", "inner": "ring"}),
            ValueError,
            'argument \'schedule\': expected nothing of "cross" and "inner" with a communicator, got '
            "{'cross': 'ring', 'inner': 'ring'}; pass "
            "comm=jaxcgx.mpi.hierarchy()",
        ),
        (
            lambda x: allreduce(x, CODEC, leader=True),
            ValueError,
            'argument \'leader\': expected nothing of "cross" and "inner" with a communicator, got True; pass comm=jaxcgx.mpi.hierarchy()',
        ),
        (
            lambda x: allreduce(x, {"node": CODEC}, cgx.mpi.hierarchy()),
            ValueError,
            "compressed_allreduce: argument 'codec': expected a codec for each axis of ('cross', 'inner'), got",
        ),
        (
            lambda x: allreduce({"n": x.astype(jnp.int32)}, CODEC, strict=True),
            TypeError,
            "compressed_allreduce: argument 'x', leaf ['n']: int32 is not float32",
        ),
        (
            lambda x: allreduce(over_two_devices()[1], CODEC),
            ValueError,
            "compressed_allreduce: argument 'x': expected arrays on the one device that a rank computes on, got 2 "
            "devices; start a process for each device, or use a mesh",
        ),
        (lambda x: in_a_mesh(), ValueError, "expected arrays on the one device that a rank computes on, got 2 devices"),
        (
            lambda x: (
                cgx.mpi.compressed_reduce_scatter(jnp.ones(N + 1), CODEC, tiled=True)
                if N > 1
                else cgx.mpi.compressed_reduce_scatter(jnp.ones(2), CODEC)
            ),
            ValueError,
            "compressed_reduce_scatter: argument 'scatter_dimension': expected dimension 0 to have",
        ),
        (
            lambda x: cgx.mpi.compressed_allgather(x, CODEC, axis=3),
            ValueError,
            "compressed_allgather: argument 'axis': expected a dimension of",
        ),
        (
            lambda x: cgx.mpi.compressed_alltoall(x, CODEC, split_axis=5),
            ValueError,
            "compressed_alltoall: argument 'split_axis': expected a dimension of",
        ),
        (
            lambda x: cgx.mpi.broadcast(x, N),
            ValueError,
            f"broadcast: argument 'root': expected a rank from 0 to {N - 1}, got {N}",
        ),
        (lambda x: cgx.mpi.broadcast(x, 0.5), TypeError, "broadcast: argument 'root': expected a rank, got 0.5"),
        (
            lambda x: cgx.mpi.broadcast({"w": object()}),
            TypeError,
            "broadcast: argument 'x', leaf ['w']: expected an array, got <object",
        ),
        (
            lambda x: cgx.mpi.hierarchy("world"),
            TypeError,
            "hierarchy: argument 'comm': expected an mpi4py communicator (MPI.Intracomm), got 'world'",
        ),
        (
            lambda x: cgx.mpi.hierarchy(inner=4),
            TypeError,
            "hierarchy: argument 'inner': expected an mpi4py communicator",
        ),
    ],
)
def test_bad_arguments(f, error, words):
    with pytest.raises(error) as raised:
        f(normal(8))
    assert words in str(raised.value)


@pytest.mark.skipif(N < 3, reason="needs 3 ranks or more: mpirun")
def test_nodes_of_different_sizes():
    with pytest.raises(
        ValueError,
        match=f"hierarchy: argument 'comm': expected as many ranks on every node, got 1, {N - 1}; pass the communicator "
        "itself",
    ):
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
            "argument 'codec': MaxMin(bits=4, bucket_size=512, rounding='nearest', skip_incomplete=False) on rank 0",
        ),
        (lambda x: allreduce(x, cgx.Plan(CODEC, min_size=(R == 1 and 9) or 5), check=True), "argument 'codec': Plan("),
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
    """The error of f(), the same on every rank."""
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
    """An error of all if shared memory was asked for; without, MPI takes its place. As it does for computations
    elsewhere."""
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
    """Whoever waited raises at once; what it had sent makes no other rank believe that it takes part."""
    comm = COMM.Dup()
    monkeypatch.setattr(cgx.mpi, "WAIT", 0.5)
    if R == 0:
        with pytest.raises(RuntimeError, match="rank 0 waited 0.5 s for the other ranks"):
            allreduce(normal(8), CODEC, comm, check=True)
    COMM.Barrier()
    for _ in range(2):
        with pytest.raises(RuntimeError) as raised:
            allreduce(normal(8), CODEC, comm, check=True)
    assert (
        "compressed_allreduce: argument 'comm': an earlier checked call over this communicator waited in vain"
        in str(raised.value)
    )


def test_ranks_that_agree():
    """What has an address differs in nothing that matters."""
    plan = cgx.Plan(CODEC, [(lambda path, leaf: path == "w", cgx.MaxMin(8))], min_size=0, skip_1d=False)
    x = {"w": normal(100), "b": normal(7)}
    f = lambda x: allreduce(x, plan, key=jax.random.key(R), residuals=jax.tree.map(jnp.zeros_like, x), check=True)
    with pytest.warns(UserWarning, match="the key is not used"):
        got, _ = jax.jit(f)(x)
    assert abs(got["w"] - N * x["w"]).max() < 0.1 * N
