"""Tests that the collectives over MPI give the same bits as over a mesh, and that explain counts their bytes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_same_trees, assert_trees, normal, planned
from ranks import pipeline, ring

import jaxcgx as cgx

pytest.importorskip("mpi4jax", reason="needs the extra `mpi`")
from mpi4py import MPI
from processes import COMM, mine, on_mesh, same_everywhere

from jaxcgx.native.layout import Layout
from jaxcgx.transports.shm import Shm

N, KEY = COMM.size, jax.random.key(7)
CODECS = [cgx.MaxMin(3, 33, "correlated"), cgx.ByteGrad()]
SCHEDULES = ("two_shot", "one_shot", "ring", "gather")


def tree(ranks):
    """Returns leaves for the ranks: whole and short buckets, all dtypes, and leaves that travel raw."""
    x = {
        "w": normal((ranks, 3 * ranks, 100)),
        "b": normal((ranks, 2 * ranks, 1), 1, jnp.bfloat16),
        "h": normal((ranks, ranks, 33), 2, jnp.float16),
        "n": jnp.arange(ranks * ranks * 3, dtype=jnp.int32).reshape(ranks, ranks, 3) % 5,
    }
    return x | {"w": x["w"] * jnp.arange(1, ranks + 1, dtype=jnp.float32)[:, None, None]}


def key(codec):
    return KEY if codec.stochastic else None


def differences(x, axis, key, codec):
    """Sends x around a ring, and then the difference of 2 x to what was sent."""
    carry = cgx.init_carry(codec, x, ends=True)
    for scale in (1, 2):
        scaled = jax.tree.map(lambda y, s=scale: s * y, x)
        moved, carry = cgx.compressed_ppermute(scaled, axis, ring(N), codec, key=key, carry=carry)
    return moved, carry


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_every_collective(codec):
    k = key(codec)

    over = lambda axis: (
        lambda x: [
            [cgx.compressed_psum(x, axis, planned(codec, schedule=s), key=k) for s in SCHEDULES],
            cgx.compressed_pmean(x, axis, codec, key=k),
            cgx.compressed_psum_scatter(x, axis, codec, key=k, tiled=True),
            cgx.compressed_all_gather(x, axis, codec, key=k, axis=1),
            cgx.compressed_all_to_all(x, axis, 0, 1, codec, key=k, tiled=True),
            cgx.compressed_ppermute(x, axis, [(r, N - 1 - r) for r in range(N)], codec, key=k),
            cgx.compressed_ppermute(x, axis, pipeline(N), codec, key=k),
            cgx.compressed_pbroadcast(x, axis, N - 1, codec, key=k),
            differences(x, axis, k, codec),
        ]
    )
    x = tree(N)
    got = jax.jit(over(COMM))(mine(x))
    assert_same_trees(got, on_mesh(over("a"), x))
    assert same_everywhere(got[:2]) and same_everywhere(got[3])  # replicas


def test_sums_of_codecs():
    """Of whole and short buckets, and of codecs that send seeds, scales of blocks or only digits.

    Each codec has one schedule, except Lossless. test_every_collective has two codecs on all of them.
    """
    widths = [cgx.MaxMin(bits, bucket) for bits, bucket in zip((1, 2, 3, 8), (64, 512, 2048, 33))]
    rotated = cgx.MaxMin(4, 128, rotate=True)
    codecs = [cgx.Eden(3, 128), cgx.Micro(), cgx.Lossless(), rotated, cgx.Micro("nvfp4", "eden")]
    each = [(planned(codec, schedule=SCHEDULES[i % 4]), key(codec)) for i, codec in enumerate(codecs)]
    each += [(planned(cgx.Lossless(), schedule=s), None) for s in SCHEDULES if s != "ring"]
    each += [(planned(codec, schedule="two_shot"), None) for codec in widths]
    x = {str(size): normal((N, size), size) ** 3 for size in (1, 2, 8, 17, 128, 700, 1025, 16384)}
    x |= {"h": normal((N, 33), 2, jnp.float16), "large": normal((N, 10**6)), "tiny": normal((N, 512)) * 1e-25}
    x["bad"] = normal((N, 512)).at[0, 100].set(jnp.nan).at[N - 1, 300].set(jnp.inf)
    x["same"] = jnp.broadcast_to(jnp.arange(1.0, N + 1)[:, None], (N, 1025))
    over = lambda axis: lambda x: [cgx.compressed_psum(x, axis, plan, key=k) for plan, k in each]
    got = jax.jit(over(COMM))(mine(x))
    assert_same_trees(got, on_mesh(over("a"), x))
    assert same_everywhere(got)


def test_sparse_sums():
    """The sums are over ranks and over nodes. The momentum of sent elements is cleared."""
    x, few, grid = {"w": normal((N, 900))}, cgx.TopK(0.1), GRIDS[0]

    def over(ranks, axes, cross, inner):
        levels, top = {cross: few, inner: cgx.Raw()}, cgx.TopK(0.1, pull="top")
        ways = [(ranks, planned(few, schedule="one_shot")), (ranks, planned(top, schedule="two_shot"))]
        ways += [(axes, planned(levels, schedule="two_shot", leader=leader)) for leader in (False, True)]

        def sums(x):
            carry = cgx.Carry(residuals=jax.tree.map(lambda leaf: leaf / 8, x), momentum=x)
            return [cgx.compressed_psum(x, names, plan, carry=carry) for names, plan in ways]

        return sums

    got = jax.jit(over(COMM, nodes(grid), "cross", "inner"))(mine(x))
    assert_same_trees(got, on_mesh(over(("a", "b"), ("a", "b"), "a", "b"), x, sizes=grid))


def test_derivatives():
    """Transposes are compressed in the same way. Transposes of raw leaves are those of lax."""
    x = {k: v for k, v in tree(N).items() if k != "n"} | {"raw": normal((N, N, 3))}
    plan = cgx.Plan(cgx.MaxMin(4, 33, "stochastic"), [("raw", cgx.Raw())], min_size=0, skip_1d=False)

    def slopes(*collectives):
        square = lambda f: lambda x: sum((y.astype(jnp.float32) ** 2).sum() for y in jax.tree.leaves(f(x)))
        return lambda x: [jax.grad(square(f))(x) for f in collectives]

    over = lambda axis: slopes(
        lambda x: cgx.compressed_psum(x, axis, plan, key=KEY),
        lambda x: cgx.compressed_psum_scatter(x, axis, plan, key=KEY, tiled=True),
        lambda x: cgx.compressed_all_gather(x, axis, plan, key=KEY),
        lambda x: cgx.compressed_all_to_all(x, axis, 0, 1, plan, key=KEY, tiled=True),
    )
    for got, expected in zip(jax.jit(over(COMM))(mine(x)), on_mesh(over("a"), x)):
        # XLA and MPI add in different orders.
        np.testing.assert_allclose(got.pop("raw"), expected.pop("raw"), rtol=1e-6)
        assert_same_trees(got, expected)


GRIDS = [(2, 2)] if N == 4 else [(1, N), (N, 1)]


def nodes(grid):
    """Returns a hierarchy with that many nodes and ranks per node."""
    return cgx.mpi.hierarchy(COMM, COMM.Split(COMM.rank // grid[1], COMM.rank))


@pytest.mark.parametrize(
    ("grid", "inner"),
    [(grid, inner) for grid in dict.fromkeys(GRIDS) for inner in ("SHM", "MPI") if inner == "SHM" or grid[1] > 1],
    ids=str,
)
def test_hierarchies(grid, inner, monkeypatch):
    monkeypatch.setenv("CGX_INNER_COMMUNICATOR_TYPE", inner)
    x, found = {"w": normal((N, 5, 700)), "n": jnp.ones((N, 3), jnp.int32)}, nodes(grid)
    assert (found.cross.size, found.inner.size, found.rank) == (*grid, COMM.rank)
    assert isinstance(found.inner, Shm) == (inner == "SHM" and grid[1] > 1)
    cross, raw, fine = cgx.MaxMin(4, 64, "stochastic"), cgx.Raw(), cgx.MaxMin(8)
    cases = [(raw, False, "two_shot"), (raw, True, "ring"), (fine, False, "ring"), (fine, True, "two_shot")]

    def over(axes, outer, within):
        plans = [planned({outer: cross, within: codec}, schedule=s, leader=leader) for codec, leader, s in cases]
        return lambda x: [cgx.compressed_pmean(x, axes, plan, key=KEY) for plan in plans]

    got = jax.jit(over(found, "cross", "inner"))(mine(x))
    assert same_everywhere(got)  # leaders of CGX end with other numbers than their peers
    for a, b, (codec, leader, _) in zip(got, on_mesh(over(("a", "b"), "a", "b"), x, sizes=grid), cases):
        if codec.raw and leader:
            # XLA and MPI add raw numbers in different orders, so the codec may round to the next step.
            np.testing.assert_allclose(a["w"], b["w"], atol=0.5)
        else:
            assert_same_trees(a, b)


@pytest.mark.parametrize("inner", ["SHM", "MPI"])
def test_one_node_moves_nothing_in_another_way(inner, monkeypatch):
    """By levels, with one codec, and raw: all through shared memory, or all over MPI."""
    if N == 1:
        pytest.skip("needs 2 ranks or more: mpirun")
    monkeypatch.setenv("CGX_INNER_COMMUNICATOR_TYPE", inner)
    found, x, codec = cgx.mpi.hierarchy(), jnp.ones((N, 3 * N, 64)), cgx.MaxMin(4)
    allreduce = lambda codec, **fields: lambda x: cgx.compressed_psum(x, found, planned(codec, **fields))
    for f in (
        allreduce({"cross": codec, "inner": codec}),
        allreduce({"cross": codec, "inner": cgx.Raw()}, leader=True),
        allreduce(codec),
        allreduce(codec, schedule="ring"),
        allreduce(cgx.Raw()),
        lambda x: cgx.mpi.broadcast(x, 0, found),
        lambda x: cgx.compressed_all_to_all(x, found, 0, 0, codec),
        lambda x: cgx.compressed_all_gather(x, found, cgx.Raw()),
    ):
        program = jax.jit(f).lower(x).as_text()
        assert ("@jaxcgx_exchange" in program, "@mpi_" in program) == (inner == "SHM", inner == "MPI")


@pytest.mark.parametrize("inner", ["SHM", "MPI"])
@pytest.mark.parametrize("grid", list(dict.fromkeys(GRIDS)), ids=str)
def test_a_leader_under_vmap(grid, inner, monkeypatch):
    """A rank that isn't a leader sends as many rows as the leader."""
    monkeypatch.setenv("CGX_INNER_COMMUNICATOR_TYPE", inner)
    found, x = nodes(grid), jnp.arange(6.0).reshape(2, 3) + COMM.rank
    plan = planned({"cross": cgx.Lossless(), "inner": cgx.Raw()}, leader=True)
    allreduce = jax.vmap(lambda x: cgx.compressed_psum(x, found, plan))
    expected = N * np.arange(6.0).reshape(2, 3) + N * (N - 1) / 2
    np.testing.assert_array_equal(jax.jit(allreduce)(x), expected)


@pytest.mark.parametrize("inner", ["SHM", "MPI"])
def test_the_levels_of_a_hierarchy(inner, monkeypatch):
    """Each level is used alone, and so are all ranks of one node together. Leaves have every dtype."""
    monkeypatch.setenv("CGX_INNER_COMMUNICATOR_TYPE", inner)
    monkeypatch.setattr(cgx.mpi, "CHECK", True)
    found, codec, x = cgx.mpi.hierarchy(), cgx.MaxMin(3, 33), tree(N)
    over = lambda axis: (
        lambda x: [
            cgx.compressed_psum(x, axis, codec),
            cgx.compressed_psum_scatter(x, axis, codec, tiled=True),
            cgx.compressed_all_gather(x, axis, codec),
            cgx.compressed_all_to_all(x, axis, 0, 1, codec, tiled=True),
        ]
    )
    for comm in (found, found.inner):
        assert_same_trees(jax.jit(over(comm))(mine(x)), on_mesh(over("a"), x))
        np.testing.assert_array_equal(cgx.mpi.broadcast(jnp.full(3, COMM.rank, jnp.int4), N - 1, comm), N - 1)
    x = x["w"][COMM.rank]
    assert_same_trees(cgx.compressed_psum(x, found.cross, codec), x)  # the only rank at its place


def test_a_hierarchy_is_made_once():
    comm = COMM.Dup()
    first = cgx.mpi.hierarchy(comm)
    assert cgx.mpi.hierarchy(comm) is first and cgx.mpi.hierarchy(COMM.Dup()) is not first
    halves = [cgx.mpi.hierarchy(comm, COMM.Split(COMM.rank, 0)) for _ in range(2)]
    assert halves[0] is halves[1] and (N == 1 or halves[0] is not first)


def test_a_hierarchy_scatters_and_gathers():
    grid = GRIDS[-1]
    x, outer, within = {"w": normal((N, 2 * N, 100))}, cgx.MaxMin(4), cgx.MaxMin(8, 33)
    over = lambda axes, codec: (
        lambda x: [
            cgx.compressed_psum_scatter(x, axes, codec, tiled=True),
            cgx.compressed_all_gather(x, axes, codec),
            cgx.compressed_all_to_all(x, axes, 0, 0, codec, tiled=True),
        ]
    )
    got = jax.jit(over(nodes(grid), {"cross": outer, "inner": within}))(mine(x))
    assert_same_trees(got, on_mesh(over(("a", "b"), {"a": outer, "b": within}), x, sizes=grid))


def test_nodes_whose_ranks_are_spread():
    """Ranks 0 and 2 are on one node, 1 and 3 on the other one. The hierarchy counts them node by node."""
    if N != 4:
        pytest.skip("needs 4 ranks")
    found = cgx.mpi.hierarchy(COMM, COMM.Split(COMM.rank % 2, COMM.rank))
    assert found.rank == [0, 2, 1, 3][COMM.rank]
    x, codec = normal((4, 8, 50)), {"cross": cgx.MaxMin(8), "inner": cgx.MaxMin(8)}
    got = jax.jit(lambda x: cgx.compressed_all_gather(x, found, codec))(x[found.rank])
    assert np.abs(got - x).max() < 0.05


def test_communicators_within_the_world():
    """Even and odd ranks exchange among themselves, and all ranks together, in the same program."""
    part = COMM.Split(COMM.rank % 2, COMM.rank)
    everybody, group = normal((N, 700)), normal((part.size, 700), 1 + COMM.rank % 2)
    codec = cgx.MaxMin(4)

    def f(x, y):
        return [
            cgx.compressed_psum(y, part, codec),
            cgx.compressed_psum(x, COMM, codec),
            cgx.compressed_all_gather(y, part, codec),
        ]

    got = jax.jit(f)(mine(everybody), mine(group, part))
    sums = lambda x: cgx.compressed_psum(x, "a", codec)
    assert_same_trees(got[0], on_mesh(sums, group, part))
    assert_same_trees(got[1], on_mesh(sums, everybody))
    assert_same_trees(got[2], on_mesh(lambda x: cgx.compressed_all_gather(x, "a", codec), group, part))


def test_other_reductions_stay_what_they_are():
    """Compression is per call. It doesn't change mpi4jax's sums in the same program, or mpi4py's outside of it."""
    import mpi4jax

    x = normal((N, 1000))

    def f(x):
        return cgx.compressed_psum(x, COMM, cgx.MaxMin(1)), mpi4jax.allreduce(x, MPI.SUM, comm=COMM)

    _, exact = jax.jit(f)(mine(x))
    np.testing.assert_allclose(exact, x.sum(0), rtol=1e-5, atol=1e-5)
    assert COMM.allreduce(COMM.rank + 1) == N * (N + 1) // 2


def test_python_may_send_while_a_program_runs():
    """JAX runs ahead of Python. Messages of both over one communicator don't interfere."""
    x, step = mine(normal((N, 300_000))), jax.jit(lambda x: cgx.compressed_pmean(x, COMM, cgx.MaxMin(8)))
    jax.block_until_ready(step(x))
    for i in range(20):
        x = step(x)
        assert COMM.allreduce(i) == N * i
    assert same_everywhere(step(x))


@pytest.mark.parametrize("total", [2**18 - 1, 2**18, 2**18 + 1, 3 * 2**18])
def test_messages_of_the_limit_and_around(total):
    """CGX doesn't compress the last group of layers that together reach the limit, here 1 MiB."""
    sizes = [2**17, 2**16, total - 2**17 - 2**16]
    x = [normal((N, size), seed) for seed, size in enumerate(sizes)]
    got = jax.jit(lambda x: cgx.compressed_psum(x, COMM, planned(cgx.MaxMin(8), fusion_mb=1)))(mine(x))
    for a, b in zip(got, x):
        assert np.abs(a - b.sum(0)).max() < 0.1 * (N + 1)


def test_broadcast():
    root = N - 1
    x = {
        "w": normal((N, 5)),
        "b": normal((N, 3), 1, jnp.bfloat16),
        "n": np.arange(N * 4).reshape(N, 4),
        "z": np.full((N, 2), -0.0),
        "nan": np.full((N, 2), np.nan),
        "flag": np.arange(N) % 2 == 0,
        "empty": np.zeros((N, 0)),
    }

    def f(x, key):
        slope = jax.grad(lambda x: (cgx.mpi.broadcast(x, root) * (COMM.rank + 1)).sum())(jnp.ones(3))
        return cgx.mpi.broadcast(x, root), cgx.mpi.broadcast(key, root), slope

    got, key, slope = jax.jit(f)(mine(x), jax.random.key(COMM.rank))
    expected = jax.tree.map(lambda leaf: jnp.asarray(leaf)[root], x)
    assert_same_trees(got, expected)
    np.testing.assert_array_equal(jax.random.key_data(key), jax.random.key_data(jax.random.key(root)))
    np.testing.assert_array_equal(slope, N * (N + 1) / 2 * (COMM.rank == root))
    np.testing.assert_array_equal(cgx.mpi.broadcast(x["w"][COMM.rank], root), x["w"][root])  # also without jit


def test_low_rank(monkeypatch):
    """As on a mesh, except for the order of sums."""
    codec, x = cgx.PowerSGD(2), {"w": normal((N, 30, 40)), "v": normal((N, 30, 40), 1), "b": normal((N, 40), 2)}

    def over(axis):
        def steps(x):
            first = cgx.compressed_pmean(x, axis, codec, carry=cgx.init_carry(codec, x))
            return first, cgx.compressed_pmean(x, axis, codec, carry=first[1])

        return steps

    monkeypatch.setattr(cgx.mpi, "CHECK", True)
    found, expected = jax.jit(over(COMM))(mine(x)), on_mesh(over("a"), x)
    assert_trees(lambda y, there: np.testing.assert_allclose(y, there, atol=1e-5), found, expected)
    assert same_everywhere([(mean, carry.factors) for mean, carry in found])
    mean, carry = found[0]
    for name, lost in carry.residuals.items():  # None: raw leaves lose nothing
        total = sum(COMM.allgather(np.asarray(0 if lost is None else lost, np.float64)))
        np.testing.assert_allclose(N * np.asarray(mean[name], np.float64) + total, x[name].sum(0), atol=1e-5)


@pytest.mark.skipif(N == 1, reason="needs 2 ranks or more: mpirun")
def test_explain_counts_bytes():
    plan = planned(cgx.MaxMin(4), schedule="two_shot")
    step = lambda x: cgx.compressed_psum({"n": jnp.ones(3, jnp.int32), "w": x}, COMM, plan)
    found = cgx.explain(step, normal(3000), show=False)
    part = Layout(cgx.MaxMin(4), ((3000,),), (jnp.float32,), N).chunk_bytes
    over = (f"{N} ranks over MPI",)
    assert {(c.operation, c.axes, c.bytes, c.codec, c.leaves) for c in found.collectives} == {
        ("all-reduce", over, round(2 * (N - 1) / N * 12), "Raw()", ("['n']",)),
        ("all-to-all", over, (N - 1) * part, "MaxMin(bits=4)", ("['w']",)),
        ("all-gather", over, (N - 1) * part, "MaxMin(bits=4)", ("['w']",)),
        ("all-gather", over, (N - 1) * 16, "Raw()", ("digest",)),  # with these, ranks check whether they differ
    }
    assert {c.function for c in found.collectives} == {"compressed_psum"}
    assert found.ratio > 3 and {c.over for c in found.collectives} == {"MPI"} and len(found.raw) == 1
