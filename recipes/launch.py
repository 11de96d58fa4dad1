"""The ranks of a run: devices of this process, devices of the processes of jax.distributed, or processes of mpirun."""

import contextlib
import os
import signal
from collections.abc import Generator
from typing import Any, NamedTuple, Self

import jax
import numpy as np
from checks import Wrong
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxcgx as cgx

LINE = 1000  # bytes of an error that other processes repeat, at most
MPIRUN = "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MPI_LOCALNRANKS"  # set by the mpirun of Open MPI and of MPICH


class World(NamedTuple):
    """All ranks of a run, and the ranks of this process."""

    ranks: int
    first: int  # first rank of this process
    here: int  # number of ranks of this process
    mesh: Mesh | None  # of all ranks; None over MPI
    comm: Any  # the MPI communicator; None without MPI
    nodes: Any = None  # over MPI: a hierarchy of nodes, over which a step sums; None: `comm`
    axes: tuple[str, ...] = ()  # of the nodes and of the ranks of a node; (): all ranks are on one axis

    @property
    def sharding(self) -> cgx.Sharding:
        return cgx.Sharding(self.axes if self.axes and self.mesh is not None else "data")

    @property
    def speaks(self) -> bool:
        """Whether this process writes logs and files."""
        return self.first == 0

    def share(self, batch_size: int) -> slice:
        """Returns the slice of a batch that belongs to this process.

        All ranks have the same number of examples, so a few examples of a batch may be left out.
        """
        each = batch_size // self.ranks
        if not each:
            raise Wrong(f"config.train.batch_size: expected at least one example for each of {self.ranks} ranks")
        return slice(self.first * each, (self.first + self.here) * each)

    def put(self, batch: Any) -> Any:
        """Returns this process's share of a batch as the argument that a step expects."""
        if self.mesh is None:
            return batch
        sharding = NamedSharding(self.mesh, P(self.sharding.axis))
        return jax.tree.map(lambda x: jax.make_array_from_process_local_data(sharding, x), batch)

    def total(self, sums: dict[str, jax.Array]) -> dict[str, np.ndarray]:
        """Returns the sums over all ranks of `sums`, which a program computed from the result of `put`."""
        own = {name: np.asarray(x) for name, x in sums.items()}
        return own if self.comm is None else {name: self.comm.allreduce(x) for name, x in own.items()}

    def mean(self, values: jax.Array) -> float:
        """Returns the mean of an array that a step returned, of which each rank may have a part."""
        return float(np.mean(multihost_utils.process_allgather(values, tiled=True), dtype=np.float64))

    def gather(self, value: Any) -> list[Any]:
        """Returns the `value` of each process, an integer or a list of them. All processes must call this method."""
        if self.comm is not None:
            return self.comm.allgather(value)
        return multihost_utils.process_allgather(np.array(value, np.int32)).tolist()

    def all(self, holds: bool) -> bool:
        """Returns whether `holds` is true in every process. All processes must call this method."""
        return all(self.gather(holds))

    @contextlib.contextmanager
    def together(self) -> Generator[None]:
        """Raises in all processes if one raises in this block, because the others would wait for it.

        This is for `Wrong` and OSError. All processes must enter the block. All say the same, because a launcher may
        end the others when one ends.
        """
        error: Exception | None = None
        try:
            yield
        except (Wrong, OSError) as found:
            error = found
        mine = (str(error) or repr(error) if error else "").encode()[:LINE]
        said = [bytes(row).rstrip(b"\0") for row in self.gather([*mine, *bytes(LINE - len(mine))])]
        if any(said):
            if jax.distributed.is_initialized():
                jax.distributed.shutdown()  # so that no process waits for another at its exit
            raise error or Wrong(next(filter(None, said)).decode(errors="replace"))


class Signals:
    """In a `with` block, signals that would end a process are noted, and all processes learn of them.

    A second signal ends a process at once, except SIGTERM with jax.distributed, which JAX keeps to itself. The signals
    are those of Ctrl-C (SIGINT), of Slurm and Kubernetes (SIGTERM), and one that mpirun passes on (SIGUSR1): on the
    others, mpirun kills its processes within a second.
    """

    NUMBERS = signal.SIGINT, signal.SIGTERM, signal.SIGUSR1

    def __init__(self, world: World) -> None:
        self._world, self._came, self._before, self._calls = world, False, {}, 0
        # In each process of jax.distributed, JAX notes a SIGTERM, and only that, and tells the other processes.
        self._by_jax = jax.process_count() > 1

    def __enter__(self) -> Self:
        for number in self.NUMBERS:
            if not (self._by_jax and number == signal.SIGTERM):
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *error: Any) -> None:
        for number in self._before:
            signal.signal(number, self._before[number])

    def end(self) -> bool:
        """Returns whether the training ends after this step, because a process had a signal.

        All processes get the same answer. They must call this method after every step.
        """
        if self._by_jax:
            # Calls are counted, not steps: if the signal came before the first call, JAX expects the number 1.
            self._calls += 1
            return multihost_utils.reached_preemption_sync_point(self._calls)
        return any(self._world.gather(self._came))

    def _note(self, *args: Any) -> None:
        self.__exit__()
        self._came = True
        if self._by_jax:
            signal.raise_signal(signal.SIGTERM)


def start(how: str, devices: int | None = None, nodes: int | None = None, locals: int | None = None) -> World:
    """Returns the world that this process belongs to.

    Args:
      nodes, locals: the number of nodes, and of ranks on each. None: as the other says. If both are None, ranks are on
        nodes only if mpirun started them on several hosts with as many ranks each.
      how: "local", "mpi", "distributed", or "auto", which chooses by environment variables.
      devices: the number of virtual CPU devices of a local world, 4 by default. It is used if JAX finds no
        accelerator. Other worlds have as many ranks as processes or devices, and refuse it.
    """
    if how == "auto":
        distributed = "JAX_COORDINATOR_ADDRESS" in os.environ or int(os.environ.get("SLURM_STEP_NUM_TASKS", 1)) > 1
        how = "mpi" if under_mpirun() else "distributed" if distributed else "local"
    if how != "local" and devices is not None:
        raise Wrong(f"--devices: expected --launch=local, got {how}, whose processes give the number of ranks")
    cgx.keep_pages()
    if how == "mpi":
        jax.config.update("jax_platforms", "cpu")
        try:
            from mpi4py import MPI
        except ImportError:
            raise Wrong('--launch: mpirun needs the extra `mpi`; pip install ".[mpi]"') from None
        return over_mpi(MPI.COMM_WORLD, nodes, locals)
    if how == "distributed":
        # With Slurm or mpirun, JAX finds these numbers itself.
        number = lambda name: int(os.environ[name]) if name in os.environ else None
        try:
            jax.distributed.initialize(num_processes=number("JAX_NUM_PROCESSES"), process_id=number("JAX_PROCESS_ID"))
        except (RuntimeError, ValueError) as error:
            raise Wrong(f"--launch=distributed: {str(error).partition(chr(10))[0]}") from error
        return over_devices(jax.devices(), nodes, locals)
    if devices is not None and devices < 1:
        raise Wrong(f"--devices: expected a positive number, got {devices}")
    jax.config.update("jax_num_cpu_devices", devices or 4)
    return over_devices(jax.devices(), nodes, locals)


def on_nodes(ranks: int, nodes: int | None, locals: int | None) -> tuple[int, int]:
    """Returns the number of nodes, and of ranks on each."""
    # one of the two may be left out
    found = (
        nodes if nodes is not None else ranks // max(locals or 1, 1),
        locals if locals is not None else ranks // max(nodes or 1, 1),
    )
    if min(found) < 1 or found[0] * found[1] != ranks:
        raise Wrong(
            f"--nodes, --locals: expected two numbers whose product is {ranks}, the number of ranks, got {found}"
        )
    return found


def over_devices(devices: list[Any], nodes: int | None = None, locals: int | None = None) -> World:
    """Returns the world of these devices, which belong to one or several processes."""
    # The ranks of a process must be a range.
    devices = sorted(devices, key=lambda device: (device.process_index, device.id))
    mine = [i for i, device in enumerate(devices) if device.process_index == jax.process_index()]
    if nodes is None and locals is None:
        mesh = Mesh(np.array(devices), ("data",), axis_types=(AxisType.Auto,))
        return World(len(devices), mine[0], len(mine), mesh, None)
    axes, sizes = ("node", "local"), on_nodes(len(devices), nodes, locals)
    mesh = Mesh(np.array(devices).reshape(sizes), axes, axis_types=(AxisType.Auto,) * 2)
    return World(len(devices), mine[0], len(mine), mesh, None, axes=axes)


def over_mpi(comm: Any, nodes: int | None = None, locals: int | None = None) -> World:
    """Returns the world of an MPI communicator."""
    if nodes is None and locals is None:
        from mpi4py import MPI

        sizes = comm.allgather(comm.Split_type(MPI.COMM_TYPE_SHARED).size)  # of the nodes, for each rank
        if len(set(sizes)) > 1 or (sizes[0] == comm.size and not cgx_variables()):
            return World(comm.size, comm.rank, 1, None, comm)
        made = cgx.mpi.hierarchy(comm)
    else:
        _, size = on_nodes(comm.size, nodes, locals)
        made = cgx.mpi.hierarchy(comm, comm.Split(comm.rank // size, comm.rank))
    return World(comm.size, comm.rank, 1, None, comm, made, ("cross", "inner") if made.cross.size > 1 else ())


def under_mpirun() -> bool:
    """Returns whether mpirun started this process."""
    return bool(set(MPIRUN) & set(os.environ))


def cgx_variables() -> dict[str, str]:
    """Returns CGX's environment variables."""
    return {name: value for name, value in os.environ.items() if name.startswith("CGX_")}
