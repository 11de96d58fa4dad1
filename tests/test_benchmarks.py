"""Tests parts of benchmarks, and that they set up devices only after they have imported one another."""

import os
import pathlib
import subprocess
import sys

import pytest
from helpers import load_script

BENCHMARKS = pathlib.Path(__file__).resolve().parent.parent / "benchmarks"
IMPORT = """
import importlib, sys
from jax._src import xla_bridge
sys.path.insert(0, sys.argv[1])
for name in sys.argv[2:]:
    importlib.import_module(name)
    assert not xla_bridge.backends_are_initialized(), f"importing {name} sets up devices"
"""


def test_importing_them_sets_up_no_device():
    names = sorted(path.stem for path in BENCHMARKS.glob("*.py") if not path.stem.endswith("_torch"))
    assert {"collectives", "lab", "training_speed"} <= set(names)
    command = [sys.executable, "-P", "-c", IMPORT, BENCHMARKS, *names]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr


def test_bandwidths_are_those_of_nccl_tests(monkeypatch):
    assert load_script(BENCHMARKS / "collectives.py", monkeypatch).bandwidths(4, 2e9, 1) == (2, 3)


def test_first_run(tmp_path, monkeypatch, capfd):
    """It is in a fresh clone of the last commit, and an error ends it."""
    script = load_script(BENCHMARKS / "first_run.py", monkeypatch)
    monkeypatch.setattr(script, "ROOT", tmp_path)
    for name in "GIT_AUTHOR_NAME", "GIT_AUTHOR_EMAIL", "GIT_COMMITTER_NAME", "GIT_COMMITTER_EMAIL":
        monkeypatch.setenv(name, "tests")
    monkeypatch.setenv("MAKEFLAGS", "n")  # as if another make had started it; it would run nothing
    makefile = "recipe:\n\t@touch built; echo in $$PWD\n\t@test -f built && : recipes/train.py\n"
    (tmp_path / "Makefile").write_text(makefile)
    git = lambda *words: subprocess.run(["git", *words], cwd=tmp_path, check=True, env=os.environ)
    for words in ["init", "-q"], ["add", "Makefile"], ["commit", "-qm", "tests"]:
        git(*words)
    (tmp_path / "Makefile").write_text("recipe:\n\t@false\n")
    installing, command = script.first_run("recipe", "recipes/train.py")
    assert 0 <= installing < 300 and 0 <= command < 300
    assert f"in {tmp_path}\n" not in capfd.readouterr().err and not (tmp_path / "built").exists()
    git("commit", "-qam", "tests")
    with pytest.raises(subprocess.CalledProcessError):
        script.first_run("recipe", "recipes/train.py")
