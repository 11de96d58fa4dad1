"""Gathers the rows of optimizer states over MPI, of which each process has only its own, for a checkpoint."""

from typing import Any

import jax
import numpy as np

from jaxcgx.optim.accumulation import addable
from jaxcgx.optim.nesting import has_rows


def gather_state(opt_state: Any, comm: Any) -> Any:
    """Returns a state over MPI with the rows of all ranks, as on a mesh. All ranks except the first get None.

    All ranks must call it. The rows are NumPy arrays, except rows of random keys. From a checkpoint of this state,
    `jaxcgx.restore_state` gives each rank its own row again.

    Args:
      opt_state: this rank's state of an optimizer or of a model, or a tree of such states.
      comm: the MPI communicator or `jaxcgx.mpi.hierarchy()` that the optimizer's transformations were given.
    """
    from jaxcgx.optim.processes import Processes  # this import starts MPI, which is optional

    net = Processes.over("gather_state", comm, "comm").net()
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

    def of_node(node: Any) -> Any:
        if not has_rows(node):
            return node
        return node._replace(**{name: jax.tree_util.tree_map(gather, getattr(node, name)) for name in node.per_rank})

    whole = jax.tree_util.tree_map(of_node, opt_state, is_leaf=has_rows)
    return whole if net.rank == 0 else None
