"""Tests what `python -m jaxcgx doctor` prints for complete installations and for broken ones."""

import dataclasses
import importlib.metadata
import os
import subprocess
import sys
import types

import jax
import pytest

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


def run(code="", *arguments, **env):
    """Runs python -m jaxcgx in a separate process. `code` runs before everything else."""
    env = {k: v for k, v in os.environ.items() if k != "JAXCGX_REFERENCE"} | env
    start = (
        f"import sys\n{code}\nimport runpy\nsys.argv, sys.orig_argv = ['-m'], ['python', '-m', 'jaxcgx', "
        f"*{arguments!r}]\n"
        f"import jaxcgx\nsys.argv = ['jaxcgx', *{arguments!r}]\nrunpy.run_module('jaxcgx', run_name='__main__')"
    )
    return subprocess.run([sys.executable, "-P", "-c", start], env=env, capture_output=True, text=True, timeout=300)


def test_this_installation():
    result = subprocess.run(
        [sys.executable, "-P", "-m", "jaxcgx", "doctor"], capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stdout + result.stderr
    for word in (
        jax.__version__,
        "avx" if registration.find().build_info()["kernels"] != "portable" else "portable",
        "no problems",
    ):
        assert word in result.stdout


def test_an_environment_that_is_not_activated(monkeypatch):
    """Its programs are next to Python, and not on the PATH."""
    monkeypatch.setenv("PATH", os.defpath)
    monkeypatch.setattr(doctor, "_mpi", lambda: ("Open MPI", []))
    report = doctor.examine()
    assert not report.problems and report.mpi_programs["mpirun"].startswith(os.path.dirname(sys.executable))


def test_what_of_plain_jax_to_avoid(pretend):
    pretend()
    assert any("lax.psum_scatter" in text for text in doctor.examine().warnings) == (jax.__version_info__ < (0, 12))


def test_without_a_gpu(pretend):
    pretend()
    report = doctor.examine()
    assert report.problems == [] and report.gpus == [] and report.native["kernels"] == "avx2"
    assert report.versions["jaxcgx"] == importlib.metadata.version("jaxcgx")
    assert 'MPI               not installed: pip install ".[mpi]" in a checkout' in str(report)
    assert (
        "CUDA half         none" in str(report)
        and "JAX sees none" in str(report)
        and str(report).endswith("no problems")
    )


def test_a_gpu_that_jax_does_not_see(pretend):
    pretend()
    report = dataclasses.replace(doctor.examine(), hidden=True)
    assert "JAX sees none; this machine has one: pip install 'jax[cuda13]'" in str(report)


def test_a_gpu_that_the_build_has_code_for(pretend):
    pretend(CUDA, [H200])
    report = doctor.examine()
    assert report.gpus == [doctor.Gpu("NVIDIA H200", "9.0", True)] and not report.problems
    assert "toolkit 13.0.88, code for sm_80, sm_90, compute_90" in str(report)
    assert "NVIDIA H200, compute capability 9.0, kernels: yes" in str(report)


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


def test_devices_without_kernels(pretend, monkeypatch):
    """These are TPUs and AMD's GPUs, which JAX also calls GPUs. They don't need the CUDA half."""
    amd = device("AMD Instinct MI300X", version="rocm 60300")
    pretend(None, [amd])
    assert "without kernels" not in str(doctor.examine())
    monkeypatch.setattr(jax, "local_devices", lambda: [amd, device("TPU v5e", "tpu"), H200])
    report = doctor.examine()
    assert report.gpus == [] and report.problems == []
    assert "without kernels   AMD Instinct MI300X; TPU v5e: plain jnp, the same bytes" in str(report)


def test_without_the_native_module():
    code = "sys.modules['jaxcgx.native._native'] = None"
    result = run(code, "doctor")
    assert result.returncode == 1, result.stderr
    assert "native module     none" in result.stdout
    assert (
        "problem: jaxcgx: its native module can't be loaded" in result.stdout
        and "remedy:  reinstall it with" in result.stdout
    )
    assert "Traceback" not in result.stderr
    result = run(code, "doctor", JAXCGX_REFERENCE="1")
    assert result.returncode == 0 and "JAXCGX_REFERENCE  1" in result.stdout


def test_with_a_native_module_of_another_version():
    result = run("import importlib.metadata as m; m.version = lambda name: '9.9'", "doctor")
    assert result.returncode == 1, result.stderr
    assert "its native module is of version" in result.stdout and "the package of version 9.9" in result.stdout


def test_with_a_jax_that_is_not_supported(pretend, monkeypatch):
    pretend()
    monkeypatch.setattr(jax, "__version__", "0.8.3")
    (problem,) = doctor.examine().problems
    assert problem.what == "jax 0.8.3 is not one that jaxcgx supports" and problem.remedy.startswith(
        'pip install "jax<'
    )


@pytest.mark.parametrize(
    ("capability", "covered"),
    [("7.5", False), ("8.0", True), ("8.6", True), ("9.0", True), ("10.0", True), ("12.1", True), ("7.0", False)],
)
def test_what_code_runs_where(capability, covered):
    assert doctor.covers(["sm_80", "sm_90", "compute_90"], capability) == covered


def test_machine_code_runs_on_its_own_major_number():
    assert (
        not doctor.covers(["sm_80"], "9.0")
        and not doctor.covers(["sm_86"], "8.0")
        and doctor.covers(["sm_100"], "10.3")
    )
    assert doctor.covers(["sm_90a"], "9.0") and not doctor.covers(["sm_100a", "compute_100a"], "10.3")


def test_a_command_is_needed(capsys):
    with pytest.raises(SystemExit) as error:
        __main__.main([])
    assert error.value.code == 2 and "COMMAND" in capsys.readouterr().err
