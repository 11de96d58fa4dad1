"""Ranks of an MPI communicator, one process each: mpi4jax moves the bytes.

mpi4jax chains its operations by an ordered effect: they run in the order of the program, which must be the same on
every rank.

mpi4jax's operations have no rules for vmap, and their derivatives differ from lax's. They take no floats shorter than
32 bits. So exchanges are a primitive of jaxcgx, which is lowered to these operations.
"""

import dataclasses
import functools
import warnings
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from mpi4py import MPI

from jaxcgx import _compat
from jaxcgx.checks import unexpected
from jaxcgx.native.processes import define, exchange
from jaxcgx.transports.base import Leaders, Pairs, ProcessRanks, countable
from jaxcgx.transports.shm import Shm

# A release of mpi4jax warns about every JAX newer than itself. jaxcgx has its own bounds for JAX.
with warnings.catch_warnings():
    warnings.filterwarnings("ignore", "\nThe latest supported JAX version", UserWarning)
    import mpi4jax

(ORDER,) = jax.make_jaxpr(lambda: mpi4jax.barrier(comm=MPI.COMM_SELF))().effects
EFFECTS: frozenset[Any] = _compat.effects_in_order(ORDER)
for _effect in EFFECTS:
    _compat.remat_allowed_effects.add_type(type(_effect))
MOST = 2**31 - 1  # the most elements, because mpi4jax counts them in C's int


# Communicators are Any: type checkers can't rely on mpi4py's types.


@dataclasses.dataclass(frozen=True)
class _Ranks(ProcessRanks):
    """The ranks of a communicator. transports/base.py documents the members of a transport."""

    handle: int = dataclasses.field(kw_only=True)  # MPI's handle of a communicator that nothing else uses
    # The ranks that have the same place in their nodes as this rank. None: nodes don't matter. Otherwise, all nodes are
    # of equal size, and the ranks are in the order of the nodes.
    cross: "Comm | None" = dataclasses.field(default=None, kw_only=True)
    inner: "Net | None" = dataclasses.field(default=None, kw_only=True)  # then, the ranks of this rank's node

    @property
    def comm(self) -> Any:
        return MPI.Intracomm.fromhandle(self.handle)

    @property
    def parts(self) -> Mapping[Any, "Net"]:
        return {"cross": self.cross, "inner": self.inner} if self.cross and self.inner else {}

    def labelled(self, label: int) -> Any:
        parts = {name: part.labelled(label) for name, part in self.parts.items()}
        return dataclasses.replace(super().labelled(label), **parts)

    def leaders(self) -> "NodeLeaders":
        return NodeLeaders(**self.parts)


@dataclasses.dataclass(frozen=True)
class Comm(_Ranks):
    """The ranks of a communicator, among which MPI moves the bytes."""

    size: int
    rank: int

    effects: ClassVar[frozenset[Any]] = EFFECTS
    primitive: ClassVar[_compat.Primitive] = define("jaxcgx_mpi")

    @classmethod
    def over(cls, comm: Any) -> "Comm":
        """Returns the transport over an mpi4py communicator that nothing else uses."""
        return cls(comm.size, comm.rank, handle=comm.handle)

    def lower(self, ctx: Any, x: Any, operation: str, argument: Any) -> Any:
        run = functools.partial(_run, operation=operation, net=self, argument=argument)
        return _compat.mlir.lower_fun(run, multiple_results=False)(ctx, x)

    def permute(self, row: jax.Array, pairs: Pairs) -> jax.Array:
        return exchange("permute", row, self, argument=tuple(pairs))

    def plain_psum(self, x: jax.Array) -> jax.Array:
        return exchange("psum", countable(x), self)


@dataclasses.dataclass(frozen=True)
class SharedMemory(_Ranks, Shm):
    """The ranks of a communicator within a host. Exchanges through shared memory and of MPI share one order."""

    @classmethod
    def over(cls, comm: Any, timeout: float = 1800.0, order: Any = ORDER) -> "SharedMemory":
        return cls(**vars(Shm.over(comm, timeout, order)), handle=comm.handle)


Net = Comm | SharedMemory


class NodeLeaders(Leaders):
    """The first ranks of the nodes."""

    # Only they exchange. The other ranks take part only in the last step, in which their leader gives them its result.
    def __init__(self, cross: Net, inner: Net) -> None:
        self.cross: Net = cross
        self.inner: Net = inner
        self.size: int = cross.size
        self.rank: int = cross.rank
        self.speaks: bool = inner.rank == 0

    def all_to_all(self, rows: jax.Array) -> jax.Array:
        return self.cross.all_to_all(rows) if self.speaks else rows

    def all_gather(self, row: jax.Array) -> jax.Array:
        # The other ranks' rows aren't used. But they depend on the row, so that vmap adds its dimension on every rank.
        rows = self.cross.all_gather(row) if self.speaks else jnp.broadcast_to(row, (self.size, *row.shape))
        return self.inner.broadcast(rows, 0)

    def shift(self, row: jax.Array) -> jax.Array:
        return self.cross.shift(row) if self.speaks else row

    def plain_psum(self, x: jax.Array) -> jax.Array:
        return self.cross.plain_psum(x)


def _check_count(count: int) -> None:
    if count > MOST:
        expected = "at most 2^31 - 1 elements for each rank in one exchange"
        raise unexpected("jaxcgx.mpi", expected, count, "cut the leaf into several")


def _run(x: jax.Array, operation: str, net: Comm, argument: Any) -> jax.Array:
    short = jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize < 4
    if operation == "psum":
        if net.size == 1:
            return x
        _check_count(x.size)
        return mpi4jax.allreduce(x.astype(jnp.float32) if short else x, MPI.SUM, comm=net.comm).astype(x.dtype)
    if short:  # the others only move elements
        bits = jax.lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}")
        return jax.lax.bitcast_convert_type(_run(bits, operation, net, argument), x.dtype)
    _check_count(x.size // net.size if operation == "all_to_all" else x.size)
    if operation == "all_to_all":
        return mpi4jax.alltoall(x, comm=net.comm)
    if operation == "all_gather":
        return mpi4jax.allgather(x, comm=net.comm)
    if operation == "permute":
        target = dict(argument).get(net.rank, MPI.PROC_NULL)
        source = {receiver: sender for sender, receiver in argument}.get(net.rank, MPI.PROC_NULL)
        return mpi4jax.sendrecv(x, x, source, target, comm=net.comm)
    return mpi4jax.bcast(x, argument, comm=net.comm)
