"""Helpers for tests in mpirun's ranks, which compare with a mesh of as many devices in one process."""

import jax
import numpy as np
from mpi4py import MPI
from ranks import mesh, on_ranks

COMM = MPI.COMM_WORLD


def on_mesh(f, x, comm=COMM, sizes=None):
    """Returns this rank's part of f(x) over a mesh of the size of `comm`, or of `sizes`.

    `x` has leaves [ranks, ...]. The first rank computes the result for all, because the ranks share a few cores.
    """
    sizes = sizes or (comm.size,)
    found = None
    if comm.rank == 0:
        cut = jax.tree.map(lambda leaf: np.reshape(leaf, (*sizes, *leaf.shape[1:])), x)
        found = jax.tree.map(
            lambda y: np.asarray(y).reshape(-1, *y.shape[len(sizes) :]), on_ranks(f, mesh(*sizes), check_vma=False)(cut)
        )
    return jax.tree.map(lambda y: y[comm.rank], comm.bcast(found))


def mine(x, comm=COMM):
    """Returns this rank's part of leaves [ranks, ...]."""
    return jax.tree.map(lambda leaf: np.asarray(leaf)[comm.rank], x)


def same_everywhere(x, comm=COMM):
    """Returns whether every rank has the same bits. `x` is a tree."""
    assert jax.tree.leaves(x)
    return len(set(comm.allgather(b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(x))))) == 1
