"""Arrays with a row for each rank, in states: their specs, their gather over MPI, and other numbers of ranks."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from jaxcgx.checks import check_integer, wrong
from jaxcgx.train.division import addable
from jaxcgx.train.exchange import keeps
from jaxcgx.train.outputs import fold_keys
from jaxcgx.train.state import ExchangeState, Pending, PerRank
from jaxcgx.train.update import check_nesting, warn_of_momentum
from jaxcgx.transports.axes import check_axis_names, is_communicator
from jaxcgx.typing import AxisName, PyTree, Specs


def has_rows(node: Any) -> bool:
    """Returns whether a node of a state has fields with a row for each rank."""
    return isinstance(node, ExchangeState | PerRank | Pending)


def rows_keep(tree: PyTree) -> PyTree:
    """Returns a tree like this one, which says of each array what its rows keep for another number of ranks.

    It is the "sum" or the "mean" over the ranks, or "zeros": nothing. "" is for arrays without rows.
    """
    all_of = lambda what, part: jax.tree_util.tree_map(lambda _: what, part)

    def of_node(node: Any) -> Any:
        if isinstance(node, ExchangeState):
            return ExchangeState(keeps(node.own), all_of("", node.shared))
        if isinstance(node, Pending):
            return Pending(all_of("mean", node.grads), all_of("zeros", node.ticket), "", node.order)
        return all_of("mean" if isinstance(node, PerRank) else "", node)

    return jax.tree_util.tree_map(of_node, tree, is_leaf=has_rows)


def reshard_state(state: PyTree, new_size: int) -> PyTree:
    """Returns a state, converted to another number of ranks.

    Residuals keep their sum over ranks. If the number of samples per rank stays the same, the delayed part of a
    sample's gradient then counts as much as a new gradient. Momentum keeps its mean over ranks, which is the momentum
    of the mean gradient. Both are spread evenly over the new ranks. In a model's state per rank (`make_train_step`),
    floating-point arrays keep their mean, other numbers are the first rank's, and random keys are folded with the new
    ranks.

    The new arrays per rank are NumPy arrays, except random keys. The others are copies, so a step that donates the new
    state leaves the old one alone. For the number of ranks that the state has already, the result is the state itself.
    Put the state on the new mesh:

        jax.device_put(state, jax.tree.map(lambda spec: NamedSharding(mesh, spec), cgx.state_specs(state, axis_name)))

    Args:
      state: a `TrainState`, or an optimizer's state with that of compress_gradients at any depth.
      new_size: the new number of ranks.
    """
    size = check_integer("reshard_state", "new_size", new_size, 1)
    is_pending = lambda node: isinstance(node, Pending)
    for node in filter(is_pending, jax.tree_util.tree_leaves(state, is_leaf=is_pending)):
        if node.ticket is not None:
            expected, got = "a state whose gradients have arrived", "one whose gradients are on their way"
            raise wrong("reshard_state", "state", expected, got, "call train.finish(state) before")
    kept = rows_keep(state)
    of_ranks = [x for keep, x in zip(*map(jax.tree_util.tree_leaves, (kept, state))) if keep]
    if of_ranks and all(x.shape[0] == size for x in of_ranks):
        return state
    # A step may donate the new state, so no array in it may be one of the given state's.
    own = lambda x: x.copy() if isinstance(x, np.ndarray | jax.Array) else x
    return jax.tree_util.tree_map(lambda keep, x: spread(size, keep, x) if keep else own(x), kept, state)


def spread(size: int, keep: str, rows: Any) -> Any:
    """Returns `size` equal rows with the same sum (`keep` "sum") or mean over ranks as `rows`, or zeros ("zeros").

    `reshard_state` explains the rows of integers, flags and random keys.
    """
    if keep == "zeros":
        return (np if addable(rows) else jnp).zeros((size, *rows.shape[1:]), rows.dtype)
    if rows.shape[0] == size:
        return rows
    if not addable(rows):
        ranks = jnp.arange(size)
        return jax.vmap(fold_keys)(rows[ranks % rows.shape[0]], ranks)
    if not jnp.issubdtype(rows.dtype, jnp.inexact):
        return np.broadcast_to(np.asarray(rows[0]), (size, *rows.shape[1:]))
    total = jnp.asarray(rows, jnp.float32 if rows.dtype.itemsize < 4 else rows.dtype).sum(0)
    each = total / (size if keep == "sum" else rows.shape[0])
    return np.broadcast_to(np.asarray(each.astype(rows.dtype)), (size, *each.shape))


def state_specs(opt_state: PyTree, axis_name: AxisName) -> Specs:
    """Returns the PartitionSpecs of a state, for shard_map's in_specs and out_specs.

    Arrays per rank are sharded over the axis of the ranks. All other arrays are replicated. Don't use
    optax.tree_map_params for this, because it ignores the axis of the ranks.

    Args:
      opt_state: a state, or its jax.eval_shape, with states of jaxcgx at any depth. It may be an nnx.Optimizer of Flax.
      axis_name: the axis of the ranks, or the tuple of axes, that jaxcgx's transformations were given.
    """
    if not any(map(has_rows, jax.tree_util.tree_leaves(opt_state, is_leaf=has_rows))):
        expected, got = "a state of jaxcgx, alone or inside of another", f"a {type(opt_state).__name__} without one"
        remedy = (
            "pass what init returned, or an nnx.Optimizer as it is: nnx.state(optimizer) has lost the types of the "
            "states in it; a state without compress_gradients has PartitionSpec() everywhere"
        )
        raise wrong("state_specs", "opt_state", expected, got, remedy, kind=TypeError)
    if is_communicator(axis_name):
        expected = "an axis of a mesh, or a tuple of axes"
        remedy = "over MPI a state is on one device, and needs no specs"
        raise wrong("state_specs", "axis_name", expected, f"a communicator, {axis_name!r}", remedy, kind=TypeError)
    check_nesting("state_specs", opt_state)
    warn_of_momentum("state_specs", "opt_state", opt_state)
    rows = P(check_axis_names("state_specs", axis_name))
    return jax.tree_util.tree_map(lambda keep: rows if keep else P(), rows_keep(opt_state))


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
