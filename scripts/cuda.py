"""Builds jaxcgx with its CUDA half, and checks what needs no GPU (`make cuda`).

1. It builds a wheel with code for every architecture (`make cuda-short`: for one). Warnings are errors.
2. It compares the costs of the kernels (registers, memory and instructions) with scripts/cuda-resources.json, which
   `make cuda-resources` writes.
3. It runs the tests of the CUDA half that need no GPU, including the tests that run nvcc's PTX on the CPU.

If there is no CUDA compiler, it installs one from PyPI into .venv/build. If that fails, the check is skipped, or is an
error with JAXCGX_REQUIRE_CUDA=1. All results are in build/cuda or build/cuda-short.
"""

import argparse
import os
import pathlib
import re
import shutil
import subprocess
import sys

import matrix

ROOT = pathlib.Path(__file__).resolve().parent.parent
BUILD_ENV = ROOT / ".venv/build"
# nvcc and its dependencies. Their wheels unpack into one folder.
COMPILER = [f"nvidia-{part}==13.0.*" for part in ("cuda-nvcc", "cuda-crt", "nvvm", "cuda-runtime", "cuda-cccl")]


def nvcc():
    """Returns the path of a CUDA compiler, or None."""
    found = os.environ.get("CUDACXX") or shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
    return found and pathlib.Path(found)


def nvcc_from_pypi():
    """Installs PyPI's CUDA compiler into .venv/build, and returns its path.

    If that fails, prints the reason and returns None. With JAXCGX_REQUIRE_CUDA=1, ends the program instead.
    """
    python = BUILD_ENV / "bin/python"
    try:
        matrix.pip(python, "install", *COMPILER)
    except subprocess.CalledProcessError:
        why = "there is no CUDA compiler (nvcc) on the PATH, and pip could not install one (see above)"
        if os.environ.get("JAXCGX_REQUIRE_CUDA"):
            sys.exit(f"cuda: {why}")
        print(f"cuda: SKIPPED: {why}")
        return None
    site = matrix.output(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))")
    home = pathlib.Path(site, "nvidia/cu13")
    if not (home / "lib64").exists():  # nvcc searches there
        (home / "lib64").symlink_to("lib")
    return home / "bin/nvcc"


def path_for(python):
    """Returns the PATH, with the programs of a Python's environment first."""
    return f"{pathlib.Path(python).parent}:{os.environ['PATH']}"


def build(folder, python, compiler, **defines):
    """Builds a wheel with the CUDA half in `folder`.

    Returns (the path of the wheel, the path of the log of the build that compiled the kernels). `python` must have the
    build requirements. `defines` are variables of CMake.
    """
    defines = {"JAXCGX_CUDA": "ALL"} | defines
    settings = {"build-dir": str(folder / "make")} | {f"cmake.define.{name}": value for name, value in defines.items()}
    wheels, report, stamp = folder / "wheel", folder / "kernels.txt", folder / "kernels"
    kernels = f"{matrix.checksum('CMakeLists.txt', 'cuda', 'xla_ffi/codec')} {compiler} {defines}"
    fresh = not (stamp.exists() and stamp.read_text() == kernels)
    if fresh:  # compile all kernels, because the report must have all of them
        stamp.unlink(missing_ok=True)
        shutil.rmtree(folder / "make", ignore_errors=True)
        matrix.start_from(ROOT / "build/editable", folder / "make")
    shutil.rmtree(wheels, ignore_errors=True)
    wheels.mkdir(parents=True)
    log = report if fresh else folder / "log.txt"
    with log.open("w") as out:
        result = matrix.run(
            python,
            "-c",
            f"from scikit_build_core.build import build_wheel; build_wheel({str(wheels)!r}, {settings!r})",
            stdout=out,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            env=os.environ | {"CUDACXX": str(compiler), "PATH": path_for(python)},
        )
    if result.returncode:
        sys.exit(f"{log.read_text()}\ncuda: the build failed; {log} has what is above")
    stamp.write_text(kernels)
    return next(wheels.glob("*.whl")), report


def architectures(report):
    """Returns the architectures that a build has machine code for, in the compiler's words: "sm_80,sm_90"."""
    (found,) = re.findall(r"^-- CUDA half: .*architectures (.*)$", report.read_text(), re.MULTILINE)
    return ",".join("sm_" + a.removesuffix("-real") for a in found.split(";") if not a.endswith("-virtual"))


def keep_ptx(folder):
    """Copies the build's PTX for compute_90 into one folder, one file for each .cu file. Returns the folder."""
    made, ptx = folder / "make/ptx", folder / "ptx"
    shutil.rmtree(ptx, ignore_errors=True)
    ptx.mkdir()
    for source in (ROOT / "cuda").glob("*.cu"):
        of_several = made / f"{source.stem}.compute_90.ptx"  # nvcc's name if it compiles for several architectures
        shutil.copy(of_several if of_several.exists() else made / f"{source.stem}.ptx", ptx / f"{source.stem}.ptx")
    return ptx


def count_instructions(folder, ptx):
    """Counts the instructions that the kernels run. Returns the path of the output of tests/cpp/ptx/count.cc."""
    counts = folder / "counts.txt"
    with counts.open("w") as out:
        program = folder / "make/tests/cpp/ptx/ptx_count"
        matrix.run(program, stdout=out, env=os.environ | {"JAXCGX_PTX": str(ptx)}, check=True)
    return counts


def environment(folder, wheel):
    """Makes an environment in `folder`, and returns its Python.

    The environment has the wheel, and all packages of the Python that runs this script.
    """
    inside = folder / "env/bin/python"
    matrix.run(sys.executable, "-m", "venv", "--clear", "--without-pip", folder / "env", check=True)
    site = matrix.output(inside, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))")
    folders = [p for p in sys.path if pathlib.Path(p).name in ("site-packages", "dist-packages")]
    pathlib.Path(site, "base.pth").write_text("".join(f"{p}\n" for p in folders))
    shutil.unpack_archive(wheel, site, "zip")
    return inside


def test(inside, *arguments, **variables):
    """Runs pytest in an environment, and returns whether it passed.

    PYTHONSAFEPATH makes Python import the installed jaxcgx. The repository's jaxcgx/ has no native module.
    """
    env = os.environ | {"PYTHONSAFEPATH": "1"} | variables
    return matrix.run(inside, "-m", "pytest", *arguments, cwd=ROOT, env=env).returncode == 0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="one architecture")
    parser.add_argument("--write", action="store_true", help="only write what the kernels cost anew")
    args = parser.parse_args()
    short = args.short
    compiler = nvcc() or nvcc_from_pypi()
    if not compiler:
        return
    folder = ROOT / ("build/cuda-short" if short else "build/cuda")
    print(f"== CUDA: compiling for {'one architecture' if short else 'all architectures'} with {compiler}", flush=True)
    few = {"CMAKE_CUDA_ARCHITECTURES": "90"} if short else {}
    tests = {"JAXCGX_WERROR": "ON", "JAXCGX_PTX_TESTS": "ON"}
    wheel, report = build(folder, BUILD_ENV / "bin/python", compiler, **tests, **few)
    print("== CUDA: what the kernels cost", flush=True)
    ptx = keep_ptx(folder)
    resources = [architectures(report), report, count_instructions(folder, ptx), *["--write"] * args.write]
    if matrix.run(sys.executable, ROOT / "scripts/cuda_resources.py", *resources).returncode:
        sys.exit(1)
    if args.write:
        return
    print("== CUDA: tests without a GPU", flush=True)
    inside = environment(folder, wheel)
    files = "tests/native/test_cuda.py", "tests/native/test_ptx.py"
    if not test(inside, *files, f"--junitxml={matrix.TIMES / 'cuda.xml'}", JAXCGX_CUDA_BUILD=str(folder)):
        sys.exit(1)


if __name__ == "__main__":
    main()
