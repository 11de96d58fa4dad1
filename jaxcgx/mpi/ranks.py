"""The transports over a communicator and over the nodes of its ranks, and the beginning of every call over them.

Transports live as long as their communicator.

Python may run ahead of a compiled program, and its messages must not be mistaken for those of the program. So exchanges
use separate communicators. The user's communicator keeps these as attributes, and they are freed with it
(`comm.Free()`).
"""

import dataclasses
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from mpi4py import MPI

from jaxcgx import mpi
from jaxcgx.checks import as_whole, check_integer, unexpected, wrong
from jaxcgx.mpi.agreement import Communicator, agree, check_ready, compare, describe, greet, meet
from jaxcgx.mpi.leave import forget, watch
from jaxcgx.plan import environment
from jaxcgx.transports.mpi import Comm, Net, SharedMemory
from jaxcgx.typing import PyTree


def keyval(parts: Callable[[Any], Iterable[Net]]) -> int:
    """Makes a key for communicator attributes that keep transports. `parts` returns an attribute's transports."""

    def free(comm: Communicator, key: int, kept: Any) -> None:
        if comm == MPI.COMM_WORLD:  # MPI is ending, and frees everything
            return
        jax.effects_barrier()  # running programs may still send
        for net in parts(kept):
            forget(net)
            if isinstance(net, SharedMemory):
                net.close()
            net.comm.Free()

    return MPI.Comm.Create_keyval(delete_fn=free)


_OWN = keyval(lambda kept: [kept])
# The key of the hierarchies that a communicator keeps.
_NODES = keyval(lambda made: [net for nodes in made.values() for net in _distinct(nodes)])


def over(op: str, comm: Communicator) -> Comm:
    """Returns the transport over the ranks of a communicator. It is made at the first call."""
    net: Comm | None = comm.Get_attr(_OWN)
    if net is None:
        own, request = comm.Idup()  # not Dup: ranks that come here in different orders would wait forever
        meet(op, comm, request)
        net = Comm.over(own)
        watch(net)
        comm.Set_attr(_OWN, net)
    return net


def as_communicator(op: str, argument: str, comm: Any) -> Communicator:
    """Checks a communicator and returns it. None means MPI.COMM_WORLD."""
    if comm is None:
        return MPI.COMM_WORLD
    if not isinstance(comm, MPI.Intracomm) or comm == MPI.COMM_NULL:
        got = "MPI.COMM_NULL" if isinstance(comm, MPI.Comm) and comm == MPI.COMM_NULL else repr(comm)
        raise wrong(op, argument, "an mpi4py communicator (MPI.Intracomm)", got, kind=TypeError)
    return comm


def hierarchy(comm: Communicator | None = None, inner: Communicator | None = None) -> Net:
    """Groups the ranks of `comm` by nodes, for networks that are slower between nodes than inside them.

    Pass the result where a function takes a communicator.

    The environment variables CGX_INNER_COMMUNICATOR_TYPE and CGX_CROSS_COMMUNICATOR_TYPE choose what moves the bytes
    inside nodes and between nodes. If the first isn't set, the processes of a node use shared memory if they can, and
    MPI otherwise. All ranks must have the same variables.

    The result's `cross` has the ranks with this rank's place in all nodes. Its `inner` has the ranks of this node. The
    result itself numbers all ranks node by node (`rank`, `size`). This order may differ from the order of `comm`.

    Args:
      comm: all ranks. MPI.COMM_WORLD by default.
      inner: the ranks of this rank's node. By default, MPI finds the ranks that share memory with this rank. Every node
        must have the same number of ranks.
    """
    ranks: Communicator = as_communicator("hierarchy", "comm", comm)
    check_ready("hierarchy", ranks)
    if inner is not None:
        inner = as_communicator("hierarchy", "inner", inner)
    meet("hierarchy", ranks, ranks.Ibarrier())
    env, variables = _environment(ranks)
    kinds = ("INNER", env.inner_communicator, "MPI or SHM"), ("CROSS", env.cross_communicator, "MPI")
    for level, kind, expected in kinds:
        if kind == "NCCL":
            used = "which XLA uses between the GPUs of a mesh: jax.distributed.initialize() and jaxcgx.compressed_psum"
            place = f"hierarchy: variable CGX_{level}_COMMUNICATOR_TYPE"
            raise unexpected(place, f"{expected} between processes", f"NCCL, {used}")
    node = ranks.Split_type(MPI.COMM_TYPE_SHARED, ranks.rank) if inner is None else inner
    places = ranks.allgather((node.bcast(ranks.rank), node.rank))
    if inner is None:
        node.Free()
    made: dict[Any, Net] = ranks.Get_attr(_NODES) or {}
    key = (*variables, *places)
    if key not in made:
        made[key] = _make(ranks, env, places)
        for net in _distinct(made[key]):
            watch(net)
        ranks.Set_attr(_NODES, made)
    return made[key]


def _environment(comm: Communicator) -> tuple[environment.Environment, Iterable[tuple[str, str]]]:
    """Returns CGX's variables, parsed and as text. Every rank raises if one is invalid, or if ranks have others."""
    text = {f"variable {name}": value for name, value in sorted(os.environ.items()) if name.startswith("CGX_")}
    env = error = None
    try:
        env = environment.read(op="hierarchy")
    except ValueError as bad:
        error = str(bad)
    every = comm.allgather((text, error))
    for rank, (_, error) in enumerate(every):
        if error:
            raise ValueError(f"{error}, on rank {rank}")
    compare("hierarchy", [text for text, _ in every])
    assert env is not None  # otherwise this rank has raised an error
    return env, text.items()


def _make(comm: Communicator, env: environment.Environment, places: Sequence[tuple[int, int]]) -> Net:
    """Makes the hierarchy. `places` has for each rank the first rank of its node, and its own rank there."""
    firsts, (_, place) = [first for first, _ in places], places[comm.rank]
    nodes = sorted(set(firsts))
    sizes = [firsts.count(first) for first in nodes]
    if len(set(sizes)) > 1:
        remedy = "pass the communicator itself, without a hierarchy, or start as many everywhere"
        raise wrong("hierarchy", "comm", "as many ranks on every node", ", ".join(map(str, sizes)), remedy)
    number = nodes.index(firsts[comm.rank])
    cross, inner = Comm.over(comm.Split(place, number)), _within(comm, env, comm.Split(number, place))
    everybody = inner if len(nodes) == 1 else Comm.over(comm.Split(0, number * sizes[0] + place))
    return dataclasses.replace(everybody, cross=cross, inner=inner)


def _distinct(nodes: Net) -> Iterable[Net]:
    return {net.handle: net for net in (nodes, *nodes.parts.values())}.values()


def _within(comm: Communicator, env: environment.Environment, inner: Communicator) -> Net:
    """Makes the transport over the ranks of a node: shared memory or MPI, the same on all nodes of `comm`."""
    if inner.size == 1 or env.inner_communicator == "MPI":
        return Comm.over(inner)
    wanted = env.inner_communicator == "SHM"
    # Shared memory has not run with GPUs, so they use it only if SHM is set.
    if not wanted and set(comm.allgather(jax.default_backend())) != {"cpu"}:
        return Comm.over(inner)
    shared = error = None
    try:
        shared = SharedMemory.over(inner)
    except RuntimeError as failed:
        error = str(failed)
    errors = [found for found in comm.allgather(error) if found]
    if shared and not errors:
        return shared
    if wanted:
        raise RuntimeError(
            f"hierarchy: {errors[0]}; set CGX_INNER_COMMUNICATOR_TYPE=MPI, and MPI moves the bytes within a node"
        )
    if shared:
        shared.close()
    return Comm.over(inner)


# Calls


def enter(op: str, comm: Communicator | Net, arrays: Mapping[str, PyTree], settings: Mapping[str, object]) -> Net:
    """Returns the transport over a communicator, and lets the ranks compare their arguments when the program runs.

    With `jaxcgx.mpi.CHECK`, they also do so now. They compare the types of `arrays`, {argument: tree}, and the values
    of `settings`, {argument: value}, in a call of the function `op`.
    """
    given = comm if isinstance(comm, Net) else as_communicator(op, "axis_name", comm)
    users = given.comm if isinstance(given, Net) else given
    check_ready(op, users)
    mine = describe(op, arrays, settings)
    if mpi.CHECK:  # before the ranks meet, which waits longer
        agree(users, mine)
    net = given if isinstance(given, Net) else over(op, given)
    _check_one_device(op, arrays)
    greet(mine, net)
    return net


def _check_one_device(op: str, arrays: Mapping[str, PyTree]) -> None:
    mesh = jax.sharding.get_abstract_mesh()
    given = [x for x in jax.tree.leaves(dict(arrays)) if isinstance(x, jax.Array) and not isinstance(x, Tracer)]
    devices = {device for x in given for device in x.devices()}
    if (count := max(len(devices), 1 if mesh.empty else mesh.size)) > 1:
        remedy = "start a process for each device, or use a mesh, and the name of its axis in place of a communicator"
        raise wrong(op, "x", "arrays on the one device that a rank computes on", f"{count} devices", remedy)


def broadcast(x: PyTree, root: int = 0, comm: Communicator | Net | None = None) -> PyTree:
    """Returns the `x` of rank `root` on every rank, bit for bit. Use it for parameters before the first step.

    Args:
      x: a pytree of arrays of any dtype, including random keys.
      root: a rank.
      comm: the ranks, MPI.COMM_WORLD by default.
    """
    name = "broadcast"
    net = enter(name, MPI.COMM_WORLD if comm is None else comm, dict(x=x), dict(root=root))
    root = check_integer(name, "root", root)
    if not 0 <= root < net.size:
        raise wrong(name, "root", f"a rank from 0 to {net.size - 1}", root)

    def one(path: PyTree, leaf: PyTree) -> jax.Array:
        leaf = as_whole(name, "x", path, leaf)
        if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return net.broadcast(leaf, root)
        data = net.broadcast(jax.random.key_data(leaf), root)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))

    return jax.tree.map_with_path(one, x)
