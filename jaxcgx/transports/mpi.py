"""Ranks of an MPI communicator, one process each: mpi4jax moves the bytes.

mpi4jax chains its operations by an ordered effect: they run in the order of the program, which must be the same on
every
rank. A primitive that contains one says so (`effects`), and a program with one runs on a single device. Its operations
lack
rules for vmap, have other derivatives than lax's, and know no floats under 32 bits and no integers under 8; hence
primitives
around those in use, linear in one array.

Ranks and sizes are Python's numbers, not traced ones: every rank compiles a program of its own.
"""

import dataclasses
import warnings

import jax
import jax.numpy as jnp
from jax import lax
from mpi4py import MPI

from jaxcgx import _compat
from jaxcgx._compat import ad, batching, mlir
from jaxcgx.transports import base
from jaxcgx.transports.base import Transport, countable
from jaxcgx.transports.shm import Shm

with (
    warnings.catch_warnings()
):  # a release of mpi4jax warns of every JAX newer than itself; jaxcgx has bounds of its own for JAX
    warnings.filterwarnings("ignore", "\nThe latest supported JAX version", UserWarning)
    import mpi4jax

EFFECTS = frozenset(jax.make_jaxpr(lambda: mpi4jax.barrier(comm=MPI.COMM_SELF))().effects)
_compat.allow_in_remat(EFFECTS)
MOST = 2**31 - 1  # elements: mpi4jax counts in C's int
_OWN = MPI.Comm.Create_keyval()


@dataclasses.dataclass(frozen=True)
class Comm(Transport):
    """The ranks of a communicator. transports/xla.py says what a transport has."""

    handle: int  # MPI's, of a communicator that nobody else uses
    size: int
    rank: int

    names = ()
    effects = EFFECTS

    @classmethod
    def over(cls, comm):
        return cls(comm.handle, comm.size, comm.rank)

    @classmethod
    def of(cls, comm):
        """The ranks of an mpi4py communicator. What a program sends while Python is ahead of it must not meet what
        Python
        sends: the program has a duplicate, which the communicator keeps."""
        own = comm.Get_attr(_OWN)
        if own is None:
            own = comm.Dup()
            comm.Set_attr(_OWN, own)
        return cls.over(own)

    @property
    def comm(self):
        return MPI.Intracomm.fromhandle(self.handle)

    def all_to_all(self, x):
        """Row r goes to rank r; row r of the result came from rank r."""
        return all_to_all_p.bind(x, net=self)

    def all_gather(self, x):
        """Every rank's x, in rank order."""
        return all_gather_p.bind(x, net=self)

    def shift(self, x):
        """x of the rank before; the last rank's for the first."""
        _counted(x.size)
        return mpi4jax.sendrecv(x, x, (self.rank - 1) % self.size, (self.rank + 1) % self.size, comm=self.comm)

    def broadcast(self, x, root):
        """x of the rank `root`."""
        return broadcast_p.bind(x, net=self, root=root)

    def plain_psum(self, x):
        return psum_p.bind(countable(x), net=self)


@dataclasses.dataclass(frozen=True)
class Shared(Shm):
    """The ranks of a communicator within a host: their memory moves the bytes, in one order with what MPI moves."""

    handle: int

    @classmethod
    def over(cls, comm):
        return cls(**vars(Shm.over(comm, effects=EFFECTS)), handle=comm.handle)

    @property
    def comm(self):
        return MPI.Intracomm.fromhandle(self.handle)


@dataclasses.dataclass(frozen=True)
class Nodes(Transport):
    """The ranks of nodes with as many ranks each, those of the first node first."""

    everybody: Comm | Shared  # all ranks together; of one node its `inner`
    cross: Comm  # the ranks that have this one's place in their nodes
    inner: Comm | Shared  # the ranks of this node

    names = ()
    effects = EFFECTS

    @property
    def size(self):
        return self.everybody.size

    @property
    def rank(self):
        return self.everybody.rank

    @property
    def comm(self):
        return self.everybody.comm

    def all_to_all(self, x):
        return self.everybody.all_to_all(x)

    def all_gather(self, x):
        return self.everybody.all_gather(x)

    def shift(self, x):
        return self.everybody.shift(x)

    def broadcast(self, x, root):
        return self.everybody.broadcast(x, root)

    def plain_psum(self, x):
        return self.everybody.plain_psum(x)

    @property
    def parts(self):
        return {"cross": self.cross, "inner": self.inner}

    def leaders(self):
        return Leaders(self.cross, self.inner)


class Leaders(base.Leaders):
    """The first ranks of the nodes, which alone speak. The others run no part of an exchange but its last, in which
    their
    leader hands them what came."""

    def __init__(self, cross, inner):
        self.cross, self.inner, self.size, self.rank, self.speaks = (
            cross,
            inner,
            cross.size,
            cross.rank,
            inner.rank == 0,
        )

    def all_to_all(self, x):
        return self.cross.all_to_all(x) if self.speaks else x

    def all_gather(self, x):
        return self.inner.broadcast(
            self.cross.all_gather(x) if self.speaks else jnp.zeros((self.size, *x.shape), x.dtype), 0
        )

    def shift(self, x):
        return self.cross.shift(x) if self.speaks else x

    def plain_psum(self, x):
        return self.cross.plain_psum(x)


def _counted(count):
    if count > MOST:
        raise ValueError(
            f"jaxcgx.mpi: expected at most 2^31 - 1 elements for each rank in one exchange, got {count}; cut the leaf "
            "into several"
        )


def _short(dtype, kind, bits):
    return jnp.issubdtype(dtype, kind) and (jnp.finfo if kind is jnp.floating else jnp.iinfo)(dtype).bits < bits


def _moved(move):
    """`move`, which leaves elements as they are, of any dtype."""

    def run(x, **params):
        if _short(x.dtype, jnp.floating, 32):
            bits = lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}")
            return lax.bitcast_convert_type(move(bits, **params), x.dtype)
        if _short(x.dtype, jnp.integer, 8):
            return move(x.astype(jnp.int8), **params).astype(x.dtype)
        return move(x, **params)

    return run


def _define(name, run, shape, transpose, before=0, after=0):
    """A primitive, linear in one array. run(x, net, ...): what it does. shape(shape, net): of its result. before,
    after: where
    vmap's dimension stands in its operand and in its result. transpose(cotangent, net, ...): of the operand."""
    primitive = _compat.Primitive(f"jaxcgx_mpi_{name}")
    primitive.def_impl(jax.jit(primitive.bind, static_argnames=("net", "root")))
    mlir.register_lowering(primitive, mlir.lower_fun(run, multiple_results=False))

    def abstract(x, *, net, **params):
        return _compat.result_aval([x], shape(x.shape, net), x.dtype), EFFECTS

    primitive.def_effectful_abstract_eval(abstract)

    def batched(operands, dims, **params):
        return primitive.bind(jnp.moveaxis(operands[0], dims[0], before), **params), after

    batching.primitive_batchers[primitive] = batched
    ad.deflinear2(primitive, lambda ct, x, **params: [transpose(ct, **params)])
    return primitive


# psum: to the transpose each rank's cotangent is its own, so that their sum is the operand's (lax's where nothing is
# tracked)


def _psum(x, net):
    if net.size == 1:
        return x
    _counted(x.size)
    dtype = (
        jnp.float32 if _short(x.dtype, jnp.floating, 32) else jnp.int8 if _short(x.dtype, jnp.integer, 8) else x.dtype
    )
    return mpi4jax.allreduce(x.astype(dtype), MPI.SUM, comm=net.comm).astype(x.dtype)


psum_p = _define("psum", _psum, lambda shape, net: shape, lambda ct, net: net.plain_psum(ct))


# all_to_all: row r came from rank r, and its cotangent goes back there


@_moved
def _all_to_all(x, net):
    _counted(x.size // net.size)
    return mpi4jax.alltoall(x, comm=net.comm)


all_to_all_p = _define(
    "all_to_all", _all_to_all, lambda shape, net: shape, lambda ct, net: net.all_to_all(ct), before=1, after=1
)


# all_gather: rank r's array is in row r of every rank, whose cotangents for it r adds


@_moved
def _all_gather(x, net):
    _counted(x.size)
    return mpi4jax.allgather(x, comm=net.comm)


all_gather_p = _define(
    "all_gather", _all_gather, lambda shape, net: (net.size, *shape), lambda ct, net: net.all_to_all(ct).sum(0), after=1
)


# broadcast: every rank has the root's array, and only the root's has a cotangent, the sum of theirs


@_moved
def _broadcast(x, net, root):
    _counted(x.size)
    return mpi4jax.bcast(x, root, comm=net.comm)


def _broadcast_transpose(ct, net, root):
    total = net.plain_psum(ct)
    return total if net.rank == root else jnp.zeros_like(total)


broadcast_p = _define("broadcast", _broadcast, lambda shape, net: shape, _broadcast_transpose)
