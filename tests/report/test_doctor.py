"""Tests what `python -m jaxcgx doctor` prints for complete installations and for broken ones."""

import importlib.metadata
import os
import sys
import types

import jax
import pytest
from helpers import python, run

from jaxcgx import __main__
from jaxcgx.native import registration
from jaxcgx.report import doctor

NATIVE = dict(version="0.1.0", jaxlib="0.9.0", compiler="GNU 12.2.0", kernels="avx2", cuda=None)
CUDA = dict(toolkit="13.0.88", architectures=["sm_80", "sm_90", "compute_90"])


def device(kind, platform="gpu", version="cuda 13000", **known):
    client = types.SimpleNamespace(platform_version=version)
    return types.SimpleNamespace(device_kind=kind, platform=platform, client=client, process_index=0, **known)


T4 = device("Tesla T4", compute_capability="7.5")
H200 = device("NVIDIA H200", compute_capability="9.0")
UNKNOWN = device("another GPU")


@pytest.fixture
def pretend(monkeypatch):
    """Replaces the native module, the GPUs that JAX sees, and MPI."""

    def set_up(cuda=None, gpus=(), reference=False, **build_info):
        module = types.SimpleNamespace(build_info=lambda: NATIVE | dict(cuda=cuda) | build_info)
        monkeypatch.setattr(registration, "find", lambda: module)
        monkeypatch.setattr(registration, "REFERENCE", reference)
        monkeypatch.setattr(jax, "devices", lambda platform: list(gpus))
        monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: None)

    return set_up


def test_this_installation():
    said = run(sys.executable, "-P", "-m", "jaxcgx", "doctor").stdout
    assert all(word in said for word in (jax.__version__, registration.find().build_info()["kernels"], "no problems"))


def test_an_environment_that_is_not_activated(monkeypatch):
    """Its programs are next to Python, and not on the PATH."""
    monkeypatch.setenv("PATH", os.defpath)
    monkeypatch.setattr(doctor, "_mpi", lambda: ("Open MPI", []))
    report = doctor.examine()
    assert not report.problems and f"[X] mpirun            {os.path.dirname(sys.executable)}" in str(report)


def test_what_of_plain_jax_to_avoid(pretend):
    pretend()
    assert any("lax.psum_scatter" in text for text in doctor.examine().warnings) == (jax.__version_info__ < (0, 12))


@pytest.mark.parametrize("threads, few", [("8", True), ("15", True), ("16", False)])
def test_few_threads_for_the_devices(pretend, monkeypatch, threads, few):
    pretend()
    monkeypatch.setenv("PJRT_NPROC", threads)
    assert any("PJRT_NPROC=16" in text for text in doctor.examine().warnings) == few


def test_without_a_gpu(pretend, monkeypatch):
    pretend()
    report = doctor.examine()
    assert report.problems == [] and "[X] CPU kernels       avx2" in str(report)
    assert report.versions["jaxcgx"] == importlib.metadata.version("jaxcgx")
    assert 'MPI               not installed: pip install ".[mpi]" in a checkout' in str(report)
    assert "CUDA half         none" in str(report) and "[ ] GPUs              JAX sees none" in str(report)
    assert str(report).endswith("no problems")
    monkeypatch.setattr(doctor.pathlib.Path, "glob", lambda folder, names: iter([folder / names]))
    assert "JAX sees none; this machine has one: pip install 'jax[cuda13]'" in str(doctor.examine())


def test_a_gpu_that_the_build_has_code_for(pretend):
    pretend(CUDA, [H200])
    report = doctor.examine()
    assert not report.problems
    assert "toolkit 13.0.88, code for sm_80, sm_90, compute_90" in str(report)
    assert "[X] GPUs              NVIDIA H200, compute capability 9.0, kernels: yes" in str(report)


@pytest.mark.parametrize(
    ("cuda", "gpu", "words"),
    [
        (None, H200, "JAX computes on NVIDIA H200, and this build has no CUDA half"),
        (CUDA, T4, "JAX computes on Tesla T4, and this build has no code for its compute capability 7.5"),
        (CUDA, UNKNOWN, "JAX computes on another GPU, and this build has no code for its compute capability unknown"),
    ],
)
def test_a_gpu_that_the_build_has_no_code_for(pretend, capsys, cuda, gpu, words):
    pretend(cuda, [H200, gpu])
    problem = doctor.examine().problems[-1]
    assert problem.what == words and "JAXCGX_CUDA=ON" in problem.remedy and "JAXCGX_REFERENCE=1" in problem.remedy
    assert __main__.main(["doctor"]) == 1
    assert f"problem: {words}\nremedy:  build it where there is a CUDA compiler" in capsys.readouterr().out
    pretend(cuda, [gpu], reference=True)  # jnp needs no kernels
    assert doctor.examine().problems == []


NVLINK = """\
\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV18\tNV18\tPXB\t0-63\t0\t\tN/A
GPU1\tNV18\t X \tNV18\tSYS\t0-63\t0\t\tN/A
GPU2\tNV18\tNV18\t X \tSYS\t64-127\t1\t\tN/A
NIC0\tPXB\tSYS\tSYS\t X

Legend:

  X    = Self
"""


@pytest.mark.parametrize(
    ("topology", "found"),
    [
        (NVLINK, "NVLink"),
        (NVLINK.replace("NV18\tNV18", "NV18\tSYS", 1).replace("GPU2\tNV18", "GPU2\tSYS"), "NVLink and PCIe (SYS)"),
        (NVLINK.replace("GPU1\tNV18", "GPU1\tPHB").replace("NV18", "NODE"), "PCIe (NODE, PHB)"),
        ("GPU0\t X \t0-7\n", ""),
        ("", ""),
    ],
)
def test_what_connects_gpus(pretend, monkeypatch, topology, found):
    pretend(CUDA, [H200, H200])
    monkeypatch.setattr(doctor, "_topology", lambda: topology)
    report = doctor.examine()
    assert report.problems == []
    assert any("no NVLink" in text for text in report.warnings) == ("PCIe" in found)
    assert (f"between GPUs      {found}\n" in str(report)) == bool(found)


def test_devices_without_kernels(pretend, monkeypatch):
    """These are TPUs and AMD's GPUs, which JAX also calls GPUs. They don't need the CUDA half."""
    amd = device("AMD Instinct MI300X", version="rocm 60300")
    pretend(None, [amd])
    assert "without kernels" not in str(doctor.examine())
    monkeypatch.setattr(jax, "local_devices", lambda: [amd, device("TPU v5e", "tpu"), H200])
    report = doctor.examine()
    assert "[ ] GPUs" in str(report) and report.problems == []
    assert "without kernels   AMD Instinct MI300X; TPU v5e: plain jnp, the same bytes" in str(report)


# Starts as `python -m jaxcgx doctor` does.
WITHOUT_THE_NATIVE_MODULE = """
import runpy, sys
sys.modules["jaxcgx.native._native"] = None
sys.argv, sys.orig_argv = ["-m", "doctor"], ["python", "-m", "jaxcgx", "doctor"]
import jaxcgx
sys.argv = ["jaxcgx", "doctor"]
runpy.run_module("jaxcgx", run_name="__main__")
"""


def test_without_the_native_module():
    done = python(WITHOUT_THE_NATIVE_MODULE, status=1, env=dict(JAXCGX_REFERENCE=""))
    said = done.stdout
    assert "native module     none" in said and "problem: jaxcgx: its native module can't be loaded" in said
    assert "remedy:  reinstall it with" in said and "Traceback" not in done.stderr
    said = python(WITHOUT_THE_NATIVE_MODULE, env=dict(JAXCGX_REFERENCE="1")).stdout
    assert "JAXCGX_REFERENCE  1" in said


def test_with_a_jax_that_is_not_supported(pretend, monkeypatch):
    pretend()
    monkeypatch.setattr(jax, "__version__", "0.8.3")
    (problem,) = doctor.examine().problems
    assert problem.what == "jax 0.8.3 is not one that jaxcgx supports"
    assert problem.remedy.startswith('pip install "jax<')


@pytest.mark.parametrize(
    ("code", "yes", "no"),
    [
        ("sm_80 sm_90 compute_90", "8.0 8.6 9.0 10.0 12.1", "7.0 7.5"),
        ("sm_80", "8.0", "9.0"),  # machine code runs on its own major number
        ("sm_86", "8.6", "8.0"),
        ("sm_100", "10.3", "9.0"),
        ("sm_90a", "9.0", "10.0"),
        ("sm_100a compute_100a", "10.0", "10.3"),
    ],
)
def test_what_code_runs_where(code, yes, no):
    assert all(doctor.covers(code.split(), capability) for capability in yes.split())
    assert not any(doctor.covers(code.split(), capability) for capability in no.split())


def test_a_command_is_needed(capsys):
    with pytest.raises(SystemExit) as error:
        __main__.main([])
    assert error.value.code == 2 and "COMMAND" in capsys.readouterr().err
