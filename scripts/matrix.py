"""Runs the tests on every supported Python, with the oldest and the newest supported JAX and one version in between.

For each Python, one wheel must work with all these versions of JAX. `make matrix` runs all tests and writes
benchmarks/results/matrix.json and a table next to it. `make matrix-short` runs the tests marked `short`, with the
oldest JAX on the default Python and with the newest JAX on the newest Python. `make test-next` runs them with the
newest JAX that there is, even if jaxcgx doesn't support it yet. Wheels and environments are in .matrix/, and the next
run uses them again.
"""

import argparse
import concurrent.futures
import hashlib
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import time
import tomllib
import xml.etree.ElementTree as xml

ROOT = pathlib.Path(__file__).resolve().parent.parent
WORK = ROOT / ".matrix"
TIMES = ROOT / "build/tests"  # JUnit reports with the time of each test
PYTHONS = ["3.11", "3.12", "3.13"]
BETWEEN = ("3.12", "0.11.0")  # the Python and the JAX version in between
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
# The native module is compiled against the oldest supported jaxlib.
OLDEST = next(r.removeprefix("jaxlib==") for r in PYPROJECT["build-system"]["requires"] if r.startswith("jaxlib=="))

# Prints the version of an interpreter, or fails with the reason why it can't be used.
PROBE = """
import os, sys, sysconfig
try:
    import ensurepip, venv
except ImportError:
    sys.exit("it has no venv or ensurepip")
if not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")):
    sys.exit("it has no C headers (Python.h)")
if sysconfig.get_config_var("Py_GIL_DISABLED"):
    sys.exit("it is a free-threaded build")
print("%d.%d" % sys.version_info[:2])
"""


def run(*command, **options):
    return subprocess.run([str(c) for c in command], text=True, **options)


def output(*command):
    """Returns the output of a command; "" if it fails or doesn't exist."""
    try:
        result = run(*command, capture_output=True)
    except OSError:
        return ""
    return result.stdout.strip() if result.returncode == 0 else ""


def candidates(version):
    """Yields interpreters that may be Python `version`; first the interpreter that runs this script."""
    yield sys.executable
    yield shutil.which(f"python{version}")
    yield output("uv", "python", "find", "--no-project", version)
    # Without PYENV_ROOT, `pyenv root` is a guess. The command itself may be in the true root.
    pyenv = pathlib.Path(shutil.which("pyenv") or "").resolve().parent.parent
    for root in output("pyenv", "root"), os.environ.get("PYENV_ROOT"), pathlib.Path.home() / ".pyenv", pyenv:
        releases = pathlib.Path(root or "/", "versions").glob(f"{version}.*/bin/python")
        yield from sorted(releases, key=lambda p: [int(n) for n in re.findall(r"\d+", p.parts[-3])], reverse=True)


def find(version):
    """Returns (interpreter, ""), or (None, the reason why there is none)."""
    why = "not found"
    for python in filter(None, candidates(version)):
        probe = run(python, "-c", PROBE, capture_output=True)
        if probe.stdout.strip() == version:
            return python, ""
        if probe.stderr.startswith("it "):
            why = f"found, but {probe.stderr.strip()}"
    return None, why


# What the tests marked `short` need. The extra `test` takes twice as long to install.
FEW = "hypothesis", "optax", "pytest", "pytest-timeout"
WHEEL = "CMakeLists.txt", "pyproject.toml", "README.md", "jaxcgx", "xla_ffi", "cuda"  # the sources of a wheel


def checksum(*paths):
    """Returns a checksum of files, and of all files in folders."""
    digest = hashlib.sha256()
    for path in paths:
        for file in sorted([ROOT / path, *(ROOT / path).rglob("*")]):
            if file.is_file() and "__pycache__" not in file.parts:
                digest.update(f"{file.relative_to(ROOT)}\0".encode() + file.read_bytes())
    return digest.hexdigest()


def pip(python, command, *arguments):
    """Runs the pip of this environment for another Python, whose environment has none."""
    # Without --no-compile, pip would compile all modules. Python compiles the few modules that it imports.
    arguments = (*["--no-compile"] * (command == "install"), *arguments)
    ours = sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check", "--quiet"
    run(*ours, command, *arguments, check=True, cwd=ROOT)


def venv(python, folder, version):
    """Returns the Python of the environment in `folder`. Makes the environment if there is none of this version."""
    inside = folder / "bin/python"
    if not inside.exists() or output(inside, "-c", PROBE) != version:
        run(python, "-m", "venv", "--clear", "--without-pip", folder, check=True)
    return inside


def start_from(made, build):
    """Copies the build folder `made` to `build`, if `build` doesn't exist.

    CMake then compiles only the files that have other options.
    """
    if made.exists() and not build.exists():
        # These files name the old folder and its Python: with them, scikit-build-core would empty the new folder.
        shutil.copytree(made, build, ignore=shutil.ignore_patterns("CMakeCache.txt", ".skbuild-info.json"))


def wheel(version, python):
    """Builds the wheel for Python `version` if its sources have changed. Returns its path."""
    folder = WORK / version
    stamp = folder / "checksum"
    if not (stamp.exists() and stamp.read_text() == checksum(*WHEEL)):
        print(f"== Python {version}: building the wheel", flush=True)
        # pip's build isolation would compile everything again (see the Makefile). So would a new build folder: for the
        # default Python, use the folder of `make`.
        builder, build = ROOT / ".venv/build/bin/python", ROOT / "build/editable"
        if output(builder, "-c", PROBE) != version:
            builder, build = venv(python, folder / "env", version), folder / "build"
            start_from(ROOT / "build/editable", build)
            pip(builder, "install", *PYPROJECT["build-system"]["requires"], "cmake", "ninja")
        stamp.unlink(missing_ok=True)
        for old in folder.glob("*.whl"):
            old.unlink()
        pip(
            builder,
            "wheel",
            ".",
            "--no-deps",
            "--no-build-isolation",
            "--wheel-dir",
            folder,
            f"--config-settings=build-dir={build}",
            "--config-settings=cmake.define.JAXCGX_CUDA=OFF",
            "--config-settings=cmake.define.JAXCGX_KERNELS=ALL",
        )
        stamp.write_text(checksum(*WHEEL))
    return next(folder.glob("*.whl"))


def environment(version, python, age, package, short=False):
    """Makes an environment with a wheel, what its tests need and a JAX. Returns its Python; None if that fails.

    age: "oldest", "newest", "next", or a version of JAX. short: whether only the tests marked `short` run.
    """
    print(f"== Python {version}: installing jax, {age}", flush=True)
    # For "newest", pip chooses the newest version that jaxcgx and this Python support.
    number = {"oldest": f"=={OLDEST}", "newest": "", "next": ""}.get(age, f"=={age}")
    try:
        inside = venv(python, WORK / f"{version}-{age}", version)
        needed = (package, *FEW) if short else [f"{package}[test]"]
        pip(inside, "install", "--upgrade", *needed, f"jax{number}", f"jaxlib{number}")
        pip(inside, "install", "--no-deps", "--force-reinstall", package)
        if age == "next":  # alone, so that jaxcgx's own bounds don't count
            pip(inside, "install", "--upgrade", "jax", "jaxlib")
    except subprocess.CalledProcessError:  # pip has printed the reason
        return None
    return inside


def known(python, flags):
    """Returns the flags that the XLA of an environment knows, because an unknown flag ends the process."""
    starts = lambda flags: (
        not run(
            python, "-c", "import jax; jax.devices()", env=os.environ | {"XLA_FLAGS": flags}, capture_output=True
        ).returncode
    )
    return flags if starts(flags) else " ".join(filter(starts, flags.split()))


def test(version, age, inside, sessions, alone):
    """Runs the tests in one environment. Returns a row of the table.

    Args:
      version: the version of Python.
      age: "oldest", "newest", "next", or a version of JAX.
      inside: the Python of the environment; None if it could not be made.
      sessions: a list of (arguments of pytest, flags of XLA).
      alone: whether no other environment is tested at the same time.
    """
    row = {
        "python": version,
        "jax": age,
        "jaxlib": "",
        "passed": 0,
        "failed": 0,
        "skipped": 0,
        "seconds": 0,
        "ok": False,
    }
    if inside is None:
        row["jax"] += " (not installed)"
        return row
    versions = "import platform, jax, jaxlib; print(platform.python_version(), jax.__version__, jaxlib.__version__)"
    row["python"], row["jax"], row["jaxlib"] = output(inside, "-c", versions).split()
    print(f"== Python {row['python']}, jax {row['jax']}: testing", flush=True)
    start, row["ok"] = time.monotonic(), True
    for i, (arguments, asked) in enumerate(sessions):
        report = TIMES / f"matrix-{version}-{age}-{i}.xml"
        report.unlink(missing_ok=True)
        # Python must import the installed jaxcgx. The repository's jaxcgx/ has no native module.
        environ = os.environ | {"PYTHONSAFEPATH": "1"}
        if flags := known(inside, asked):
            environ["XLA_FLAGS"] = flags
        workers = ["-n", 2, "--dist", "worksteal"] if alone else []
        result = run(
            *[inside, "-m", "pytest", f"--junitxml={report}", *workers, *arguments],
            cwd=ROOT,
            env=environ,
            stdout=None if alone else subprocess.PIPE,
            stderr=None if alone else subprocess.STDOUT,
        )
        print(result.stdout or "", end="", flush=True)
        row["ok"] &= result.returncode == 0  # it is not 0 if pytest finds no tests
        if report.exists():
            suite = xml.parse(report).find("testsuite").attrib
            failed, skipped = int(suite["failures"]) + int(suite["errors"]), int(suite["skipped"])
            row["failed"] += failed
            row["skipped"] += skipped
            row["passed"] += int(suite["tests"]) - failed - skipped
    row["seconds"] = round(time.monotonic() - start, 1)
    return row


COLUMNS = ["python", "jax", "jaxlib", "passed", "failed", "skipped", "seconds"]


def show(rows, missing):
    table = [COLUMNS] + [[str(row[c]) for c in COLUMNS] for row in rows]
    widths = [max(map(len, column)) for column in zip(*table)]
    print()
    for line, ok in zip(table, [True] + [row["ok"] for row in rows]):
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths)) + ("" if ok else "  FAILED"))
    for version, why in missing.items():
        print(f"Python {version}: {why}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="two runs of the tests marked short; writes no file")
    parser.add_argument("--next", action="store_true", help="one such run with the newest JAX, supported or not")
    parser.add_argument("--flags", default="", help="XLA_FLAGS with which the tests compile")
    parser.add_argument("--usual", nargs="*", default=[], help="tests that compile without these flags")
    options = parser.parse_args()
    short = options.short or options.next

    default = f"{sys.version_info.major}.{sys.version_info.minor}"
    versions = sorted({*PYTHONS, default}, key=lambda v: int(v.split(".")[1]))
    found, missing = {}, {}
    for version in versions:
        python, why = find(version)
        if python:
            found[version] = python
        else:
            missing[version] = why
    if not found:
        sys.exit("matrix: no usable Python: " + "; ".join(f"{v}: {why}" for v, why in missing.items()))

    if short:
        oldest = default if default in found else next(iter(found))
        newest = list(found)[-1]
        pairs = [(newest, "next")] if options.next else [(oldest, "oldest"), (newest, "newest")]
    else:
        pairs = [(version, age) for version in found for age in ("oldest", "newest")]
        pairs += [BETWEEN] if BETWEEN[0] in found else []
    if short:
        # Collecting all other files would take as long as running these tests.
        files = [str(p) for p in sorted((ROOT / "tests").rglob("test_*.py")) if "mark.short" in p.read_text()]
        sessions = [(["-m", "short", *files], options.flags)]
    else:
        others = [f"--ignore={path}" for path in options.usual]
        sessions = [(options.usual, "")] * bool(options.usual) + [(others, options.flags)]
    wheels = {version: wheel(version, found[version]) for version, _ in pairs}
    with concurrent.futures.ThreadPoolExecutor(2) as pool:  # pip uses one core
        make = lambda pair: environment(pair[0], found[pair[0]], pair[1], wheels[pair[0]], short)
        insides = list(pool.map(make, pairs))
    with concurrent.futures.ThreadPoolExecutor(2 if short else 1) as pool:
        rows = list(pool.map(lambda pair, inside: test(*pair, inside, sessions, alone=not short), pairs, insides))
    show(rows, missing)
    if not short:
        from jaxcgx.report import results  # the jaxcgx of .venv, which runs this script

        data = results.origin("make matrix") | {"runs": rows, "not_run": missing}
        path = ROOT / "benchmarks/results/matrix.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(data, indent=1) + "\n")
        lines = [COLUMNS, ["---"] * len(COLUMNS)] + [[str(row[c]) for c in COLUMNS] for row in rows]
        table = "".join(f"| {' | '.join(line)} |\n" for line in lines)
        lacking = "".join(f"\nPython {version}: {why}.\n" for version, why in missing.items())
        path.with_suffix(".md").write_text(f"Made by `make matrix` on {data['date']}.\n\n{table}{lacking}")
    sys.exit(not all(row["ok"] for row in rows))


if __name__ == "__main__":
    main()
