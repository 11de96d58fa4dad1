"""compress_gradients: an exchange as an optax transformation, from every rank's gradients to their mean."""

import functools
import math
import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxcgx import _compat, _programs
from jaxcgx.checks import as_array, check_integer, spell_array, wrong
from jaxcgx.exchange.resolve import is_bound, transport_over, transport_over_axes
from jaxcgx.exchange.routes import Way, as_order
from jaxcgx.train.arguments import part
from jaxcgx.train.division import Division, OverMesh, with_row
from jaxcgx.train.exchange import AnyExchange, At, Exchange, Outcome, check_state, first_state, send, send_rows
from jaxcgx.train.feedback import as_exchange
from jaxcgx.train.sharded import over_axes
from jaxcgx.train.state import ExchangeState
from jaxcgx.train.update import import_optax
from jaxcgx.transports.axes import as_axis_names, axis_names, check_for_mesh, is_communicator
from jaxcgx.typing import AxisName, Params, PyTree, Specs

if TYPE_CHECKING:
    import optax

OP = "compress_gradients"


class UnknownRanksError(ValueError):
    """`init` can't see the number of ranks."""


def compress_gradients(
    axis_name: AxisName,
    exchange: AnyExchange,
    *,
    order: Sequence[int] | None = None,
    axis_size: int | None = None,
    mesh: Any = None,
    param_specs: Specs = None,
) -> "optax.GradientTransformationExtraArgs":
    """Makes an optax.GradientTransformation that replaces the gradients of each rank's own batch by their mean.

        optimizer = optax.chain(cgx.compress_gradients("data", cgx.MaxMin(4)), optax.adam(1e-3))

    Inside of shard_map and pmap, and over MPI, `update` takes its own rank's gradients. In a program that leaves the
    ranks to jit, it takes those of all ranks, with a row for each, as from `value_and_grad(loss_fn, axis_name, None)`.

    The mean is the same on all ranks. The state is an `ExchangeState`. Its arrays per rank have a leading axis of the
    ranks, and are sharded over it (`state_specs`). Inside shard_map, and over MPI, the size of this axis is 1. `update`
    takes the mean loss as `value`, if there is one.

    Args:
      axis_name: the axis of the ranks, or a tuple of axes, outermost first; or an MPI communicator, or
        `jaxcgx.mpi.hierarchy()`.
      exchange: a codec, {axis: codec} or a Plan, or a schedule of these, {first step: plan}: a `Feedback`. Or another
        exchange, such as `Momentum` or `DGC`. To set its numbers by optax.inject_hyperparams, make it inside of the
        function that is injected.
      order: the numbers of the leaves, in the order in which their gradients are ready in the backward pass
        (`backward_order`). Messages are made and sent in this order. Over `Tcp`, the backward pass continues during the
        exchange, if there are several messages. The plan's `fusion_mb` is the largest size of a message. Its default
        depends on the size of the gradients, and is 1 to 4 MiB.
      axis_size: the number of ranks. It is needed if `init` is called outside shard_map and without a mesh in context
        (jax.set_mesh). For jax.pmap, pass 1 and replicate the state. Every device then has its own state.
      mesh, param_specs: for gradients of all ranks, as in `value_and_grad`.
    """
    optax, exchange = import_optax(OP), as_exchange(exchange, OP)
    over_mpi = is_communicator(axis_name)
    given = None if param_specs is None else [param_specs]
    if not over_mpi:
        as_axis_names(OP, axis_name)
    if axis_size is not None:
        check_integer(OP, "axis_size", axis_size, 1)
    for name, value in dict(order=order, axis_size=axis_size, mesh=mesh, param_specs=param_specs).items():
        check_for_mesh(OP, name, value, axis_name)
    remedy = Division.remedy
    if not over_mpi:
        remedy = (
            f"shard the state over {axis_name!r}, as jaxcgx.state_specs(state, {axis_name!r}) says; under jax.pmap, "
            "make it with axis_size=1; one of another number of ranks is for jaxcgx.reshard_state"
        )

    def divide(params: Params, arrays: PyTree) -> OverMesh:
        arrays = jax.tree.leaves(arrays)
        return over_axes(OP, axis_name, mesh, [params], arrays=arrays, given=given, joined=operator.itemgetter(0))

    def init(params: Params) -> ExchangeState:
        params = _as_arrays("params", params)
        if not over_mpi and not is_bound(axis_names(axis_name)):  # as `update`, leaves without gradient have no state
            params = jax.tree.map(lambda x: x if jnp.issubdtype(x.dtype, jnp.inexact) else None, params)
        if mesh is None and given is None:
            return _first(axis_name, axis_size, exchange, params)
        return first_state(divide(params, params), exchange, params)

    def of_all(rows: PyTree, state: ExchangeState, params: Params, value: jax.Array | None) -> Outcome:
        """Exchanges the gradients of all ranks, outside of shard_map."""
        (params,), _ = part([params])
        like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), rows) if params is None else params
        division = divide(like, (rows, params))
        spell = lambda tree, *lead: (jax.tree.structure(tree), [(*lead, *np.shape(x)) for x in jax.tree.leaves(tree)])
        if spell(like, division.size) != spell(rows):
            expected = f"gradients with a row for each of {division.size} ranks, outside of shard_map and pmap"
            source = f"take them from jaxcgx.value_and_grad(loss_fn, {axis_name!r}, None), which exchanges no gradients"
            raise wrong(OP, "updates", expected, jax.tree.map(spell_array, rows), source)
        made = "take it from init with the same mesh= and param_specs=; one of other ranks is for jaxcgx.reshard_state"
        check_state(OP, state, jax.eval_shape(lambda: first_state(division, exchange, like)), made)
        way = Way(order=as_order(OP, order, len(jax.tree.leaves(rows))))
        run = functools.partial(send_rows, division, exchange, way=way)
        return _programs.jitted(run, rows, state, params, value, mesh=division.mesh)

    def update(
        updates: PyTree, state: ExchangeState, params: Params = None, *, value: jax.Array | None = None, **_: Any
    ) -> Outcome:
        grads = _as_arrays("updates", updates)
        if not over_mpi and not is_bound(axis_names(axis_name)):
            return of_all(grads, state, params, value)
        net = transport_over(OP, axis_name, dict(updates=updates), dict(exchange=exchange))
        check_state(OP, state, jax.eval_shape(lambda: with_row(exchange.init(grads))), remedy)
        way = Way(order=as_order(OP, order, len(jax.tree.leaves(grads))))
        return send(exchange, grads, state, At(net, params, value, way))

    return optax.GradientTransformationExtraArgs(init, update)


def _first(axis_name: AxisName, axis_size: int | None, exchange: Exchange, params: Params) -> ExchangeState:
    """Returns the state before the first step, with rows, sharded over the ranks if a mesh is in context."""
    size, varying = 1, frozenset[Any]()
    if not is_communicator(axis_name):
        names = axis_names(axis_name)
        if is_bound(names):
            varying = _compat.tracked_axes(transport_over_axes(OP, axis_name).names)
        else:
            mesh = jax.sharding.get_abstract_mesh()
            found = math.prod(mesh.shape.get(name, 0) for name in names)
            if found and axis_size in (None, found):
                return first_state(OverMesh(mesh, axis_name, op=OP), exchange, params)
            if axis_size is None:
                remedy = (
                    "pass it, or call init under jax.set_mesh(mesh) or inside jax.shard_map; for jax.pmap pass "
                    "axis_size=1, and replicate the state"
                )
                expected = f"the number of ranks of {axis_name!r}, which init can't see"
                raise wrong(OP, "axis_size", expected, None, remedy, kind=UnknownRanksError)
            size = axis_size
    state = exchange.init(params)
    of_ranks = lambda x: _compat.vary(jnp.broadcast_to(x[None], (size, *x.shape)), varying)
    return ExchangeState(jax.tree.map(of_ranks, state.own), state.shared)


def _as_arrays(argument: str, tree: PyTree) -> PyTree:
    """Returns the tree, after a check that its leaves are arrays or jax.ShapeDtypeStructs. Numbers become arrays."""
    shaped = lambda leaf: hasattr(leaf, "shape") and hasattr(leaf, "dtype")
    return jax.tree.map_with_path(lambda path, leaf: leaf if shaped(leaf) else as_array(OP, argument, leaf, path), tree)
