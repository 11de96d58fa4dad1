"""Tests PowerSGD over MPI: the results are those of a mesh, except for the order of sums, and the same on every rank.

With feedback, nothing is lost.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_trees, normal

import jaxcgx as cgx

pytest.importorskip("mpi4jax", reason="needs the extra `mpi`")

from processes import COMM, mine, on_mesh, same_everywhere

N, CODEC = COMM.size, cgx.PowerSGD(2)


def steps(mean):
    """Returns the (mean, residuals, factors) of two steps with the same gradients."""

    def run(x):
        first = mean(x, jax.tree.map(jnp.zeros_like, x), cgx.init_factors(x, CODEC))
        return first, mean(x, *first[1:])

    return run


@pytest.mark.parametrize("nodes", [False, True], ids=["ranks", "nodes"])
def test_as_over_a_mesh(nodes):
    """With "nodes", all ranks are on one node. Their sum is then exact."""
    x = {"w": normal((N, 30, 40)), "v": normal((N, 30, 40), 1), "b": normal((N, 40), 2)}
    comm, codec = (cgx.mpi.hierarchy(), {"cross": CODEC, "inner": cgx.Raw()}) if nodes else (None, CODEC)
    over_mpi = steps(
        lambda x, e, q: cgx.mpi.compressed_allreduce(x, codec, comm, op="mean", residuals=e, factors=q, check=True)
    )
    found = jax.jit(over_mpi)(mine(x))
    if nodes:  # one node: `cross` has one rank, so everything travels raw
        for mean, lost, factors in found:
            assert_trees(lambda y, leaf: np.testing.assert_allclose(y, leaf.mean(0), atol=1e-6), mean, x)
            assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves((lost, factors)))
        return
    expected = on_mesh(
        steps(lambda x, e, q: cgx.compressed_pmean(x, "a", CODEC, carry=cgx.Carry(residuals=e, factors=q))), x
    )
    assert_trees(lambda y, there: np.testing.assert_allclose(y, there, atol=1e-5), found, expected)
    assert same_everywhere([(mean, factors) for mean, _, factors in found])
    for mean, lost, _ in found[:1]:
        for name in x:
            total = sum(COMM.allgather(np.asarray(lost[name], np.float64)))
            np.testing.assert_allclose(N * np.asarray(mean[name], np.float64) + total, x[name].sum(0), atol=1e-5)


def test_through_shared_memory():
    """`inner` sums over the ranks of this node."""
    x = {"w": normal((N, 30, 40))}
    inner = cgx.mpi.hierarchy().inner
    over = lambda comm: jax.jit(lambda x: cgx.mpi.compressed_allreduce(x, CODEC, comm))(mine(x))
    np.testing.assert_allclose(over(inner)["w"], over(None)["w"], atol=1e-5)
