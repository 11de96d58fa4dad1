"""Without its native module, with one of another version, and with JAXCGX_REFERENCE=1."""
import os
import subprocess
import sys

import pytest


def run(code, **env):
    return subprocess.run([sys.executable, "-P", "-c", code], env={**os.environ, **env}, capture_output=True, text=True, timeout=300)


@pytest.mark.short
def test_reference_mode_gives_the_same_bytes_without_a_kernel():
    code = """
import sys
sys.modules["jaxcgx.native._native"] = None  # not even loaded
import jax, jax.numpy as jnp, jaxcgx as cgx, hashlib, numpy as np
x = jnp.asarray(np.random.RandomState(0).standard_normal(500).astype(np.float32))
f = jax.jit(lambda x: cgx.encode(x, cgx.MaxMin(4, 64, "stochastic"), jax.random.key(0)))
assert "jaxcgx_encode" not in f.lower(x).compile().as_text()
print(hashlib.sha256(np.asarray(f(x)).tobytes()).hexdigest())
"""
    reference = run(code, JAXCGX_REFERENCE="1")
    native = run(code.replace('sys.modules["jaxcgx.native._native"] = None', "").replace("not in", "in"), JAXCGX_REFERENCE="0")
    assert reference.returncode == 0, reference.stderr
    assert native.returncode == 0, native.stderr
    assert reference.stdout == native.stdout


def test_a_missing_module_is_one_error_with_the_remedy():
    result = run("import sys; sys.modules['jaxcgx.native._native'] = None; import jaxcgx", JAXCGX_REFERENCE="0")
    assert result.returncode != 0
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: jaxcgx: its native module can't be loaded") and "pip install" in last and "JAXCGX_REFERENCE=1" in last


def test_a_module_of_another_version_is_refused():
    code = "import importlib.metadata as m; m.version = lambda name: '9.9'; import jaxcgx"
    result = run(code, JAXCGX_REFERENCE="0")
    last = result.stderr.strip().splitlines()[-1]
    assert result.returncode != 0 and "of version" in last and "the package of version 9.9" in last and "pip install" in last
