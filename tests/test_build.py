"""Tests CMake's JAXCGX_CUDA, scripts/cuda.py and scripts/cuda_resources.py without a CUDA compiler, and wheels.py."""

import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest
from helpers import load_script, run

ROOT = pathlib.Path(__file__).parent.parent
PATH = f"{ROOT / '.venv/build/bin'}:{os.environ['PATH']}"
CMAKE = shutil.which("cmake", path=PATH)

needs_cmake = pytest.mark.skipif(not CMAKE, reason="there is no cmake on the PATH or in .venv/build")


NONE = "no CUDA compiler was found that works: put nvcc on the PATH"
OLD = "12.1 or later is needed"


def configure(folder, *options, status=0, **env):
    done = run(
        CMAKE, "-S", ROOT, "-B", folder, "-DJAXCGX_MODULE=OFF", *options, status=status, env=dict(PATH=PATH) | env
    )
    return " ".join((done.stdout + done.stderr).split())


@needs_cmake
@pytest.mark.parametrize(
    ("value", "nvcc", "status", "words"),
    [
        ("MAYBE", None, 1, "JAXCGX_CUDA: expected AUTO, ON, ALL or OFF, got 'MAYBE'"),
        ("ON", None, 1, f"JAXCGX_CUDA=ON, but {NONE}"),
        ("AUTO", None, 0, "CUDA half: none"),
        ("ON", "11.8", 1, f"is nvcc 11.8: {OLD}; name another one in the environment variable CUDACXX"),
        ("AUTO", "11.8", 0, f"CUDA half: none (nvcc 11.8; {OLD})"),
        ("OFF", "11.8", 0, "CUDA half: none"),
    ],
)
def test_without_a_cuda_compiler_that_is_new_enough(tmp_path, value, nvcc, status, words):
    compiler = tmp_path / "nvcc"
    compiler.write_text(f"#!/bin/sh\necho Cuda compilation tools, release {nvcc}, V{nvcc}.89\n")
    compiler.chmod(0o755)
    found = [f"-DCMAKE_CUDA_COMPILER={compiler}"] if nvcc else []
    env = {} if nvcc else dict(CUDACXX="/bin/false")
    assert words in configure(tmp_path / "build", f"-DJAXCGX_CUDA={value}", *found, status=status, **env)


def test_a_machine_that_cannot_compile_it(tmp_path, monkeypatch, capfd):
    cuda = load_script(ROOT / "scripts/cuda.py", monkeypatch)
    with pytest.raises(SystemExit, match="cuda: the build failed; .*kernels.txt has what is above"):
        cuda.build(tmp_path, "/bin/false", "nvcc")
    assert not (tmp_path / "kernels").exists()
    monkeypatch.setattr(cuda, "BUILD_ENV", tmp_path)
    monkeypatch.setattr(sys, "argv", ["cuda"])
    monkeypatch.setattr(cuda, "nvcc", lambda: None)
    monkeypatch.setattr(cuda.matrix, "pip", lambda *_: subprocess.run("/bin/false", check=True))
    monkeypatch.delenv("JAXCGX_REQUIRE_CUDA", raising=False)
    cuda.main()
    words = "there is no CUDA compiler (nvcc) on the PATH, and pip could not install one"
    assert f"cuda: SKIPPED: {words}" in capfd.readouterr().out
    monkeypatch.setenv("JAXCGX_REQUIRE_CUDA", "1")
    with pytest.raises(SystemExit, match=re.escape(f"cuda: {words}")):
        cuda.main()


def entry(arch, kernel, stores=0):
    return (
        f"ptxas info    : Compiling entry function '_Z6{kernel}IiE' for '{arch}'\n"
        f"ptxas info    : Function properties for _Z6{kernel}IiE\n"
        f"    0 bytes stack frame, {stores} bytes spill stores, 0 bytes spill loads\n"
        "ptxas info    : Used 56 registers, 400 bytes cmem[0]\n"
    )


@pytest.mark.parametrize(
    ("spills", "missing", "words"),
    [
        ({}, (), None),
        ({("sm_90", "encode_any_bucket_kernel"): 60}, (), None),
        ({("sm_90", "reduce_kernel"): 8}, (), "_Z6reduce_kernelIiE for sm_90: 0 bytes of stack, 8 stored, 0 loaded"),
        ({}, [("sm_80", "decode_kernel"), ("sm_80", "encode_kernel")], "decode_kernel for sm_80, encode_kernel for sm"),
        ({}, [("sm_90", "decode_kernel")], "no report on decode_kernel for sm_90:"),
    ],
)
def test_the_report_on_registers(tmp_path, monkeypatch, spills, missing, words):
    cuda = load_script(ROOT / "scripts/cuda.py", monkeypatch)
    resources = load_script(ROOT / "scripts/cuda_resources.py", monkeypatch)
    names = [f"{name}_kernel" for name in (*resources.FAST, "encode_any_bucket")]
    kernels = [(a, k) for a in ("sm_80", "sm_90") for k in names]
    log = tmp_path / "log.txt"
    log.write_text(
        "-- CUDA half: toolkit 13.0.88, architectures 80-real;90;100-virtual\n"
        + "".join(entry(*k, spills.get(k, 0)) for k in kernels if k not in missing)
    )
    assert cuda.architectures(log) == "sm_80,sm_90"
    command = sys.executable, ROOT / "scripts/cuda_resources.py", cuda.architectures(log), log
    assert (words or "") in run(*command, status=int(words is not None)).stderr


def test_what_the_kernels_cost_is_compared(tmp_path, monkeypatch, capsys):
    resources = load_script(ROOT / "scripts/cuda_resources.py", monkeypatch)
    monkeypatch.setattr(resources, "RESULT", tmp_path / "cuda-resources.json")
    kernel, log, counts = "_ZN6jaxcgx4cuda13encode_kernelEi", tmp_path / "log.txt", tmp_path / "counts.txt"

    def measure(registers, instructions, compiler="13.0.88", *options):
        names = [name for name in resources.FAST if name != "encode"]
        log.write_text(
            f"-- CUDA half: toolkit {compiler}, architectures 90\n"
            + "".join(entry("sm_90", f"{name}_kernel") for name in names)
            + entry("sm_90", "encode_kernel")
            .replace("_Z6encode_kernelIiE", kernel)
            .replace("56 reg", f"{registers} reg")
        )
        counts.write_text(f"4 elements\nptx: {kernel}: {8 * instructions} instructions in 2 launches\n")
        monkeypatch.setattr(sys, "argv", ["cuda_resources", "sm_90", str(log), str(counts), *options])
        resources.main()

    measure(56, 18, "13.0.88", "--write")
    measure(56, 18)
    words = (
        "encode_kernel: instructions 19.0, was 18.0\nencode_kernel: registers 60, was 56\nIf that is meant, run `make"
    )
    with pytest.raises(SystemExit, match=words):
        measure(60, 19)
    measure(60, 19, "13.1.0")
    assert "that is of nvcc 13.0.88, this is 13.1.0" in capsys.readouterr().out


def test_a_path_without_compilers(tmp_path, monkeypatch):
    """That of a test of a wheel: whatever compiles is missing, under any name, and everything else is there."""
    wheels = load_script(ROOT / "scripts/wheels.py", monkeypatch)
    first, second = tmp_path / "first", tmp_path / "second"
    compilers = (
        "cc c99 gcc g++-12 c++-12 x86_64-linux-gnu-gcc-12 aarch64-none-linux-gnu-g++ clang-15 clang++-15 clang14"
    )
    compilers += " cpp-12 x86_64-w64-mingw32-gcc-posix nvcc ptxas cmake ninja"
    others = "sh python3.11 ip mpirun gccgo-docs account catcc tcc-notes"
    for folder, names in (first, compilers + " " + others), (second, "sh env"):
        folder.mkdir()
        for name in names.split():
            (folder / name).write_text(f"#!/bin/sh\necho {folder.name}\n")
            (folder / name).chmod(0o755)
    (second / "compile").symlink_to(first / "g++-12")
    monkeypatch.setenv("PATH", f"{first}:{tmp_path / 'none'}:{second}")
    path = pathlib.Path(wheels.without_compilers(tmp_path / "path"))
    assert {link.name for link in path.iterdir()} == {*others.split(), "env"}
    assert (path / "sh").resolve() == first / "sh"
