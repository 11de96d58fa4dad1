"""The tests over MPI on two ranks of MPICH from PyPI. `make mpich` runs it.

mpirun, mpi4py and mpi4jax must be of one MPI, so MPICH has an environment of its own, in .matrix/.
"""

import os
import sys

import matrix

VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"


def install():
    """The bin folder of an environment with MPICH, the wheel and what its tests need."""
    package = matrix.wheel(VERSION, sys.executable)
    print("== MPICH: installing", flush=True)
    python = matrix.venv(sys.executable, matrix.WORK / "mpich", VERSION)
    matrix.pip(python, "install", "mpich")
    os.environ["PATH"] = f"{python.parent}{os.pathsep}{os.environ['PATH']}"  # pip builds mpi4jax with the first mpicc
    # Without a cache: pip may have built mpi4jax for another MPI.
    matrix.pip(python, "install", "--no-cache-dir", "--no-binary", "mpi4jax", f"{package}[mpi,test]")
    matrix.pip(python, "install", "--no-deps", "--force-reinstall", package)
    return python.parent


def main():
    inside = install()
    print("== MPICH, mpiexec -n 2", flush=True)
    tests = ["-m", "pytest", "tests/mpi", "-p", "no:cacheprovider", "--timeout-method", "thread", "--timeout", "300"]
    result = matrix.run(
        inside / "mpiexec",
        "-n",
        2,
        inside / "python",
        *tests,
        f"--junitxml={matrix.TIMES}/mpich.$PMI_RANK.xml",
        cwd=matrix.ROOT,
        env=os.environ | {"PYTHONSAFEPATH": "1"},  # the installed jaxcgx, not the folder of this name
    )
    sys.exit(result.returncode)


if __name__ == "__main__":
    main()
