"""scripts/gpu_check without a GPU, and the report that it writes, of invented measurements."""

import json
import os
import pathlib
import shutil
import subprocess
import sys
import time
import types

import jax.numpy as jnp
import numpy as np
import pytest
from helpers import load_script, normal, one_nan

import jaxcgx as cgx
from jaxcgx.native import ops
from jaxcgx.native.layout import Layout

ROOT = pathlib.Path(__file__).parent.parent


@pytest.fixture
def gpu_check(monkeypatch):
    return load_script(ROOT / "scripts/gpu_check", monkeypatch)


@pytest.fixture
def gpu_kernels(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "")  # which it adds to
    return load_script(ROOT / "benchmarks/gpu_kernels.py", monkeypatch)


def run(*arguments):
    env = {k: v for k, v in os.environ.items() if k != "PYTHONSAFEPATH"}  # scripts import their neighbours
    return subprocess.run([sys.executable, *map(str, arguments)], capture_output=True, text=True, timeout=300, env=env)


@pytest.mark.parametrize(
    ("script", "arguments", "status", "words"),
    [
        ("scripts/gpu_check", [], 1, "gpu_check: no GPU: "),
        ("scripts/gpu_check", ["everything"], 2, "PART: expected test or bench, got everything"),
        ("benchmarks/gpu_kernels.py", [], 1, "gpu_kernels.py: no GPU: "),
        ("benchmarks/gpu_kernels.py", ["--size", "0"], 2, "--repeats and --size: expected at least 1"),
    ],
)
def test_what_is_refused(script, arguments, status, words):
    result = run(ROOT / script, *arguments)
    assert result.returncode == status and words in result.stderr and "Traceback" not in result.stderr


def test_missing_tools_are_named(gpu_check, monkeypatch):
    monkeypatch.setattr(gpu_check, "PACKAGES", ["no-such-package"])
    monkeypatch.setattr(gpu_check.cuda, "nvcc", lambda: None)
    monkeypatch.setattr(gpu_check.shutil, "which", lambda *args, **kwargs: None)
    with pytest.raises(SystemExit) as error:
        gpu_check.find_tools()
    for words in ("pip install no-such-package", "nvcc on the PATH", "cmake on the PATH"):
        assert words in str(error.value)


TESTS = """<testsuites><testsuite name="pytest" tests="4" time="12.34">
<testcase classname="tests.gpu.test_bytes" name="test_one" time="1"/>
<testcase classname="tests.gpu.test_bytes" name="test_two" time="1"><failure message="differs">...</failure></testcase>
<testcase classname="tests.gpu.test_bytes" name="test_three" time="1"><error message="broken">...</error></testcase>
<testcase classname="tests.gpu.test_execution" name="test_four" time="0"><skipped message="mpi4jax is not installed"/></testcase>
</testsuite></testsuites>"""  # noqa: E501 (what pytest writes)
ABOUT = dict(
    date="2026-01-02",
    commit="abc1234",
    checksum="1",
    device="NVIDIA H200",
    compute_capability="9.0",
    versions=dict(python="3.12.3", jax="0.11.2"),
)


def test_the_report(gpu_check, gpu_kernels, tmp_path):
    (tmp_path / "tests.xml").write_text(TESTS)
    tests = gpu_check.read_tests(tmp_path / "tests.xml")
    assert tests["passed"] == 1 and len(tests["failed"]) == 2

    times = iter([[[0.5, 0.25], [0.5, 0.25], [0.6, 0.3]], [[0.5, 1.0]] * 3])  # of a copy and of an operation
    gpu_kernels.kernels = types.SimpleNamespace(
        **vars(gpu_kernels.kernels) | dict(measure=lambda *_: np.array(next(times)))
    )
    size = 1 << 30
    fast, slow = (gpu_kernels.measured(None, size, None, moved=size, sets=1, repeats=3) for _ in range(2))
    assert fast["share"] == 1.0 and slow["share"] == 0.25 and fast["bytes"] == size
    bench = dict(
        size_bytes=size,
        repeats=3,
        rows=[
            dict(name="encode MaxMin 4", goal=0.9) | fast,
            dict(name="decode MaxMin 4", goal=0.9) | slow,
            dict(name="encode Sign", goal=0.9, why_not="RuntimeError: XLA copies"),
        ],
        rivals=[
            dict(name="jnp: encode MaxMin 4") | slow,
            dict(name="Triton: encode MaxMin 4", why_not="ModuleNotFoundError: No module named 'torch'"),
        ],
    )
    bench |= dict(ok=False, table=gpu_kernels.lines(bench))

    first = gpu_check.write(tmp_path / "results", ABOUT | dict(tests=tests | dict(ok=False)))
    assert first.name == "gpu-nvidia-h200.md" and "encode MaxMin 4" not in first.read_text()
    path = gpu_check.write(tmp_path / "results", ABOUT | dict(kernels=bench))  # keeps the tests of the same sources
    text = path.read_text()
    for words in (
        "NVIDIA H200 (compute capability 9.0), python 3.12.3, jax 0.11.2, commit abc1234.",
        "Tests: 1 passed, 2 failed, 1 skipped in 12 s.",
        "- FAILED: tests.gpu.test_bytes::test_two",
        "- skipped: tests.gpu.test_execution::test_four: mpi4jax is not installed",
        "| encode Sign | not measured: RuntimeError: XLA copies | | | | | |",
        "not measured: ModuleNotFoundError",
    ):
        assert words in text
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| ")]
    assert ["encode MaxMin 4", "4295", "0.2500", "4295", "1.000", "0.90", "✓"] in rows
    assert ["decode MaxMin 4", "4295", "1.0000", "1074", "0.250", "0.90", "✗"] in rows
    assert json.loads(path.with_suffix(".json").read_text())["kernels"]["rows"][0]["share"] == 1.0
    other = gpu_check.write(
        tmp_path / "results", ABOUT | dict(checksum="2", kernels=dict(ok=False, error="out of memory"))
    )
    assert "The benchmark failed: out of memory" in other.read_text() and "Tests:" not in other.read_text()


@pytest.mark.parametrize(
    ("passed", "skipped", "ok"),
    [
        (3, {}, True),
        (3, {"a": "mpi4jax is not installed"}, True),
        (0, {"a": "mpi4jax is not installed"}, False),
        (0, {}, False),
        (3, {"a": "JAX sees no GPU (unknown backend)"}, False),
    ],
)
def test_a_run_that_tested_nothing_is_no_success(gpu_check, monkeypatch, tmp_path, passed, skipped, ok):
    monkeypatch.setattr(gpu_check, "FOLDER", tmp_path)
    monkeypatch.setattr(gpu_check.cuda, "test", lambda *_: (tmp_path / "tests.xml").touch() is None)
    monkeypatch.setattr(gpu_check, "read_tests", lambda _: dict(passed=passed, skipped=skipped))
    assert gpu_check.run_tests("python")["ok"] == ok


def test_the_environment_has_every_package_of_this_python(gpu_check, monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(tmp_path / "first/site-packages")
    monkeypatch.syspath_prepend(tmp_path / "second/dist-packages")
    for file in (
        "first/site-packages/of_the_first.py",
        "second/dist-packages/of_the_second.py",
        "wheel/of_the_wheel.py",
    ):
        (tmp_path / file).parent.mkdir(parents=True)
        (tmp_path / file).touch()
    wheel = shutil.make_archive(tmp_path / "made", "zip", tmp_path / "wheel")
    inside = gpu_check.cuda.environment(tmp_path, wheel)
    subprocess.run([inside, "-P", "-c", "import of_the_first, of_the_second, of_the_wheel"], check=True, timeout=60)


def test_a_row_that_fails_is_recorded_and_the_others_measured(gpu_kernels, monkeypatch, tmp_path):
    def fail(*_):
        raise RuntimeError("XLA copies an array\nof any shape")

    times = types.SimpleNamespace(**vars(gpu_kernels.kernels) | dict(measure=lambda *_: np.array([[0.5, 0.5]])))
    make = lambda *_: (None, 1 << 20, 1)
    for attribute, value in dict(
        Copy=lambda size: None,
        kernels=times,
        rivals=dict,
        registration=types.SimpleNamespace(MODULE=types.SimpleNamespace(build_info=lambda: {"cuda": "13.0"})),
        rows=lambda: {
            name: (m, None, None, "float32", 0.9) for name, m in dict(good=make, bad=fail, better=make).items()
        },
    ).items():
        monkeypatch.setattr(gpu_kernels, attribute, value)
    monkeypatch.setattr(gpu_kernels.jax, "devices", lambda platform: [types.SimpleNamespace(device_kind="NVIDIA H200")])
    monkeypatch.setattr(sys, "argv", ["gpu_kernels.py", "--size", "1", "--out", str(tmp_path / "out.json")])
    with pytest.raises(SystemExit, match="gpu_kernels.py: not measured: bad$"):
        gpu_kernels.main()
    good, bad, better = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert good["share"] == better["share"] == 0.5 and bad["why_not"] == "RuntimeError: XLA copies an array"


@pytest.mark.parametrize("codec", [cgx.Raw(), cgx.MaxMin(4, 64, skip_incomplete=True)], ids=repr)
def test_only_the_bits_of_nans_in_raw_floats_are_left_open(codec):
    leaves = [normal(100).at[-1].set(np.nan), normal(30, 1, jnp.bfloat16).at[-1].set(np.nan)]
    layout = Layout.of(codec, leaves, chunks=2)
    payload = np.asarray(ops.encode(layout, leaves))
    assert (one_nan(layout, payload) == payload).all()
    free = []
    for at in np.ndindex(payload.shape):
        other = payload.copy()
        other[at] ^= 1
        if (one_nan(layout, other) == payload).all():
            free.append(at)
        assert (one_nan(layout, other[at[0]], at[0]) == one_nan(layout, other)[at[0]]).all()
    assert len(free) == 3  # the bytes of the only NaN, except the one with its sign


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("gpu", True),
        ("gpu and not short", True),
        ("(gpu)", True),
        ("", False),
        ("not gpu", False),
        ("short", False),
        ("gpus", False),
    ],
)
def test_which_runs_are_for_the_gpu(pytestconfig, expression, expected):
    conftest = next(p for p in pytestconfig.pluginmanager.get_plugins() if hasattr(p, "for_gpu"))
    assert conftest.for_gpu(types.SimpleNamespace(option=types.SimpleNamespace(markexpr=expression))) == expected


def test_processes_end_with_all_that_they_started(monkeypatch, tmp_path):
    execution = load_script(ROOT / "tests/gpu/test_execution.py", monkeypatch)
    assert (
        execution.finish(*(execution.start("bash", "-c", f"seq {n}; exit {n % 2}") for n in (30_000, 3)))[1]
        == "1\n2\n3\n"
    )
    assert (
        execution.finish(execution.start("bash", "-c", f"sleep 600 & echo $! > {tmp_path}/child; wait"), timeout=1)
        is None
    )
    child = pathlib.Path("/proc", (tmp_path / "child").read_text().strip(), "stat")
    end = time.monotonic() + 30
    while child.exists() and child.read_text().split()[2] != "Z":  # nobody may have waited for it yet
        assert time.monotonic() < end
