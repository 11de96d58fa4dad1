"""all_finite: whether all ranks have finite numbers, as one answer for all of them."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxcgx import _compat
from jaxcgx.exchange.resolve import check_axes
from jaxcgx.typing import AxisName


def all_finite(grads: Any, axis_name: AxisName) -> jax.Array:
    """Returns whether every element is finite on every rank of an axis, as bool[]. All ranks get the same answer.

    Pass gradients after their exchange: a mean may overflow though no rank's gradient does. Each rank sends 4 bytes.

    Args:
      grads: a pytree of arrays.
      axis_name: one name, or a tuple of names.
    """
    net = check_axes("all_finite", axis_name)
    leaves = [x for x in map(jnp.asarray, jax.tree_util.tree_leaves(grads)) if jnp.issubdtype(x.dtype, jnp.inexact)]
    bad = sum(((~jnp.isfinite(x)).any().astype(jnp.int32) for x in leaves), jnp.int32(0))
    # The axes of the mesh over which the gradients are sharded, in the same order in every process.
    if shards := tuple(sorted(_compat.varying_axes(bad) - set(net.names), key=str)):
        bad = lax.psum(bad, shards)
    return net.plain_psum(_compat.vary(bad, _compat.tracked_axes(net.names))) == 0
