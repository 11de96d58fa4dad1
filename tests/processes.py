"""The ranks of mpirun for the tests, and what a mesh with as many devices in one process gives them."""

import jax
import numpy as np
from mpi4py import MPI
from ranks import mesh, on_ranks

COMM = MPI.COMM_WORLD


def on_mesh(f, x, comm=COMM, sizes=None):
    """This rank's part of f(x) over a mesh of the size of `comm`, or of `sizes`. x: leaves [ranks, ...]. The first rank
    computes
    it for all: they share a few cores."""
    sizes = sizes or (comm.size,)
    found = None
    if comm.rank == 0:
        cut = jax.tree.map(lambda leaf: np.reshape(leaf, (*sizes, *leaf.shape[1:])), x)
        found = jax.tree.map(
            lambda y: np.asarray(y).reshape(-1, *y.shape[len(sizes) :]), on_ranks(f, mesh(*sizes), check_vma=False)(cut)
        )
    return jax.tree.map(lambda y: y[comm.rank], comm.bcast(found))


def mine(x, comm=COMM):
    """This rank's part of leaves [ranks, ...]."""
    return jax.tree.map(lambda leaf: np.asarray(leaf)[comm.rank], x)


def same_everywhere(x, comm=COMM):
    """Whether every rank has the same bits, of one leaf or more."""
    assert jax.tree.leaves(x)
    return len(set(comm.allgather(b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(x))))) == 1
