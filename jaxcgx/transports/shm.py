"""Ranks that are processes of one host: they copy through memory that they share. xla_ffi/shm/ring.h says how.

Exchanges run in the order of the program, which must be the same on every rank. Ranks and sizes are Python's numbers,
not
traced ones: every rank compiles a program of its own, for one device.
"""

import dataclasses
import numbers
import os

import jax.numpy as jnp

from jaxcgx import _compat
from jaxcgx.native.registration import module
from jaxcgx.native.rows import add
from jaxcgx.native.shm import exchange
from jaxcgx.transports.base import Transport, countable

EFFECTS = frozenset({_compat.OrderedEffect()})


def _together(comm, step):
    """What `step` returns on each rank; an error of one is an error of all."""
    try:
        mine = step()
    except (OSError, RuntimeError) as error:
        mine = error
    every = comm.allgather(mine)
    for rank, found in enumerate(every):
        if isinstance(found, Exception):
            raise RuntimeError(f"Shm.over: rank {rank}: {found}")
    return every


@dataclasses.dataclass(frozen=True)
class Shm(Transport):
    """The processes of a communicator. transports/xla.py says what a transport has."""

    segment: int  # the native module's number
    size: int
    rank: int
    names = ()
    effects: frozenset  # one effect, of everything that must run in one order

    @classmethod
    def over(cls, comm, timeout=1800.0, effects=EFFECTS):
        """The ranks of an mpi4py communicator, or of anything with a rank, a size and an allgather like one's. They
        call it together.

        timeout: seconds, of every wait for another rank. effects: if a program waits for other ranks in another way
        too, its
        effect: two orders, each kept, may still have two ranks wait for each other.
        """
        if isinstance(timeout, bool) or not isinstance(timeout, numbers.Real) or not 0 < timeout < 1e9:
            raise ValueError(f"Shm.over: argument 'timeout': expected a positive number of seconds, got {timeout!r}")
        # Whoever attaches waits for all: what one rank can't do is found out before.
        _together(comm, lambda: module().shm_detach(module().shm_attach(module().shm_create(1), 0, 1, timeout)))
        name = _together(comm, lambda: module().shm_create(comm.size) if comm.rank == 0 else None)[0]
        process, file, _ = name.split(":")
        _together(comm, lambda: os.close(os.open(f"/proc/{process}/fd/{file}", os.O_RDWR)))
        segments = _together(comm, lambda: module().shm_attach(name, comm.rank, comm.size, timeout))
        return cls(segments[comm.rank], comm.size, comm.rank, effects)

    def close(self):
        """Leaves the other ranks. Without it the end of the process does."""
        module().shm_detach(self.segment)

    def all_to_all(self, x):
        """Row r goes to rank r; row r of the result came from rank r."""
        return exchange("all_to_all", x, self)

    def all_gather(self, x):
        """Every rank's x, in rank order."""
        return exchange("all_gather", x, self)

    def shift(self, x):
        """x of the rank before; the last rank's for the first."""
        return exchange("shift", x, self, 1 % self.size)

    def broadcast(self, x, root):
        """x of the rank `root`."""
        return exchange("broadcast", x, self, root)

    def plain_psum(self, x):
        """In rank order; every rank adds up a part."""
        flat = jnp.ravel(countable(x))
        parts = jnp.pad(flat, (0, -x.size % self.size)).reshape(self.size, -1)
        return self.all_gather(add(self.all_to_all(parts))).ravel()[: x.size].reshape(x.shape)
