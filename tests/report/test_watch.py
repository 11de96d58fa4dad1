"""Tests cgx.watch in one process. tests/multiprocess has a process that doesn't come."""

import gc
import logging
import threading
import time

import jax
import jax.numpy as jnp
import pytest
from helpers import python

import jaxcgx as cgx


def slow(seconds):
    def called(x):
        time.sleep(seconds)
        return x

    return jax.jit(lambda x: jax.pure_callback(called, jax.ShapeDtypeStruct((), jnp.float32), x))


def test_it_says_what_hangs(caplog):
    step = cgx.watch(slow(1.0), 0.2)
    with caplog.at_level(logging.WARNING, "jaxcgx"):
        jax.block_until_ready([step(jnp.float32(1)), step(jnp.float32(2))])
    said = [record.getMessage() for record in caplog.records]
    assert len(said) >= 4
    assert said[0].startswith("watch: call 1 of <lambda> began 0 s ago and hasn't ended. A device or")
    assert said[-1].startswith("watch: call 2 of <lambda> began ")


def test_it_ends_a_process():
    code = "import jax, time, jaxcgx as cgx; cgx.watch(lambda: time.sleep(60), 0.1, end=0.3)()"
    said = python(code, status=1, timeout=60).stderr
    assert "call 1 of <lambda>" in said
    assert said.endswith("watch: the process ends, as a call took longer than end=0.3 s\n")


def test_it_is_silent_in_time_and_ends_with_its_function(caplog):
    before = threading.active_count()
    step = cgx.watch(jax.jit(lambda x: x + 1, donate_argnums=0), 2)  # the first call compiles
    x = jnp.zeros(3)
    for _ in range(5):
        x = step(x)  # the result is donated to the next call
    assert not caplog.records and x[0] == 5 and step.lower(x).compile()
    with pytest.raises(TypeError):
        step()
    time.sleep(2.5)
    assert not caplog.records
    del step
    gc.collect()
    time.sleep(0.2)
    assert threading.active_count() == before
