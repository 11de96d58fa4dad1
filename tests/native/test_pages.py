"""Tests keep_pages: a step's arrays are on the pages of the previous step."""

import subprocess
import sys

import jax
import pytest

import jaxcgx as cgx
from jaxcgx.native import registration

# The median of the page faults of several steps. Arrays have 40 MiB, because glibc always keeps arrays below 32 MiB.
PROGRAM = """
import resource, statistics, sys
import jax, jax.numpy as jnp
import jaxcgx as cgx
if sys.argv[1] == "kept":
    assert cgx.keep_pages()
step = jax.jit(lambda x: cgx.roundtrip(x, cgx.MaxMin(4)))
x = jnp.ones(10 << 20)
found = []
for _ in range(20):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    jax.block_until_ready(step(x))
    found.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(int(statistics.median(found[9:])))
"""


@pytest.mark.skipif(not registration.keeps_pages(), reason="malloc is not glibc's")
def test_steps_use_pages_again():
    start = lambda how: subprocess.Popen([sys.executable, "-c", PROGRAM, how], stdout=subprocess.PIPE, text=True)
    running = [start(how) for how in ("kept", "given back")]
    kept, given_back = (int(process.communicate(timeout=120)[0]) for process in running)
    assert kept < 20 < given_back


@pytest.mark.skipif(not registration.keeps_pages(), reason="malloc is not glibc's")
def test_too_late(monkeypatch):
    monkeypatch.setattr(registration, "_mallopt", lambda: lambda option, value: 1)  # nothing changes in this process
    jax.devices()
    with pytest.warns(UserWarning, match="jaxcgx.keep_pages: expected a call before JAX's first computation"):
        assert cgx.keep_pages()


def test_without_glibc(monkeypatch):
    monkeypatch.setattr(registration, "_mallopt", lambda: None)
    assert not cgx.keep_pages()
