"""Ranks that are processes of one host: they copy through memory that they share. xla_ffi/shm/ring.h says how.

Exchanges run in the order of the program, which must be the same on every rank. Ranks and sizes are Python's numbers, not
traced ones: every rank compiles a program of its own, for one device.
"""
import dataclasses
import numbers

import jax.numpy as jnp

from jaxcgx import _compat
from jaxcgx.native.shm import add, exchange, module
from jaxcgx.transports import rows

EFFECTS = frozenset({_compat.OrderedEffect()})


@dataclasses.dataclass(frozen=True)
class Shm:
    """The processes of a communicator. transports/xla.py says what a transport has."""

    segment: int  # the native module's number
    size: int
    rank: int
    effects: frozenset  # one effect, of everything that must run in one order

    names = ()

    @classmethod
    def over(cls, comm, timeout=1800.0, effects=EFFECTS):
        """The ranks of an mpi4py communicator, or of anything with a rank, a size and a bcast like one's. They call it together.

        timeout: seconds, of every wait for another rank. effects: if a program waits for other ranks in another way too, its
        effect: two orders, each kept, may still have two ranks wait for each other.
        """
        if isinstance(timeout, bool) or not isinstance(timeout, numbers.Real) or not 0 < timeout < 1e9:
            raise ValueError(f"Shm.over: argument 'timeout': expected a positive number of seconds, got {timeout!r}")
        native, name = module("Shm.over"), None
        if comm.rank == 0:
            try:
                name = native.shm_create(comm.size)
            except RuntimeError as error:
                name = error  # of every rank
        name = comm.bcast(name)
        try:
            if not isinstance(name, str):
                raise name
            return cls(native.shm_attach(name, comm.rank, comm.size, timeout), comm.size, comm.rank, effects)
        except RuntimeError as error:
            raise RuntimeError(f"Shm.over: {error}") from None

    def close(self):
        """Leaves the other ranks. Without it the end of the process does."""
        module("Shm.close").shm_detach(self.segment)

    @property
    def parts(self):
        return {}

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
        flat = jnp.ravel(x.astype(jnp.int32) if x.dtype == jnp.bool_ else x)
        parts = jnp.pad(flat, (0, -x.size % self.size)).reshape(self.size, -1)
        return self.all_gather(add(self.all_to_all(parts))).ravel()[: x.size].reshape(x.shape)

    def plain_pmean(self, x):
        return self.plain_psum(x) / self.size

    def plain_psum_scatter(self, x, scatter_dimension, tiled):
        return add(self.all_to_all(rows.split(x, scatter_dimension, self.size, tiled)))

    def plain_all_gather(self, x, axis, tiled, to):
        return rows.join(self.all_gather(x), axis, tiled)

    def plain_all_to_all(self, x, split_axis, concat_axis, tiled):
        return rows.join(self.all_to_all(rows.split(x, split_axis, self.size, tiled)), concat_axis, tiled)
