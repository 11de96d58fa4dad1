"""The examples run, briefly."""

import os
import pathlib
import subprocess
import sys

import pytest

EXAMPLES = pathlib.Path(__file__).parent.parent / "examples"


def test_digits(tmp_path):
    pytest.importorskip("sklearn", reason="needs the extra `examples`")
    plot = tmp_path / "curves.png"
    env = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    result = subprocess.run(
        [sys.executable, EXAMPLES / "digits.py", "--steps", "3", "--devices", "3", "--plot", plot],
        capture_output=True,
        text=True,
        timeout=300,
        env=env,
    )
    assert result.returncode == 0, result.stderr
    assert "4-bit" in result.stdout and "replicas differ by" in result.stdout
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_fsdp():
    pytest.importorskip("sklearn", reason="needs the extra `examples`")
    env = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    result = subprocess.run(
        [sys.executable, EXAMPLES / "fsdp.py", "--steps", "2", "--devices", "2"],
        capture_output=True,
        text=True,
        timeout=300,
        env=env,
    )
    assert result.returncode == 0, result.stderr
    raw, compressed = (int(line.split()[-5].replace(",", "")) for line in result.stdout.splitlines())
    assert raw > 4 * compressed
