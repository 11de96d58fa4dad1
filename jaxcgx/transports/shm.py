"""Ranks that are processes of one host: they copy through shared memory, as xla_ffi/shm/ring.h describes.

Exchanges run in the order of the program, which must be the same on every rank.
"""

import dataclasses
import os
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxcgx import _compat
from jaxcgx.checks import check_number
from jaxcgx.native.processes import define, exchange
from jaxcgx.native.registration import at_exit, has_cuda, module
from jaxcgx.native.rules import add, digest, refuse, refuse_gpus
from jaxcgx.transports.base import ProcessRanks, countable

ORDER: Any = _compat.OrderedEffect()
OPERATIONS = ("all_to_all", "all_gather", "shift", "broadcast")  # as xla_ffi/shm/ring.h numbers them


def _together(comm: Any, step: Callable[[], Any]) -> list[Any]:
    """Returns the results of `step` on all ranks. If it fails on one rank, every rank raises an error."""
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
class Shm(ProcessRanks):
    """The processes of a communicator. transports/base.py documents the members of a transport."""

    segment: int  # the native module's number for the shared memory
    size: int
    rank: int
    order: Any  # the ordered effect, shared by everything that must run in one order
    label: int = dataclasses.field(default=0, kw_only=True)
    primitive: ClassVar[_compat.Primitive] = define("jaxcgx_exchange")

    # comm: Any, because type checkers can't rely on mpi4py's types, and other communicators fit too.
    @classmethod
    def over(cls, comm: Any, timeout: float = 1800.0, order: Any = ORDER) -> "Shm":
        """Returns the transport over the ranks of a communicator. All ranks call it together.

        Args:
          comm: an mpi4py communicator, or any object with the same rank, size and allgather.
          timeout: the seconds that one wait for another rank may take.
          order: the ordered effect of the exchanges. If the program also has other exchanges with an ordered effect,
            pass their effect. With two effects, there are two separate orders, and two ranks may wait for each other.
        """
        check_number("Shm.over", "timeout", timeout, lambda x: 0 < x < 1e9, "a positive number of seconds")

        # shm_attach waits for all ranks. The steps before it raise an error if a rank can't attach.
        def process_that_can() -> int:
            module().shm_detach(module().shm_attach(module().shm_create(1), 0, [os.getpid()], timeout))
            return os.getpid()

        processes = _together(comm, process_that_can)
        name = _together(comm, lambda: module().shm_create(comm.size) if comm.rank == 0 else None)[0]
        process, file, _ = name.split(":")
        try:
            _together(comm, lambda: os.close(os.open(f"/proc/{process}/fd/{file}", os.O_RDWR)))
        except RuntimeError:
            if comm.rank == 0:  # shm_attach, which closes it, isn't reached
                os.close(int(file))
            raise
        segments = _together(comm, lambda: module().shm_attach(name, comm.rank, processes, timeout))
        at_exit(module().shm_leave)
        return cls(segments[comm.rank], comm.size, comm.rank, order)

    @property
    def effects(self) -> frozenset[Any]:
        return _compat.effects_in_order(self.order)

    def close(self) -> None:
        """Leaves the other ranks. The end of the process does the same."""
        module().shm_detach(self.segment)

    def labelled(self, label: int) -> "Shm":
        return dataclasses.replace(self, label=label)

    def lower(self, ctx: Any, x: Any, operation: str, argument: int) -> Any:
        platforms = ctx.module_context.platforms
        if platforms not in (("cpu",), ("cuda",)):
            return refuse("jaxcgx_exchange: it is for CPUs and NVIDIA's GPUs; the computation is placed elsewhere")(ctx)
        if platforms == ("cuda",) and not has_cuda():
            return refuse_gpus("exchange")(ctx)
        return _compat.lower_ordered("jaxcgx_exchange", self.order)(
            ctx,
            x,
            segment=np.int64(self.segment),
            operation=np.int64(OPERATIONS.index(operation)),
            argument=np.int64(argument),
            digest=digest(ctx.avals_in[0].shape, ctx.avals_in[0].dtype, self.label),
        )

    def shift(self, row: jax.Array) -> jax.Array:
        return exchange("shift", row, self, argument=1 % self.size)

    def plain_psum(self, x: jax.Array) -> jax.Array:
        """Returns the sum, added in rank order. Every rank adds up one part of the array."""
        flat = jnp.ravel(countable(x))
        parts = jnp.pad(flat, (0, -x.size % self.size)).reshape(self.size, -1)
        return self.all_gather(add(self.all_to_all(parts))).ravel()[: x.size].reshape(x.shape)
