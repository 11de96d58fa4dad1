"""PartitionSpecs of optimizer states that have arrays per rank."""

from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from jaxcgx.checks import wrong
from jaxcgx.optim.nesting import check_nesting, has_rows, warn_of_momentum
from jaxcgx.transports.axes import check_axis_names, is_communicator
from jaxcgx.typing import AxisName


def state_specs(opt_state: Any, axis_name: AxisName) -> Any:
    """Returns the PartitionSpecs of an optimizer's state, for shard_map's in_specs and out_specs.

    Arrays per rank are sharded over the axis of the ranks. All other arrays are replicated. Don't use
    optax.tree_map_params for this, because it ignores the axis of the ranks.

    Args:
      opt_state: a state, or its jax.eval_shape, with states of jaxcgx at any depth. It may be an nnx.Optimizer of Flax.
      axis_name: the axis of the ranks, or the tuple of axes, that jaxcgx's transformations were given.
    """
    if not any(map(has_rows, jax.tree_util.tree_leaves(opt_state, is_leaf=has_rows))):
        raise wrong(
            "state_specs",
            "opt_state",
            "a state of jaxcgx's transformations, alone or inside of another",
            f"a {type(opt_state).__name__} without one",
            "pass what init returned, or an nnx.Optimizer as it is: nnx.state(optimizer) has lost the types of the "
            "states in it; a state without compress_gradients has PartitionSpec() everywhere",
            kind=TypeError,
        )
    if is_communicator(axis_name):
        expected = "an axis of a mesh, or a tuple of axes"
        remedy = "over MPI a state is on one device, and needs no specs"
        raise wrong("state_specs", "axis_name", expected, f"a communicator, {axis_name!r}", remedy, kind=TypeError)
    check_nesting("state_specs", opt_state)
    warn_of_momentum("state_specs", "opt_state", opt_state)
    return specs_per_rank(opt_state, check_axis_names("state_specs", axis_name), None)


def specs_per_rank(opt_state: Any, rows: Any, param_specs: Any) -> Any:
    """Returns the PartitionSpecs of a state.

    Args:
      opt_state: the state.
      rows: the spec of the leading axis of arrays per rank.
      param_specs: the PartitionSpecs of the parameters over the other axes of the mesh, or None.
    """

    def like_params(field: Any, *front: Any) -> Any:
        """Returns the specs of arrays [*front, *shape of the parameter]."""
        if param_specs is None or field is None:
            return jax.tree_util.tree_map(lambda _: P(*front), field)
        return jax.tree_util.tree_map(lambda spec, x: x if x is None else P(*front, *spec), param_specs, field)

    def of_node(node: Any) -> Any:
        if not has_rows(node):
            return P()
        if param_specs is not None and not hasattr(node, "factors"):
            expected = "one whose state is like the parameters, where these are sharded over the mesh"
            remedy = "pass jaxcgx.compress_gradients, or leave parameters whole"
            raise wrong("make_train_step", "compress", expected, f"one with a {type(node).__name__}", remedy)
        found = {name: like_params(getattr(node, name), rows) for name in node.per_rank}
        found |= {name: like_params(getattr(node, name)) for name in node.replicated}
        if param_specs is not None and node.factors is not None:
            # Each shard has its own factor. The factors are side by side along their long dimension.
            beside = lambda spec, x: x if x is None else P(None, _named(spec))
            found["factors"] = jax.tree_util.tree_map(beside, param_specs, node.factors)
        return jax.tree_util.tree_map(lambda _: P(), node)._replace(**found)

    return jax.tree_util.tree_map(of_node, opt_state, is_leaf=has_rows)


def _named(spec: P) -> tuple[Any, ...]:
    """Returns the axes of a mesh that a spec names."""
    return tuple(name for part in spec if part is not None for name in (part if isinstance(part, tuple) else (part,)))
