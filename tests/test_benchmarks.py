"""Tests that benchmarks set up devices only after they have imported one another."""

import pathlib
import subprocess
import sys

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
