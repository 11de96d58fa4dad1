"""Tests what explain reports for programs over MPI."""

import jax.numpy as jnp
import pytest
from helpers import normal, planned

import jaxcgx as cgx

pytest.importorskip("mpi4jax", reason="needs the extra `mpi`")
from processes import COMM

from jaxcgx.native.layout import Layout

N, CODEC = COMM.size, cgx.MaxMin(4)


@pytest.mark.skipif(N == 1, reason="needs 2 ranks or more: mpirun")
def test_bytes_are_counted():
    def step(x):
        return cgx.compressed_psum({"n": jnp.ones(3, jnp.int32), "w": x}, COMM, planned(CODEC, schedule="two_shot"))

    found = cgx.explain(step, normal(3000), show=False)
    part = Layout(CODEC, ((3000,),), (jnp.float32,), N).chunk_bytes
    over = (f"{N} ranks over MPI",)
    assert {(c.operation, c.axes, c.bytes, c.codec, c.leaves) for c in found.collectives} == {
        ("all-reduce", over, round(2 * (N - 1) / N * 12), "Raw()", ("['n']",)),
        ("all-to-all", over, (N - 1) * part, "MaxMin(bits=4)", ("['w']",)),
        ("all-gather", over, (N - 1) * part, "MaxMin(bits=4)", ("['w']",)),
        ("all-gather", over, (N - 1) * 16, "Raw()", ("digest",)),  # with these, ranks check whether they differ
    }
    assert {c.function for c in found.collectives} == {"compressed_psum"}
    assert found.ratio > 3 and {c.over for c in found.collectives} == {"MPI"} and len(found.raw) == 1
