"""Tests keep_pages: a step's arrays are on the pages of the previous step."""

import subprocess
import sys

import jax
import pytest

import jaxcgx as cgx
from jaxcgx.native import registration

# The median of the page faults of several steps, whose temporaries have twice the size of the array.
PROGRAM = """
import os, random, resource, statistics, sys
os.sched_setaffinity(0, {random.choice(list(os.sched_getaffinity(0)))})  # XLA has few threads, whose heaps grow soon
import jax, jax.numpy as jnp
import jaxcgx as cgx
how, size = sys.argv[1:]
if how != "given back":
    assert cgx.keep_pages(large=how == "all kept")
step = jax.jit(lambda x: cgx.roundtrip(jnp.cumsum(x), cgx.MaxMin(4)).sum())
x = jnp.ones(int(size) << 18)
found = []
for _ in range(14):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    jax.block_until_ready(step(x))
    found.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(int(statistics.median(found[9:])))
"""


@pytest.mark.skipif(not registration.keeps_pages(), reason="malloc is not glibc's")
def test_steps_use_pages_again(monkeypatch):
    """By default, temporaries of 32 MiB are on fresh pages in every step. Those of 80 MiB need one heap."""
    monkeypatch.delenv("MALLOC_ARENA_MAX", raising=False)  # make test sets it
    start = lambda *how: subprocess.Popen([sys.executable, "-c", PROGRAM, *how], stdout=subprocess.PIPE, text=True)
    running = [start("given back", "16"), start("kept", "16"), start("all kept", "40")]
    given_back, kept, all_kept = (int(process.communicate(timeout=120)[0]) for process in running)
    assert max(kept, all_kept) < 10 < given_back


def test_options_of_malloc(monkeypatch):
    """One heap for all threads must be set before they start. What keeps the heaps of threads may also be set later."""
    options = []
    # Nothing changes in this process.
    monkeypatch.setattr(registration, "_mallopt", lambda: lambda *option: options.append(option) or 1)
    jax.devices()
    assert cgx.keep_pages()
    with pytest.warns(UserWarning, match=r"jaxcgx.keep_pages\(large=True\): expected a call before JAX's first"):
        assert cgx.keep_pages(large=True)
    assert options == [(-1, -1), (-4, 0), (-2, 2**26), (-1, -1), (-4, 0), (-8, 1)]


def test_without_glibc(monkeypatch):
    monkeypatch.setattr(registration, "_mallopt", lambda: None)
    assert not cgx.keep_pages()
