"""Runs the tests over MPI on two ranks of MPICH from PyPI (`make mpich`).

mpirun, mpi4py and mpi4jax must use the same MPI, so MPICH has a separate environment, in .matrix/.
"""

import os
import sys

import matrix

VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"


def install():
    """Makes an environment with MPICH, the wheel and the test requirements. Returns its bin folder."""
    package = matrix.wheel(VERSION, sys.executable)
    print("== MPICH: installing", flush=True)
    python = matrix.venv(sys.executable, matrix.WORK / "mpich", VERSION)
    matrix.pip(python, "install", "mpich")
    # pip builds mpi4jax with the first mpicc on the PATH.
    os.environ["PATH"] = f"{python.parent}{os.pathsep}{os.environ['PATH']}"
    # Without the cache, which may have an mpi4jax that pip built for another MPI.
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
        env=os.environ | {"PYTHONSAFEPATH": "1"},  # import the installed jaxcgx, not the folder
    )
    sys.exit(result.returncode)


if __name__ == "__main__":
    main()
