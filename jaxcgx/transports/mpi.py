"""Ranks of an MPI communicator, one process each: mpi4jax moves the bytes.

mpi4jax chains its operations by an ordered effect: they run in the order of the program, which must be the same on
every rank. A primitive that contains such an operation declares the effect (`effects`), and a program with it runs on a
single device.

mpi4jax's operations have no rules for vmap, and their derivatives differ from lax's. They take no floats shorter than
32 bits and no integers shorter than 8 bits. So the operations that exchanges use are wrapped in primitives that are
linear in one array.

Ranks and sizes are Python ints, not traced arrays: every rank compiles its own program.
"""

import dataclasses
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from mpi4py import MPI

from jaxcgx import _compat
from jaxcgx._compat import ad, batching, mlir
from jaxcgx.checks import unexpected
from jaxcgx.native.eager import define_impl
from jaxcgx.transports import base
from jaxcgx.transports.base import Transport, countable
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
class Comm(Transport):
    """The ranks of a communicator. transports/base.py documents the members of a transport."""

    handle: int  # MPI's handle of a communicator that nothing else uses
    size: int
    rank: int

    names: ClassVar[tuple[Any, ...]] = ()
    effects: ClassVar[frozenset[Any]] = EFFECTS

    @classmethod
    def over(cls, comm: Any) -> "Comm":
        """Returns the transport over an mpi4py communicator that nothing else uses."""
        return cls(comm.handle, comm.size, comm.rank)

    @property
    def comm(self) -> Any:
        return MPI.Intracomm.fromhandle(self.handle)

    def all_to_all(self, rows: jax.Array) -> jax.Array:
        return all_to_all_p.bind(rows, net=self)

    def all_gather(self, row: jax.Array) -> jax.Array:
        return all_gather_p.bind(row, net=self)

    def shift(self, row: jax.Array) -> jax.Array:
        _check_count(row.size)
        return mpi4jax.sendrecv(row, row, (self.rank - 1) % self.size, (self.rank + 1) % self.size, comm=self.comm)

    def broadcast(self, x: jax.Array, root: int) -> jax.Array:
        """Returns the array of rank `root`."""
        return broadcast_p.bind(x, net=self, root=root)

    def plain_psum(self, x: jax.Array) -> jax.Array:
        return psum_p.bind(countable(x), net=self)


@dataclasses.dataclass(frozen=True)
class Shared(Shm):
    """The ranks of a communicator within a host. Shared memory moves the bytes.

    Exchanges through shared memory and exchanges of MPI share one order.
    """

    handle: int

    @classmethod
    def over(cls, comm: Any, timeout: float = 1800.0, order: Any = ORDER) -> "Shared":
        return cls(**vars(Shm.over(comm, timeout, order)), handle=comm.handle)

    @property
    def comm(self) -> Any:
        return MPI.Intracomm.fromhandle(self.handle)


@dataclasses.dataclass(frozen=True)
class Nodes(Transport):
    """The ranks of nodes of equal size, in the order of the nodes.

    Attributes:
      everybody: all ranks; the same as `inner` if there is only one node.
      cross: the ranks that have the same place in their nodes as this rank.
      inner: the ranks of this rank's node.
    """

    everybody: Comm | Shared
    cross: Comm
    inner: Comm | Shared

    names: ClassVar[tuple[Any, ...]] = ()
    effects: ClassVar[frozenset[Any]] = EFFECTS

    def labelled(self, label: int) -> "Nodes":
        parts = {part: getattr(self, part).labelled(label) for part in ("everybody", "cross", "inner")}
        return dataclasses.replace(self, **parts)

    @property
    def size(self) -> int:
        return self.everybody.size

    @property
    def rank(self) -> int:
        return self.everybody.rank

    @property
    def comm(self) -> Any:
        return self.everybody.comm

    def all_to_all(self, rows: jax.Array) -> jax.Array:
        return self.everybody.all_to_all(rows)

    def all_gather(self, row: jax.Array) -> jax.Array:
        return self.everybody.all_gather(row)

    def shift(self, row: jax.Array) -> jax.Array:
        return self.everybody.shift(row)

    def broadcast(self, x: jax.Array, root: int) -> jax.Array:
        """Returns the array of rank `root`."""
        return self.everybody.broadcast(x, root)

    def plain_psum(self, x: jax.Array) -> jax.Array:
        return self.everybody.plain_psum(x)

    @property
    def parts(self) -> Mapping[Any, Comm | Shared]:
        return {"cross": self.cross, "inner": self.inner}

    def leaders(self) -> "Leaders":
        return Leaders(self.cross, self.inner)


Net = Comm | Nodes | Shared


class Leaders(base.Leaders):
    """The first ranks of the nodes.

    Only they exchange. The other ranks take part only in the last step, in which their leader gives them its result.
    """

    cross: Comm
    inner: "Comm | Shared"
    size: int
    rank: int
    speaks: bool

    def __init__(self, cross: Comm, inner: Comm | Shared) -> None:
        self.cross, self.inner = cross, inner
        self.size, self.rank = cross.size, cross.rank
        self.speaks = inner.rank == 0

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


def _short(dtype: Any, kind: Any, bits: int) -> bool:
    """Returns whether a dtype is of this kind and has fewer bits."""
    return jnp.issubdtype(dtype, kind) and (jnp.finfo if kind is jnp.floating else jnp.iinfo)(dtype).bits < bits


def _of_any_dtype(move: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Extends `move`, which only moves elements, to arrays of any dtype."""

    def run(x: jax.Array, **params: Any) -> jax.Array:
        if _short(x.dtype, jnp.floating, 32):
            bits = lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}")
            return lax.bitcast_convert_type(move(bits, **params), x.dtype)
        if _short(x.dtype, jnp.integer, 8):
            return move(x.astype(jnp.int8), **params).astype(x.dtype)
        return move(x, **params)

    return run


def _define(
    name: str,
    run: Callable[..., jax.Array],
    shape: Callable[[tuple[int, ...], Comm], tuple[int, ...]],
    transpose: Callable[..., jax.Array],
    before: int = 0,
    after: int = 0,
) -> Any:
    """Returns a primitive that is linear in one array.

    Args:
      name: the end of the primitive's name.
      run: run(x, net, ...) computes the result.
      shape: shape(shape of x, net) returns the shape of the result.
      transpose: transpose(cotangent, net, ...) returns the cotangent of x.
      before: the position of vmap's dimension in x.
      after: the position of vmap's dimension in the result.
    """
    primitive = _compat.Primitive(f"jaxcgx_mpi_{name}")
    define_impl(primitive)
    mlir.register_lowering(primitive, mlir.lower_fun(run, multiple_results=False))

    def abstract(x: Any, *, net: Comm, **params: Any) -> tuple[Any, frozenset[Any]]:
        return _compat.result_aval([x], shape(x.shape, net), x.dtype), EFFECTS

    primitive.def_effectful_abstract_eval(abstract)

    def batched(operands: Sequence[Any], dims: Sequence[Any], **params: Any) -> tuple[jax.Array, int]:
        return primitive.bind(jnp.moveaxis(operands[0], dims[0], before), **params), after

    batching.primitive_batchers[primitive] = batched
    ad.deflinear2(primitive, lambda ct, x, **params: [transpose(ct, **params)])
    return primitive


# psum: every rank has its own cotangent of the result, and their sum is the operand's cotangent. lax does the same if
# it doesn't track which values vary.


def _psum(x: jax.Array, net: Comm) -> jax.Array:
    if net.size == 1:
        return x
    _check_count(x.size)
    dtype = x.dtype
    if _short(dtype, jnp.floating, 32):
        dtype = jnp.float32
    elif _short(dtype, jnp.integer, 8):
        dtype = jnp.int8
    return mpi4jax.allreduce(x.astype(dtype), MPI.SUM, comm=net.comm).astype(x.dtype)


psum_p: Any = _define("psum", _psum, shape=lambda shape, net: shape, transpose=lambda ct, net: net.plain_psum(ct))


# all_to_all: row r came from rank r, so its cotangent goes back to rank r.


@_of_any_dtype
def _all_to_all(x: jax.Array, net: Comm) -> jax.Array:
    _check_count(x.size // net.size)
    return mpi4jax.alltoall(x, comm=net.comm)


all_to_all_p: Any = _define(
    "all_to_all",
    _all_to_all,
    shape=lambda shape, net: shape,
    transpose=lambda ct, net: net.all_to_all(ct),
    before=1,
    after=1,
)


# all_gather: every rank has rank r's array in row r, so rank r adds up the cotangents of row r of all ranks.


@_of_any_dtype
def _all_gather(x: jax.Array, net: Comm) -> jax.Array:
    _check_count(x.size)
    return mpi4jax.allgather(x, comm=net.comm)


all_gather_p: Any = _define(
    "all_gather",
    _all_gather,
    shape=lambda shape, net: (net.size, *shape),
    transpose=lambda ct, net: net.all_to_all(ct).sum(0),
    after=1,
)


# broadcast: every rank has the root's array, so the root's cotangent is the sum over all ranks. The cotangents of the
# other ranks' arrays are 0.


@_of_any_dtype
def _broadcast(x: jax.Array, net: Comm, root: int) -> jax.Array:
    _check_count(x.size)
    return mpi4jax.bcast(x, root, comm=net.comm)


def _broadcast_transpose(ct: jax.Array, net: Comm, root: int) -> jax.Array:
    total = net.plain_psum(ct)
    return total if net.rank == root else jnp.zeros_like(total)


broadcast_p: Any = _define("broadcast", _broadcast, shape=lambda shape, net: shape, transpose=_broadcast_transpose)
