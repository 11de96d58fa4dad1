"""The state of compress_gradients before the first step."""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType

from jaxcgx import _compat
from jaxcgx.checks import wrong
from jaxcgx.optim.leaves import check_arrays
from jaxcgx.optim.settings import Settings
from jaxcgx.optim.specs import state_specs
from jaxcgx.optim.state import CompressState, describe_state
from jaxcgx.transports.axes import axis_names
from jaxcgx.transports.resolve import check_axes


class Ranks(NamedTuple):
    """The ranks, as init sees them where it is called."""

    size: int  # of the leading axis of arrays per rank: 1 inside shard_map
    varying: frozenset[Any]  # the axes that these arrays vary over, where JAX tracks that
    sharded: bool  # whether the mesh in context has this many ranks over the axes


def _ranks(settings: Settings) -> Ranks:
    try:
        return Ranks(1, _compat.tracked_axes(check_axes(settings.function, settings.axis_name).names), False)
    except NameError:
        pass  # outside of shard_map
    names = axis_names(settings.axis_name)
    sizes = dict(jax.sharding.get_abstract_mesh().shape)
    found = math.prod(sizes[name] for name in names) if all(name in sizes for name in names) else None
    size = found if settings.axis_size is None else settings.axis_size
    if size is None:
        raise wrong(
            settings.function,
            "axis_size",
            f"the number of ranks of {settings.axis_name!r}, which init can't see",
            None,
            "pass it, or call init under jax.set_mesh(mesh) or inside jax.shard_map; for jax.pmap pass "
            "axis_size=1, and replicate the state",
        )
    return Ranks(size, frozenset(), size == found)


def init_state(settings: Settings, params: Any) -> CompressState:
    """The state before the first step, sharded over the ranks where a mesh is in context."""
    ranks = _ranks(settings)
    params = check_arrays(settings.function, "params", params)
    expected = describe_state(settings, params, ranks.size)

    def fresh() -> CompressState:
        state = jax.tree_util.tree_map(lambda x: jnp.zeros(x.shape, x.dtype), expected)
        if state.key is None:
            return state
        return state._replace(key=jax.random.key_data(jax.random.key(settings.seed, impl="threefry2x32")))

    def sharded() -> CompressState:
        explicit = AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types
        place = jax.sharding.reshard if explicit else lax.with_sharding_constraint
        return jax.tree_util.tree_map(place, fresh(), state_specs(expected, settings.axis_name))

    state = jax.jit(sharded)() if ranks.sharded else fresh()  # jit: no device ever holds the rows of all ranks
    vary = functools.partial(jax.tree_util.tree_map, lambda x: _compat.vary(x, ranks.varying))
    return state._replace(**{name: vary(getattr(state, name)) for name in state.per_rank})
