"""States of optimizers with arrays per rank: how they are sharded, and how they move to another number of ranks."""

import itertools
import numbers

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from jaxcgx.optim.extra import import_optax
from jaxcgx.transports.axes import axis_names


def _ours(node):
    """Whether it is a state with fields per rank."""
    return hasattr(type(node), "per_rank")


def state_specs(opt_state, axis_name):
    """PartitionSpecs of an optimizer's state, for shard_map's in_specs and out_specs.

    opt_state: a state, or its jax.eval_shape, in which states of jaxcgx stand anywhere. axis_name: the axis of the
    ranks, or the
    tuple of axes, that their transformations were given. What is per rank is sharded over it, all else replicated.
    (optax.tree_map_params doesn't know of the axis of the ranks.)
    """
    _check_order("state_specs", opt_state)
    return specs_per_rank(opt_state, axis_names(axis_name), None)


def specs_per_rank(opt_state, rows, param_specs):
    """`rows`: of the leading axis of what is per rank. param_specs: PartitionSpecs of the parameters over other axes,
    or None."""

    def specs(node):
        if not _ours(node):
            return P()
        found = jax.tree_util.tree_map(lambda _: P(), node)
        for name, front in [*((name, (rows,)) for name in node.per_rank), *((name, ()) for name in node.replicated)]:
            field = getattr(node, name)
            if param_specs is None or field is None:
                field = jax.tree_util.tree_map(lambda _: P(*front), field)
            else:
                field = jax.tree_util.tree_map(lambda spec, x: x if x is None else P(*front, *spec), param_specs, field)
            found = found._replace(**{name: field})
        if (
            param_specs is not None and node.factors is not None
        ):  # a factor is of a shard: side by side, along their long dimension
            beside = lambda spec, x: x if x is None else P(None, _named(spec))
            found = found._replace(factors=jax.tree_util.tree_map(beside, param_specs, node.factors))
        return found

    return jax.tree_util.tree_map(specs, opt_state, is_leaf=_ours)


def _named(spec):
    """The axes of a mesh that a spec mentions."""
    return tuple(name for part in spec if part is not None for name in (part if isinstance(part, tuple) else (part,)))


def _check_order(op, opt_state):
    """That nothing stands around compress_gradients, or before it, that keeps what it makes of every rank's own
    gradients in states
    without an axis for ranks."""
    optax = import_optax(op)
    for wrapper, name in ((optax.MultiStepsState, "MultiSteps"), (optax.ApplyIfFiniteState, "apply_if_finite")):
        around = lambda node: (
            isinstance(node, wrapper) and any(map(_ours, jax.tree_util.tree_leaves(node, is_leaf=_ours)))
        )
        if any(map(around, jax.tree_util.tree_leaves(opt_state, is_leaf=around))):
            raise ValueError(
                f"{op}: argument 'opt_state': expected optax.{name} behind compress_gradients, where gradients are the "
                f"same on every rank, got it around; write optax.chain(jaxcgx.compress_gradients(...), "
                f"optax.{name}(optimizer, ...))"
            )
    for chain in jax.tree_util.tree_leaves(opt_state, is_leaf=_is_chain):
        before = itertools.takewhile(lambda node: not _ours(node), chain) if _is_chain(chain) else ()
        for node in before:
            if isinstance(node, tuple) and any(
                _like_gradients(leaf) for leaf in jax.tree_util.tree_leaves(node, is_leaf=_ours)
            ):
                raise ValueError(
                    f"{op}: argument 'opt_state': expected transformations with a state like the gradients behind "
                    "compress_gradients, where gradients are the same on every rank, got "
                    f"{type(node).__name__} before it; put it behind (in place of optax.trace before it, give "
                    "compress_gradients momentum=)"
                )


def _is_chain(node):
    """Whether it is optax.chain's tuple of states with one of ours."""
    return type(node) is tuple and any(map(_ours, node))


def _like_gradients(leaf):
    return not _ours(leaf) and len(leaf.shape) > 0 and jnp.issubdtype(leaf.dtype, jnp.inexact)


def reshard_state(opt_state, new_size):
    """An optimizer's state for another number of ranks. Its arrays per rank are NumPy's: put them where the new mesh
    wants them,

        jax.device_put(state, jax.tree.map(lambda spec: NamedSharding(mesh, spec), cgx.state_specs(state, axis_name)))

    and the parameters, too.

    Residuals keep their sum over ranks: what a sample's gradient lost then counts as much as a gradient of today's on a
    rank
    with as many samples. Momentum keeps its mean, which is that of the mean gradient. Both are spread evenly.
    """
    if isinstance(new_size, bool) or not isinstance(new_size, numbers.Integral) or new_size < 1:
        raise ValueError(f"reshard_state: argument 'new_size': expected a positive integer, got {new_size!r}")

    def spread(rows, keep):
        if rows.shape[0] == new_size:
            return rows
        total = jnp.asarray(rows, jnp.float32 if rows.dtype.itemsize < 4 else rows.dtype).sum(0)
        each = total / (new_size if keep == "sum" else rows.shape[0])
        return np.broadcast_to(np.asarray(each.astype(rows.dtype)), (new_size, *each.shape))

    def reshard(node):
        if not _ours(node):
            return node
        return node._replace(
            **{
                name: jax.tree_util.tree_map(lambda rows: spread(rows, keep), getattr(node, name))
                for name, keep in node.per_rank.items()
            }
        )

    return jax.tree_util.tree_map(reshard, opt_state, is_leaf=_ours)
