"""`pytest tests/mpi` alone is one rank.

`mpirun -n 4 pytest tests/mpi` is four processes, each of which runs every test.
"""

import importlib.util


def pytest_report_header():
    if not importlib.util.find_spec("mpi4py"):
        return None
    from mpi4py import MPI

    return f"{MPI.Get_library_version().split(',')[0]}, rank {MPI.COMM_WORLD.rank} of {MPI.COMM_WORLD.size}"
