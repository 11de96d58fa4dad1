"""The transports over a communicator, which live as long as it does.

Python may run ahead of a program, and its messages must not meet the program's. So exchanges use communicators of their
own. The user's communicator keeps them, and they are freed with it (`comm.Free()`).
"""

from collections.abc import Callable, Iterable
from typing import Any

import jax
from mpi4py import MPI

from jaxcgx.mpi.leave import forget, watch
from jaxcgx.mpi.waiting import Communicator, meet
from jaxcgx.transports.mpi import Comm, Shared


def keyval(parts: Callable[[Any], Iterable[Comm | Shared]]) -> int:
    """A key for attributes of communicators that keep transports. `parts` gives the transports of an attribute."""

    def free(comm: Communicator, key: int, kept: Any) -> None:
        if comm == MPI.COMM_WORLD:  # MPI ends, and frees everything
            return
        jax.effects_barrier()  # programs may still send
        for net in set(parts(kept)):
            forget(net)
            if isinstance(net, Shared):
                net.close()
            net.comm.Free()

    return MPI.Comm.Create_keyval(delete_fn=free)


_OWN = keyval(lambda kept: [kept])


def over(op: str, comm: Communicator) -> Comm:
    """The ranks of a communicator."""
    net: Comm | None = comm.Get_attr(_OWN)
    if net is None:
        own, request = comm.Idup()  # not Dup: ranks that come here in different orders would wait forever
        meet(op, comm, request)
        net = Comm.over(own)
        watch(net)
        comm.Set_attr(_OWN, net)
    return net
