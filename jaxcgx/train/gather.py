"""Gathers the rows of states over MPI, of which each process has only its own, for a checkpoint."""

from typing import Any

import jax
import numpy as np

from jaxcgx.train.division import addable
from jaxcgx.train.reshard import rows_keep
from jaxcgx.typing import PyTree


def gather_state(state: PyTree, comm: Any) -> PyTree:
    """Returns a state over MPI with the rows of all ranks, as on a mesh. All ranks except the first get None.

    All ranks must call it. The rows are NumPy arrays, except rows of random keys. From a checkpoint of this state,
    `jaxcgx.restore_state` gives each rank its own row again.

    Args:
      state: this rank's `TrainState`, or its state of an optimizer or of a model, or a tree of such states.
      comm: the MPI communicator or `jaxcgx.mpi.hierarchy()` of the ranks.
    """
    from jaxcgx.train.processes import net_over  # this import starts MPI, which is optional

    net = net_over("gather_state", "comm", comm)
    jax.effects_barrier()  # programs that still run may use the same communicator

    def gather(row: Any) -> Any:
        if not addable(row):
            words = gather(jax.random.key_data(row))
            return words if words is None else jax.random.wrap_key_data(words, impl=jax.random.key_impl(row))
        row = np.ascontiguousarray(row)
        words = row.view(f"u{row.itemsize}")  # MPI doesn't know bfloat16
        rows = np.empty((net.size, *row.shape[1:]), words.dtype) if net.rank == 0 else None
        net.comm.Gather(words, rows)
        return None if rows is None else rows.view(row.dtype)

    whole = jax.tree_util.tree_map(lambda keep, x: gather(x) if keep else x, rows_keep(state), state)
    return whole if net.rank == 0 else None
