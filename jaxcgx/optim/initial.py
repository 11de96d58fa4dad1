"""The state of compress_gradients before the first step."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType

from jaxcgx import _compat
from jaxcgx.optim.leaves import check_arrays
from jaxcgx.optim.settings import Settings
from jaxcgx.optim.specs import state_specs
from jaxcgx.optim.state import describe_state


def init_state(settings: Settings, params: Any, describe: Callable[..., Any] = describe_state) -> Any:
    """Returns the state before the first step, sharded over the ranks if a mesh is in context.

    Args:
      settings: the arguments of the transformation.
      params: a pytree of parameters.
      describe: a function (settings, params, number of ranks) that returns the shapes of the state.
    """
    rows = settings.ranks.rows(settings.axis_size)
    params = check_arrays(settings.function, "params", params)
    expected = describe(settings, params, rows.size)

    def fresh() -> Any:
        state = jax.tree_util.tree_map(lambda x: jnp.zeros(x.shape, x.dtype), expected)
        if getattr(state, "key", None) is None:
            return state
        return state._replace(key=jax.random.key_data(jax.random.key(settings.seed, impl="threefry2x32")))

    def sharded() -> Any:
        explicit = AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types
        place = jax.sharding.reshard if explicit else lax.with_sharding_constraint
        return jax.tree_util.tree_map(place, fresh(), state_specs(expected, settings.axis_name))

    state = jax.jit(sharded)() if rows.sharded else fresh()  # with jit, no device ever holds the rows of all ranks
    vary = functools.partial(jax.tree_util.tree_map, lambda x: _compat.vary(x, rows.varying))
    return state._replace(**{name: vary(getattr(state, name)) for name in state.per_rank})
