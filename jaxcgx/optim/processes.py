"""The processes of an MPI communicator as the ranks of a step. Each process computes alone, on its own device.

Importing this module starts MPI.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxcgx.mpi import broadcast, functions
from jaxcgx.checks import wrong
from jaxcgx.codecs.raw import Raw
from jaxcgx.collectives.state import State
from jaxcgx.mpi.nodes import check_communicator
from jaxcgx.mpi.ranks import over
from jaxcgx.mpi.waiting import check_ready
from jaxcgx.optim.ranks import Rows
from jaxcgx.transports.mpi import Net, Nodes


@dataclasses.dataclass(frozen=True)
class Processes:
    """The ranks of a communicator or a hierarchy. `jaxcgx.optim.ranks.Ranks` documents the members."""

    function: str
    comm: Any

    @classmethod
    def over(cls, function: str, comm: Any, argument: str) -> "Processes":
        """Returns the processes of a checked communicator."""
        return cls(function, comm if isinstance(comm, Net) else check_communicator(function, argument, comm))

    @property
    def levels(self) -> tuple[str, ...]:
        return tuple(self.comm.parts) if isinstance(self.comm, Nodes) else ()

    @property
    def remedy(self) -> str:
        return "a process has the row of its own rank alone: take it, or let jaxcgx.restore_state do so"

    def net(self) -> Net:
        if isinstance(self.comm, Net):
            return self.comm
        check_ready(self.function, self.comm)
        return over(self.function, self.comm)

    def rows(self, axis_size: int | None) -> Rows:
        if axis_size is not None:
            expected = f"none, as the communicator says that there are {self.comm.size} ranks"
            raise wrong(self.function, "axis_size", expected, axis_size, "leave it out")
        return Rows(1, frozenset(), False)

    def numbers(self, count: int | None) -> jax.Array:
        return jnp.array([self.net().rank])

    def first(self, x: Any) -> Any:
        return broadcast(x, comm=self.comm)

    def compressed_pmean(
        self, x: Any, plan: Any, state: State, order: None = None, slice_elements: None = None, **options: Any
    ) -> Any:
        return functions.compressed_allreduce(x, plan, self.comm, op="mean", **state._asdict(), **options)

    def pmean(self, x: Any) -> Any:
        return functions.compressed_allreduce(x, Raw(), self.comm, op="mean")

    def value_and_grad(self, objective: Callable[..., Any]) -> Callable[..., Any]:
        return jax.value_and_grad(objective, has_aux=True)
