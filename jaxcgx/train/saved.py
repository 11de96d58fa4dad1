"""States beside training: their specs, their gather over MPI, other numbers of ranks, and Orbax checkpoints."""

import re
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from jaxcgx.checks import check_choice, check_integer, spell_array, wrong
from jaxcgx.plan.leaves import spell_path
from jaxcgx.train.division import addable
from jaxcgx.train.exchange import keeps
from jaxcgx.train.outputs import fold_keys
from jaxcgx.train.state import ExchangeState, Pending, PerRank
from jaxcgx.train.update import check_nesting, nodes, warn_of_momentum
from jaxcgx.transports.axes import as_axis_names, is_communicator
from jaxcgx.transports.base import Transport
from jaxcgx.typing import AxisName, PyTree, Specs

OP = "restore_state"
WITH_ROWS = ExchangeState, PerRank, Pending  # the nodes of a state that have fields with a row for each rank


def rows_keep(tree: PyTree) -> PyTree:
    """Returns a tree like this one, which says of each array what its rows keep for another number of ranks.

    It is the "sum" or the "mean" over the ranks, or "zeros": nothing. "" is for arrays without rows.
    """
    all_of = lambda what, part: jax.tree.map(lambda _: what, part)

    def of_node(node: Any) -> Any:
        if isinstance(node, ExchangeState):
            return ExchangeState(keeps(node.own), all_of("", node.shared))
        if isinstance(node, Pending):
            return Pending(all_of("mean", node.grads), all_of("zeros", node.ticket), "", node.order)
        return all_of("mean" if isinstance(node, PerRank) else "", node)

    return jax.tree.map(of_node, tree, is_leaf=lambda node: isinstance(node, WITH_ROWS))


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
    if any(node.ticket is not None for node in nodes(state, Pending)):
        expected, got = "a state whose gradients have arrived", "one whose gradients are on their way"
        raise wrong("reshard_state", "state", expected, got, "call train.finish(state) before")
    kept = rows_keep(state)
    of_ranks = [x for keep, x in zip(*map(jax.tree.leaves, (kept, state))) if keep]
    if of_ranks and all(x.shape[0] == size for x in of_ranks):
        return state
    # A step may donate the new state, so no array in it may be one of the given state's.
    own = lambda x: x.copy() if isinstance(x, np.ndarray | jax.Array) else x
    return jax.tree.map(lambda keep, x: spread(size, keep, x) if keep else own(x), kept, state)


def spread(size: int, keep: str, rows: Any) -> Any:
    """Returns `size` equal rows with the sum or mean of `rows`, or zeros: `keep`, as `reshard_state` explains."""
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
    if not nodes(opt_state, *WITH_ROWS):
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
    rows = P(as_axis_names("state_specs", axis_name))
    return jax.tree.map(lambda keep: rows if keep else P(), rows_keep(opt_state))


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

    whole = jax.tree.map(lambda keep, x: gather(x) if keep else x, rows_keep(state), state)
    return whole if net.rank == 0 else None


# Checkpoints


class SavedLeaf(NamedTuple):
    path: jax.tree_util.KeyPath[Any]
    value: Any
    keep: str  # as from `rows_keep`

    @property
    def name(self) -> str:
        return spell_path(self.path)

    @property
    def shape(self) -> tuple[int, ...]:
        return np.shape(_words(self.value))


def restore_state(
    path: Any, template: PyTree, *, per_rank: Mapping[str, str] | None = None, comm: Any = None
) -> PyTree:
    """Restores a checkpoint that Orbax wrote, on any number of ranks.

        state = cgx.restore_state(path, train.init(params))

    Arrays per rank of jaxcgx's states may have a different number of ranks in the checkpoint than in the template. They
    are converted as by `jaxcgx.reshard_state`: residuals keep their sum over ranks, momentum keeps its mean. With the
    same number of ranks, all bits are the same as in the checkpoint. Exchanges over `Tcp` that were in progress have
    not begun in the restored state. Each process reads its part, and doesn't wait for the others.

    Args:
      path: the absolute path of the checkpoint. A CheckpointManager saves it in folder/step/default.
      template: a tree like the one that was saved, with arrays, or jax.ShapeDtypeStructs with shardings, for the new
        ranks. The result is placed like the template.
      per_rank: other leaves that have a leading axis of ranks: {regular expression that is searched in the leaf's path:
        "sum" or "mean"}. The leaf keeps this sum or mean over the ranks. Integers are the first rank's on all ranks.
      comm: for processes of mpirun, their MPI communicator or `jaxcgx.mpi.hierarchy()`. The checkpoint has the rows of
        all ranks (`jaxcgx.gather_state`), and the template has only the process's own row.
    """
    try:
        import orbax.checkpoint as ocp
    except ImportError:
        raise ImportError(f"{OP}: expected Orbax to be installed; pip install orbax-checkpoint") from None
    net = _net(comm)
    leaves, structure = _flatten(template, per_rank or {})
    # Each process reads without the others: Orbax would let them wait for one whose reading fails.
    alone = ocp.options.MultiprocessingOptions(active_processes={jax.process_index()})
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(), multiprocessing_options=alone) as checkpointer:
        saved = _shapes(checkpointer, path)
        _check(leaves, saved)

        def read(wanted: dict[int, Any]) -> list[Any]:
            """Returns all leaves, but reads only the leaves in `wanted`, {number of a leaf: array like it}."""
            tree = structure.unflatten([wanted.get(i, ocp.PLACEHOLDER) for i in range(len(leaves))])
            args = ocp.args.PyTreeRestore(item=tree, restore_args=ocp.checkpoint_utils.construct_restore_args(tree))
            return structure.flatten_up_to(checkpointer.restore(path, args=args))

        resized = lambda leaf: net is not None or leaf.shape != saved[leaf.name]
        moved = [i for i, leaf in enumerate(leaves) if leaf.keep in ("sum", "mean") and resized(leaf)]
        lost = [i for i, leaf in enumerate(leaves) if leaf.keep == "zeros"]
        found = read({i: leaf.value for i, leaf in enumerate(leaves) if i not in moved and i not in lost})
        for i in lost:
            found[i] = _place(np.zeros(leaves[i].shape, _words(leaves[i].value).dtype), leaves[i].value)
        for i in moved:  # one leaf at a time, because the rows of all ranks are in the memory of the host
            leaf = leaves[i]
            rows = read({i: np.broadcast_to(np.zeros((), _words(leaf.value).dtype), saved[leaf.name])})[i]
            rows = _move(rows, leaf, leaf.shape[0] if net is None else net.size)
            found[i] = _place(rows if net is None else rows[net.rank : net.rank + 1], leaf.value)
    return structure.unflatten(found)


def _net(comm: Any) -> Transport | None:
    """Returns the transport over processes that have a row each, or None for a mesh."""
    mpi: Any = sys.modules.get("mpi4py.MPI")
    if comm is None:
        if mpi and mpi.Is_initialized() and mpi.COMM_WORLD.size > 1 and jax.process_count() == 1:
            # Without an error, each process would take the rows of all ranks for its own.
            expected = "the MPI communicator of the ranks, as mpirun started this process"
            raise wrong(OP, "comm", expected, None, "pass comm=MPI.COMM_SELF if the process trains alone")
        return None
    from jaxcgx.train.processes import net_over  # this import starts MPI, which is optional

    return net_over(OP, "comm", comm)


def _flatten(template: PyTree, per_rank: Mapping[str, str]) -> tuple[list[SavedLeaf], PyTree]:
    keep = jax.tree.leaves(rows_keep(template))
    leaves = [SavedLeaf(*leaf, keep) for leaf, keep in zip(jax.tree.flatten_with_path(template)[0], keep)]
    for pattern, keep in per_rank.items():
        check_choice(OP, "per_rank", keep, ("sum", "mean"))
        matching = [not leaf.keep and re.search(pattern, leaf.name) is not None for leaf in leaves]
        if not any(matching):
            raise wrong(OP, "per_rank", "regular expressions of leaves' paths", f"{pattern!r}, which no leaf has")
        leaves = [leaf._replace(keep=keep) if match else leaf for leaf, match in zip(leaves, matching)]
    if not (per_rank or nodes(template, *WITH_ROWS)):  # a state without compression counts, too
        expected = "a tree with a state of jaxcgx"
        remedy = (
            "pass what train.init or optimizer.init returned; for other arrays with a row for each rank, also "
            "per_rank={'regular expression of their paths': 'sum'}; read others with Orbax alone"
        )
        raise wrong(OP, "template", expected, f"a {type(template).__name__} without one", remedy, kind=TypeError)
    return leaves, jax.tree.structure(template)


def _shapes(checkpointer: Any, path: Any) -> dict[str, Any]:
    tree = getattr(checkpointer.metadata(path).item_metadata, "tree", None)
    if tree is None:
        remedy = "pass an absolute path; a CheckpointManager has it in folder/step/default"
        raise wrong(OP, "path", "the folder of a tree that Orbax wrote", path, remedy, kind=FileNotFoundError)
    found, _ = jax.tree.flatten_with_path(tree)
    return {spell_path(path): getattr(x, "shape", None) for path, x in found}


def _check(leaves: list[SavedLeaf], saved: dict[str, Any]) -> None:
    """Checks that the template has the leaves of the checkpoint, with the same shapes except for the number of rows."""
    if missing := [name for name in saved if name not in {leaf.name for leaf in leaves}]:
        remedy = "the template has the structure of what was saved, with the same plan and feedback"
        raise wrong(OP, "template", f"a leaf {missing[0]!r}, which the checkpoint has", "none", remedy)
    for leaf in leaves:
        if leaf.name not in saved:
            names = ", ".join(map(repr, saved))
            raise wrong(OP, "template", f"leaves of the checkpoint, {names}", "another", path=leaf.path)
        shape = leaf.shape if saved[leaf.name] is None else tuple(saved[leaf.name])
        like_rows = len(shape) > 0 and leaf.shape[1:] == shape[1:]  # the number of rows may differ
        if leaf.shape != shape and not (leaf.keep and like_rows):
            has_axis = not leaf.keep and leaf.shape[1:] == shape[1:]
            remedy = "if its first axis is that of the ranks, pass per_rank={'regular expression of its path': 'mean'}"
            expected = f"{list(shape)}, the shape in the checkpoint"
            raise wrong(OP, "template", expected, spell_array(leaf.value), remedy * has_axis, path=leaf.path)
        if getattr(leaf.value, "sharding", True) is None:
            expected = "an array, or a jax.ShapeDtypeStruct with a sharding"
            raise wrong(OP, "template", expected, leaf.value, "pass what init returned", path=leaf.path)


def _words(x: Any) -> Any:
    is_key = hasattr(x, "dtype") and not addable(x)
    return jax.eval_shape(jax.random.key_data, x) if is_key else x


def _move(rows: np.ndarray, leaf: SavedLeaf, size: int) -> Any:
    """Returns the rows of a leaf, converted to `size` ranks. Random keys are words, before and after."""
    if addable(leaf.value):
        return np.asarray(spread(size, leaf.keep, rows))
    return np.asarray(jax.random.key_data(spread(size, "", _keys(rows, leaf.value))))


def _place(rows: np.ndarray, like: Any) -> Any:
    """Returns the rows, placed like an array or as a jax.ShapeDtypeStruct says."""
    if isinstance(like, np.ndarray):
        return np.array(rows)
    placed = jax.make_array_from_callback(rows.shape, like.sharding, lambda index: rows[index])
    return placed if addable(like) else _keys(placed, like)


def _keys(words: Any, like: Any) -> jax.Array:
    """Returns random keys like `like`, from their words. JAX tells the implementation of keys only for an array."""
    return jax.random.wrap_key_data(jnp.asarray(words), impl=jax.random.key_impl(jnp.empty((), like.dtype)))
