"""What the exchanges have in common as JAX primitives: one bind per message.

A `Message` goes through bind as a pytree: its arrays are the operands, and its structure is the static parameter
`tree`. The results are a message without a key. Each array carries in front an axis for every entry of the parameter
`batch`, a pair of its size and its name. The name is None for an axis that vmap added; it is the name of the axis where
the exchange itself runs over what vmap(axis_name=...) maps. `net` is the transport.

Linearisation ignores quantization (straight-through): an exchange is linear in its leaves, and the derivative of a
staircase tells an optimizer nothing. So a tangent goes through the same exchange, compressed alike, with the same key.
Residuals count as constants, and so do factors; tangents start without them.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax

from jaxcgx import _compat
from jaxcgx._compat import ad, batching, mlir
from jaxcgx.exchange.message import SHARED, STATE, Message
from jaxcgx.native import ops
from jaxcgx.transports.base import Transport


def bind(primitive: Any, message: Message, **params: Any) -> Message:
    """The message of results: leaves, and the new arrays of each kind of state."""
    operands, tree = jax.tree_util.tree_flatten(_match_varying(message, params["net"]))
    return _results(tree).unflatten(primitive.bind(*operands, **{"batch": (), **params}, tree=tree))


def _match_varying(message: Message, net: Transport) -> Message:
    """The message, with leaves that vary over all axes that the key or the state varies over, and the other way
    round."""
    leaves, kept = message.leaves, {kind: arrays for kind in STATE if (arrays := getattr(message, kind)) is not None}
    if message.key is not None:  # the results vary as the noise does, whatever else is in the message
        leaves = [_compat.vary(x, _compat.varying_axes(message.key)) for x in leaves]
    for arrays in kept.values():
        leaves = [_compat.vary(x, _compat.varying_axes(a)) for x, a in zip(leaves, arrays)]
    for kind, arrays in kept.items():
        same = frozenset(net.names) if kind in SHARED else frozenset()
        kept[kind] = [_compat.vary(a, _compat.varying_axes(x) - same) for x, a in zip(leaves, arrays)]
    return message.replace(leaves=leaves, **kept)


def _places(tree: Any) -> Message:
    """The message of the places that its arrays have among the operands."""
    return tree.unflatten(range(tree.num_leaves))


@functools.lru_cache
def _results(tree: Any) -> Any:
    """The structure of the results for operands of a structure."""
    return jax.tree_util.tree_structure(_places(tree).replace(key=None))


def _put_leaves(tree: Any, values: list, leaves: list) -> list:
    """The flat values of a structure, with others for the leaves of the message."""
    values = list(values)
    for place, leaf in zip(_places(tree).leaves, leaves):
        values[place] = leaf
    return values


def define(
    name: str,
    run: Callable[..., Message],
    shape: Callable[..., tuple],
    transpose: Callable[..., list],
    same: bool,
    invarying: Callable[..., bool] = lambda **params: False,
) -> Any:
    """A primitive.

    Args:
      name: its name, behind "jaxcgx_".
      run: run(message, **params) is the message of results, in terms of lax and the native operations.
      shape: shape(shape, **params) is the shape of a result leaf for a leaf.
      transpose: transpose(message, cts, **params) are the cotangents of the leaves, which are given as types only.
      same: whether the result leaves are the same on every rank.
      invarying: invarying(**params) is whether their types say so.
    """
    primitive = _compat.Primitive(f"jaxcgx_{name}")
    primitive.multiple_results = True

    @functools.lru_cache
    def compiled(params):
        return jax.jit(functools.partial(primitive.bind, **dict(params)))

    primitive.def_impl(lambda *operands, **params: compiled(tuple(params.items()))(*operands))

    def lower(*operands, batch, tree, **params):
        mapped = lambda *operands: jax.tree_util.tree_leaves(run(tree.unflatten(operands), **params))
        for _, axis in reversed(batch):
            mapped = jax.vmap(mapped, axis_name=axis)
        return mapped(*operands)

    mlir.register_lowering(primitive, mlir.lower_fun(lower, multiple_results=True))

    def abstract(*avals, batch, tree, net, **params):
        bound = [axis for axis in net.names if axis not in [name for _, name in batch]]
        sizes, n = tuple(size for size, _ in batch), len(batch)
        gone = net.names if invarying(**params) else ()
        message = tree.unflatten(avals)
        state = message.replace(leaves=[], key=None)
        results = jax.tree_util.tree_map(lambda x: _compat.result_aval([x], x.shape, x.dtype, n), state).replace(
            leaves=[
                _compat.result_aval([x], sizes + shape(x.shape[n:], **params), x.dtype, n, gone) for x in message.leaves
            ]
        )
        return jax.tree_util.tree_leaves(results), _compat.axis_effects(bound) | net.effects

    primitive.def_effectful_abstract_eval(abstract)

    def batched(axis, operands, dims, *, batch, tree, net, **params):
        ours = axis.name in net.names
        if not ours and all(d is None for d in dims):  # vmap asks even about what it does not map
            results = primitive.bind(*operands, batch=batch, tree=tree, net=net, **params)
            return results, [None] * len(results)
        batch = ((axis.size, axis.name if ours else None), *batch)
        results = primitive.bind(*ops.in_front(operands, dims, axis.size), batch=batch, tree=tree, net=net, **params)
        places, dims = _places(_results(tree)), [0] * len(results)
        if ours and same:
            for place in jax.tree_util.tree_leaves([getattr(places, field) for field in ("leaves", *SHARED)]):
                results[place], dims[place] = results[place][0], None
        return results, dims

    batching.fancy_primitive_batchers[primitive] = batched

    def jvp(primals, tangents, *, tree, **params):
        results = primitive.bind(*primals, tree=tree, **params)
        zeros = [_compat.zero_tangent(r) for r in results]
        message, moving = tree.unflatten(primals), tree.unflatten(tangents).leaves
        if all(type(t) is ad.Zero for t in moving):
            return results, zeros
        moved = bind(primitive, Message(message.ids, list(map(ad.instantiate_zeros, moving)), message.key), **params)
        return results, _put_leaves(_results(tree), zeros, moved.leaves)

    ad.primitive_jvps[primitive] = jvp

    def transposed(cts, *operands, tree, **params):
        message = tree.unflatten(operands)
        avals = [x.aval for x in message.leaves]
        if all(type(ct) is ad.Zero for ct in cts):
            back = list(map(ad.Zero, avals))
        else:
            back = transpose(message.replace(leaves=avals), list(map(ad.instantiate_zeros, cts)), **params)
            back = [_compat.vary(ct, _compat.varying_axes(aval)) for ct, aval in zip(back, avals)]
        return _put_leaves(tree, [None] * len(operands), back)

    ad.primitive_transposes[primitive] = transposed
    return primitive
