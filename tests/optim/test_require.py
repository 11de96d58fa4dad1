"""Tests the package without optax, which is an extra."""

import subprocess
import sys

import optax
import pytest
from errors import raises, says
from training import CODEC, PARAMS

import jaxcgx as cgx

STATE = cgx.compress_gradients("data", CODEC, axis_size=4).init(PARAMS)


def test_importing_jaxcgx_imports_no_optax():
    subprocess.run(
        [sys.executable, "-c", "import sys; sys.modules['optax'] = None; import jaxcgx"], check=True, timeout=120
    )


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("compress_gradients", lambda: cgx.compress_gradients("data", CODEC)),
        ("compressed", lambda: cgx.compressed(optax.sgd(1.0), "data", CODEC)),
        ("state_specs", lambda: cgx.state_specs(STATE, "data")),
    ],
)
def test_without_optax(name, call, monkeypatch):
    monkeypatch.setitem(sys.modules, "optax", None)
    with raises(ImportError, says(name, expected="optax to be installed", remedy="pip install optax")):
        call()
