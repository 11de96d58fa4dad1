"""The transports over a communicator. They live as long as the communicator.

Python may run ahead of a compiled program, and its messages must not be mistaken for those of the program. So exchanges
use separate communicators. The user's communicator keeps these as attributes, and they are freed with it
(`comm.Free()`).
"""

from collections.abc import Callable, Iterable
from typing import Any

import jax
from mpi4py import MPI

from jaxcgx.mpi.leave import forget, watch
from jaxcgx.mpi.waiting import Communicator, meet
from jaxcgx.transports.mpi import Comm, Shared


def keyval(parts: Callable[[Any], Iterable[Comm | Shared]]) -> int:
    """Makes a key for communicator attributes that keep transports. `parts` returns an attribute's transports."""

    def free(comm: Communicator, key: int, kept: Any) -> None:
        if comm == MPI.COMM_WORLD:  # MPI is ending, and frees everything
            return
        jax.effects_barrier()  # running programs may still send
        for net in set(parts(kept)):
            forget(net)
            if isinstance(net, Shared):
                net.close()
            net.comm.Free()

    return MPI.Comm.Create_keyval(delete_fn=free)


_OWN = keyval(lambda kept: [kept])


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
