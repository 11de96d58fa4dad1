"""PartitionSpecs of states that have arrays per rank."""

import jax
from jax.sharding import PartitionSpec as P

from jaxcgx.checks import wrong
from jaxcgx.train.nesting import check_nesting, warn_of_momentum
from jaxcgx.train.reshard import has_rows, rows_keep
from jaxcgx.transports.axes import check_axis_names, is_communicator
from jaxcgx.typing import AxisName, PyTree, Specs

OP = "state_specs"


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
        raise wrong(OP, "opt_state", expected, got, remedy, kind=TypeError)
    if is_communicator(axis_name):
        expected = "an axis of a mesh, or a tuple of axes"
        remedy = "over MPI a state is on one device, and needs no specs"
        raise wrong(OP, "axis_name", expected, f"a communicator, {axis_name!r}", remedy, kind=TypeError)
    check_nesting(OP, opt_state)
    warn_of_momentum(OP, "opt_state", opt_state)
    rows = P(check_axis_names(OP, axis_name))
    return jax.tree_util.tree_map(lambda keep: rows if keep else P(), rows_keep(opt_state))
