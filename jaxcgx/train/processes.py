"""The processes of an MPI communicator as the ranks of a step. Importing this module starts MPI."""

from typing import Any

from jaxcgx import mpi
from jaxcgx.mpi.agreement import check_ready
from jaxcgx.mpi.ranks import as_communicator, over
from jaxcgx.train.batch import OP
from jaxcgx.train.division import Division
from jaxcgx.train.state import Sharding
from jaxcgx.transports.axes import check_for_mesh
from jaxcgx.transports.mpi import Net
from jaxcgx.typing import PyTree


class Processes(Division):
    """The ranks of a communicator or a hierarchy. Each computes alone, on its own device."""

    def __init__(self, comm: Any, sharding: Sharding) -> None:
        for name, given in dict(params=sharding.params, optimizer=sharding.optimizer).items():
            check_for_mesh(OP, f"sharding.{name}", given, comm)
        super().__init__(lambda: net_over(OP, "mesh_or_comm", self.comm), sharding.batch)
        self.comm: Any = comm if isinstance(comm, Net) else as_communicator(OP, "mesh_or_comm", comm)

    def first(self, tree: PyTree) -> PyTree:
        return mpi.broadcast(tree, comm=self.comm)


def net_over(op: str, argument: str, comm: Any) -> Net:
    if isinstance(comm, Net):
        return comm
    comm = as_communicator(op, argument, comm)
    check_ready(op, comm)
    return over(op, comm)
