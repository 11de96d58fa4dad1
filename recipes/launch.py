"""The ranks of a run: devices of this process, of processes that jax.distributed joins, or mpirun's processes."""

import os
from typing import Any, NamedTuple

import jax
import numpy as np
from checks import Wrong
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxcgx as cgx

MPIRUN = "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MPI_LOCALNRANKS"  # Open MPI's, and MPICH's


class World(NamedTuple):
    """All ranks, and those of this process."""

    ranks: int
    first: int  # of this process
    here: int  # number of ranks of this process
    mesh: Mesh | None  # of all ranks; None over MPI
    comm: Any  # the communicator over MPI

    @property
    def data_axis(self) -> Any:
        """What make_train_step is told."""
        return "data" if self.comm is None else self.comm

    @property
    def speaks(self) -> bool:
        """Whether this process writes logs and files."""
        return self.first == 0

    def share(self, batch_size: int) -> slice:
        """The examples of a batch that are this process's. Each rank has as many: a few may be left out."""
        each = batch_size // self.ranks
        if not each:
            raise Wrong(f"config.train.batch_size: expected at least one example for each of {self.ranks} ranks")
        return slice(self.first * each, (self.first + self.here) * each)

    def put(self, batch: Any) -> Any:
        """A batch of which this process has its share, where a step wants it."""
        if self.mesh is None:
            return batch
        sharding = NamedSharding(self.mesh, P("data"))
        return jax.tree.map(lambda x: jax.make_array_from_process_local_data(sharding, x), batch)

    def total(self, sums: jax.Array) -> np.ndarray:
        """The sum over all ranks of what a program computed from `put`'s arrays."""
        return np.asarray(sums) if self.comm is None else self.comm.allreduce(np.asarray(sums))

    def all(self, holds: bool) -> bool:
        """Whether something holds in every process."""
        if self.comm is not None:
            return all(self.comm.allgather(holds))
        return bool(np.all(multihost_utils.process_allgather(np.array(holds))))


def start(how: str, devices: int) -> World:
    """The world that this process belongs to.

    Args:
      how: "local", "mpi", "distributed", or "auto", which looks at the environment.
      devices: the number of virtual devices of a local world, where there are no others.
    """
    cgx.keep_pages()
    if how == "auto":
        distributed = "JAX_COORDINATOR_ADDRESS" in os.environ or int(os.environ.get("SLURM_STEP_NUM_TASKS", 1)) > 1
        how = "mpi" if set(MPIRUN) & set(os.environ) else "distributed" if distributed else "local"
    if how == "mpi":
        jax.config.update("jax_platforms", "cpu")
        try:
            from mpi4py import MPI
        except ImportError:
            raise Wrong('--launch: mpirun needs the extra `mpi`; pip install ".[mpi]"') from None
        return over_mpi(MPI.COMM_WORLD)
    if how == "distributed":
        # Slurm and mpirun say these numbers themselves.
        number = lambda name: int(os.environ[name]) if name in os.environ else None
        jax.distributed.initialize(num_processes=number("JAX_NUM_PROCESSES"), process_id=number("JAX_PROCESS_ID"))
        return over_devices(jax.devices())
    if devices < 1:
        raise Wrong(f"--devices: expected a positive number, got {devices}")
    jax.config.update("jax_num_cpu_devices", devices)
    return over_devices(jax.devices())


def over_devices(devices: list[Any]) -> World:
    """The world of these devices, of one or several processes."""
    mine = [i for i, device in enumerate(devices) if device.process_index == jax.process_index()]
    mesh = Mesh(np.array(devices), ("data",), axis_types=(AxisType.Auto,))
    return World(len(devices), mine[0], len(mine), mesh, None)


def over_mpi(comm: Any) -> World:
    """The world of a communicator."""
    return World(comm.size, comm.rank, 1, None, comm)
