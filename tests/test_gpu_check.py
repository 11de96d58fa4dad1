"""Tests scripts/gpu_check without a GPU: its parts with small tests, and its tables with invented measurements."""

import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import pytest
from commands import ROOT
from helpers import FULL, load_script, run


@pytest.fixture
def gpu_check(monkeypatch):
    return load_script(ROOT / "scripts/gpu_check", monkeypatch)


@pytest.fixture
def gpu_kernels(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "")  # gpu_check adds to it
    return load_script(ROOT / "benchmarks/gpu_kernels.py", monkeypatch)


@pytest.mark.parametrize(
    ("script", "arguments", "status", "words"),
    [
        ("scripts/gpu_check", ["everything"], 2, "PART: expected some of build, kernel, "),
        ("benchmarks/gpu_kernels.py", [], 1, "gpu_kernels.py: no GPU: "),
    ],
)
def test_what_is_refused(script, arguments, status, words):
    said = run(sys.executable, ROOT / script, *arguments, status=status, env={"PYTHONSAFEPATH": ""}).stderr
    assert words in said and "Traceback" not in said


def test_a_machine_without_a_gpu_gets_a_report(tmp_path):
    """Every assumption is named, not only the first that is wrong."""
    command = sys.executable, ROOT / "scripts/gpu_check", "--out", tmp_path
    result = run(*command, status=1, env={"PYTHONSAFEPATH": ""})  # scripts import the scripts next to them
    assert result.stderr.startswith("gpu_check: no GPU, so nothing was run (")
    report = (tmp_path / "gpu-none.md").read_text()
    assert ": no GPU, python " in report and "| kernel | left |" in report
    for name in ("GPU", "nvcc", "to build", "compute-sanitizer", "compute mode"):
        assert re.search(f"^(ok|WRONG) +{name}: ", result.stdout, re.MULTILINE) and f"| {name} | " in report, name


def test_every_test_and_row_is_in_one_part(gpu_check, gpu_kernels):
    names = lambda path: re.findall(r"^def (test_\w+)", path.read_text(), re.MULTILINE)
    files = (ROOT / "tests/gpu").glob("test_*.py")
    tests = [f"tests/gpu/{path.name}::{name}" for path in files for name in names(path)]
    assert sorted(test for part in gpu_check.PARTS.values() for test in part.tests) == sorted(tests)
    for name in [*gpu_kernels.rows(), *gpu_kernels.rivals()]:
        assert sum(bool(part.rows and re.search(part.rows, name)) for part in gpu_check.PARTS.values()) == 1, name
    assert all(part.timeout < part.limit < 600 for part in gpu_check.PARTS.values() if part.tests)
    first_hour = list(gpu_check.PARTS)[: list(gpu_check.PARTS).index("16m") + 1]
    assert sum(gpu_check.PARTS[name].limit for name in first_hour) <= 3600
    for part in gpu_check.PARTS.values():
        assert not [path for path in gpu_check.sources(part) if not (ROOT / path).exists()]


TESTS = """
import pathlib, pytest, subprocess, time
pytestmark = pytest.mark.gpu

def test_first():
    pass

def test_hangs():
    subprocess.Popen(["sleep", "600"], start_new_session=True)
    time.sleep(600)

def test_fails():
    assert 1 == 2

def test_skips():
    pytest.skip("there is no mpirun")

@pytest.mark.parametrize("n", range(2))
def test_slow(n):
    if n == 1 and pathlib.Path(__file__).with_name("slow").exists():
        pathlib.Path(__file__).with_name("over").touch()
        time.sleep(600)
"""


ABOUT = dict(date="2026-01-02", commit="abc1234", device="NVIDIA H200", compute_capability="9.0")
ABOUT |= dict(versions=dict(python="3.12.3"), assumptions=[dict(name="nvcc", found="13.0", wrong=None)])


@pytest.fixture
def parts(gpu_check, monkeypatch, tmp_path):
    """gpu_check with parts of small tests.

    parts(*arguments) runs it, and returns the exit status and the data of the parts.
    """
    (tmp_path / "conftest.py").write_text((ROOT / "tests/gpu/conftest.py").read_text())
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu\n")
    (tmp_path / "test_small.py").write_text(TESTS)
    (tmp_path / "small.py").write_text("import pathlib, sys; pathlib.Path(sys.argv[2]).mkdir()")
    Part = gpu_check.Part
    of = lambda *names, **options: Part(60, tuple(f"test_small.py::test_{name}" for name in names), **options)
    small = dict(build=Part(60), good=of("first"), bad=of("hangs", "fails", "skips", timeout=3), skipped=of("skips"))
    small |= dict(some=of("first", "skips"), table=Part(60, script=("small.py",)), slow=of("slow"), mpi=of("first"))

    class Popen(subprocess.Popen):
        def wait(self, timeout=None):
            """Ends the time when a test says so, and not earlier, even on a busy machine."""
            while self.poll() is None:
                if (tmp_path / "over").exists():
                    raise subprocess.TimeoutExpired(self.args, timeout)
                time.sleep(0.05)
            return self.returncode

    monkeypatch.setattr(gpu_check.subprocess, "Popen", Popen)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # loading them takes longer than these tests
    monkeypatch.setenv("PYTEST_PLUGINS", "pytest_timeout")
    settings = dict(ROOT=tmp_path, FOLDER=tmp_path / "build", INSIDE=pathlib.Path(sys.executable))
    settings |= dict(BUILD="print('built')", PARTS=small, USED={"test_small.py": ()}, about=lambda machine: ABOUT)
    for name, value in settings.items():
        monkeypatch.setattr(gpu_check, name, value)
    monkeypatch.setattr(gpu_check.matrix, "checksum", lambda *paths: "1")
    assumption = gpu_check.gpu_machine.Assumption("mpirun", "none", "there is none on the PATH", ("mpi",))
    machine = gpu_check.gpu_machine.Machine("NVIDIA H200", "9.0", {}, [assumption])
    monkeypatch.setattr(gpu_check.gpu_machine, "look", lambda: machine)

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["gpu_check", "--out", str(tmp_path / "out"), *arguments])
        with pytest.raises(SystemExit) as end:
            gpu_check.main()
        found = (tmp_path / "out/gpu-nvidia-h200").glob("*.json")
        return end.value.code, {path.stem: json.loads(path.read_text()) for path in found}

    handler = signal.getsignal(signal.SIGTERM)
    yield run
    signal.signal(signal.SIGTERM, handler)


def test_parts_end_and_go_on(parts, gpu_check, tmp_path):
    (tmp_path / "slow").touch()
    status, found = parts()
    assert status == 1
    states = dict.fromkeys(["build", "good", "table"], "passed") | dict.fromkeys(["skipped", "mpi"], "not run")
    states |= dict(bad="failed", some="in part", slow="unfinished")
    assert {name: data["state"] for name, data in found.items()} == states
    results = tmp_path / "out/gpu-nvidia-h200"
    assert (results / "table").is_dir()
    bad = found["bad"]["tests"]
    assert bad["test_small.py::test_hangs"] == dict(outcome="failed", why="it did not end")
    assert bad["test_small.py::test_fails"]["why"] == "assert 1 == 2"  # it ran after the test that hangs
    assert bad["test_small.py::test_skips"]["why"] == "there is no mpirun"
    slow = found["slow"]["tests"]
    assert slow["test_small.py::test_slow[0]"]["outcome"] == "passed" and slow["test_small.py::test_slow[1]"] == {}
    assert not list(gpu_check.marked(f"GPU_CHECK={os.getpid()}."))  # all processes have ended
    report = (tmp_path / "out/gpu-nvidia-h200.md").read_text()
    for name, row in {"good": "passed | 1 |", "bad": "failed |  | 2 | 1 |", "slow": "unfinished | 1 |"}.items():
        assert f"| {name} | {row}" in report, report
    assert "- FAILED: test_small.py::test_hangs: it did not end" in report

    # Parts that have ended stay. The others continue: the slow test would pass now.
    (tmp_path / "slow").unlink()
    (tmp_path / "over").unlink()
    ended = lambda: [(results / f"{name}.json").read_text() for name in ("good", "bad")]
    before = ended()
    status, found = parts()
    assert found["slow"]["state"] == "passed" and status == 1  # mpi didn't run
    assert before == ended()
    # A finished part runs again if its file is deleted. -k goes to pytest.
    (results / "good.json").unlink()
    (tmp_path / "build/bad.log").unlink()
    assert parts("good", "bad")[0] == 1 and (results / "good.json").exists()
    assert not (tmp_path / "build/bad.log").exists()
    chosen = parts("bad", "-k", "fails")[1]["bad"]["tests"]
    assert [test["outcome"] for test in chosen.values()] == [test["outcome"] for test in bad.values()]
    assert "1 failed, 2 deselected" in (tmp_path / "build/bad.log").read_text()
    # If the build fails, only the report is still made.
    gpu_check.BUILD = "import sys; sys.exit('no compiler')"
    for part in ("build", "good"):
        (results / f"{part}.json").unlink()
    status, found = parts("good")
    assert status == 1 and found["build"]["why"] == "no compiler" and found["good"]["why"] == "there is no build"


def test_everything_runs_on_the_cpu(monkeypatch):
    """The program that the GPU tests start. The full tests run all of it."""
    everything = load_script(ROOT / "tests/gpu/everything.py", monkeypatch)
    execution = load_script(ROOT / "tests/gpu/test_execution.py", monkeypatch)
    assert execution.each_group.args == ("group", tuple(everything.GROUPS))
    on = everything.on
    monkeypatch.setattr(everything, "on", lambda platform, *args: on("cpu", *args))
    for group in everything.GROUPS if FULL else ():
        everything.main(group)
