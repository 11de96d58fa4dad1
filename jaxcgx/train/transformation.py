"""compress_gradients: an exchange as an optax transformation."""

import math

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jaxcgx.codecs.base import Codec
from jaxcgx.plan import Plan
from jaxcgx.transports.axes import axis_names
from jaxcgx.transports.resolve import check_axes
from jaxcgx.train.division import in_rows, row, without_row
from jaxcgx.train.exchange import At, Exchange, as_exchange
from jaxcgx.train.state import ExchangeState
from jaxcgx.typing import Params, PyTree


def compress_gradients(
    axis: PyTree, exchange: "Exchange | Codec | Plan", *, axis_size: int | None = None
) -> optax.GradientTransformationExtraArgs:
    """Makes a transformation from each rank's own gradients to their mean. Its state has a row for each rank."""
    exchange = as_exchange(exchange)

    def init(params: Params) -> ExchangeState:
        state, size = exchange.init(params), axis_size or _size(axis)
        rows = lambda x: jnp.broadcast_to(x[None], (size, *x.shape))
        return ExchangeState(jax.tree_util.tree_map(rows, state.own), state.shared)

    def update(
        grads: PyTree, state: ExchangeState, params: Params = None, *, value: PyTree = None, **_: PyTree
    ) -> tuple[PyTree, ExchangeState]:
        at = At(check_axes("compress_gradients", axis), params, value)

        def both(own: PyTree, grads: PyTree) -> tuple[PyTree, ExchangeState]:
            given = ExchangeState(own, state.shared)
            ticket, given = exchange.begin(None if exchange.early else grads, given, at)
            return exchange.end(ticket, given, at, grads)

        mean, new = in_rows(both, state.own, row(grads))
        return without_row(mean), ExchangeState(new.own, without_row(new.shared))

    return optax.GradientTransformationExtraArgs(init, update)


def _size(axis: PyTree) -> int:
    """Returns the rows that `init` makes: 1 inside shard_map, or the ranks of the mesh in context."""
    try:
        lax.axis_size(axis_names(axis))
        return 1
    except NameError:
        return math.prod(jax.sharding.get_abstract_mesh().shape[n] for n in axis_names(axis))
