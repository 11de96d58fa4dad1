"""Tests PowerSGD over MPI: the results are those of a mesh, except for the order of sums, and the same on every rank.

With feedback, nothing is lost.
"""

import jax
import numpy as np
import pytest
from helpers import assert_trees, normal

import jaxcgx as cgx

pytest.importorskip("mpi4jax", reason="needs the extra `mpi`")

from processes import COMM, mine, on_mesh, same_everywhere

N, CODEC = COMM.size, cgx.PowerSGD(2)


def steps(mean):
    """Returns the (mean, carry) of two steps with the same gradients."""

    def run(x):
        first = mean(x, cgx.init_carry(CODEC, x))
        return first, mean(x, first[1])

    return run


@pytest.mark.parametrize("nodes", [False, True], ids=["ranks", "nodes"])
def test_as_over_a_mesh(nodes, monkeypatch):
    """With "nodes", all ranks are on one node. Their sum is then exact."""
    x = {"w": normal((N, 30, 40)), "v": normal((N, 30, 40), 1), "b": normal((N, 40), 2)}
    comm, codec = (cgx.mpi.hierarchy(), {"cross": CODEC, "inner": cgx.Raw()}) if nodes else (COMM, CODEC)
    over = lambda axis, codec: steps(lambda x, carry: cgx.compressed_pmean(x, axis, codec, carry=carry))
    monkeypatch.setattr(cgx.mpi, "CHECK", True)
    found = jax.jit(over(comm, codec))(mine(x))
    if nodes:  # one node: `cross` has one rank, so everything travels raw
        for mean, carry in found:
            assert_trees(lambda y, leaf: np.testing.assert_allclose(y, leaf.mean(0), atol=1e-6), mean, x)
            assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves(carry))
        return
    expected = on_mesh(over("a", CODEC), x)
    assert_trees(lambda y, there: np.testing.assert_allclose(y, there, atol=1e-5), found, expected)
    assert same_everywhere([(mean, carry.factors) for mean, carry in found])
    mean, carry = found[0]
    for name, lost in carry.residuals.items():  # None: raw leaves lose nothing
        total = sum(COMM.allgather(np.asarray(0 if lost is None else lost, np.float64)))
        np.testing.assert_allclose(N * np.asarray(mean[name], np.float64) + total, x[name].sum(0), atol=1e-5)


def test_through_shared_memory():
    """`inner` sums over the ranks of this node."""
    x = {"w": normal((N, 30, 40))}
    inner = cgx.mpi.hierarchy().inner
    over = lambda comm: jax.jit(lambda x: cgx.compressed_psum(x, comm, CODEC))(mine(x))
    np.testing.assert_allclose(over(inner)["w"], over(COMM)["w"], atol=1e-5)
