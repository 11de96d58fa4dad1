"""The rules that all exchanges share as JAX primitives. One bind exchanges one message.

A `Message` goes through bind as a pytree: its arrays are the operands, and its structure is the static parameter
`tree`. The results are a message without a key. `net` is the transport.

The parameter `batch` has a pair (size, name) for every axis that vmap added. Each array has these axes in front. The
name is None unless the exchange itself runs over the axis (vmap with axis_name).

Linearization ignores quantization (straight-through), because the derivative of a staircase tells an optimizer nothing.
An exchange without quantization is linear in its leaves. So a tangent goes through the same exchange, compressed the
same way, with the same key. Residuals and factors count as constants. Tangents start without them.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxcgx import _compat
from jaxcgx._compat import ad, batching, mlir
from jaxcgx.exchange.message import SHARED, STATE, Message
from jaxcgx.native.eager import define_impl
from jaxcgx.native.operands import places
from jaxcgx.native.rules import in_front
from jaxcgx.transports.base import Transport

Batch = tuple[tuple[int, Any], ...]


def bind(primitive: Any, message: Message, **params: Any) -> Message:
    """Binds the primitive, and returns the message of results: leaves, and the new arrays of each kind of state."""
    operands, tree = jax.tree_util.tree_flatten(match_varying(message, params["net"]))
    return _results(tree).unflatten(primitive.bind(*operands, **{"batch": (), **params}, tree=tree))


def match_varying(message: Message, net: Transport) -> Message:
    """Returns the message, its leaves and state marked as varying over every axis that any of its arrays varies over.

    Factors are not marked as varying over the axes of the exchange.
    """
    leaves = message.leaves
    kept: dict[str, Any] = {kind: arrays for kind in STATE if (arrays := getattr(message, kind)) is not None}
    if message.key is not None:  # the results vary over the axes of the noise, too
        leaves = [_compat.vary(x, _compat.varying_axes(message.key)) for x in leaves]
    for arrays in kept.values():
        leaves = [_compat.vary(x, _compat.varying_axes(a)) for x, a in zip(leaves, arrays)]
    for kind, arrays in kept.items():
        same = frozenset(net.names) if kind in SHARED else frozenset()
        kept[kind] = [_compat.vary(a, _compat.varying_axes(x) - same) for x, a in zip(leaves, arrays)]
    return message.replace(leaves=leaves, **kept)


@functools.lru_cache
def _results(tree: Any) -> Any:
    """Returns the structure of the results, from the structure of the operands."""
    return jax.tree_util.tree_structure(places(tree).replace(key=None, back=None))


def _put_leaves(tree: Any, values: Sequence[Any], leaves: Sequence[Any]) -> list[Any]:
    """Returns the flat values of a structure, with `leaves` in place of the values of the message's leaves."""
    values = list(values)
    for place, leaf in zip(places(tree).leaves, leaves):
        values[place] = leaf
    return values


def _lower(run: Callable[..., Message], *operands: Any, batch: Batch, tree: Any, **params: Any) -> list[jax.Array]:
    mapped: Callable[[Message], Message] = functools.partial(run, **params)
    for _, axis in reversed(batch):
        mapped = jax.vmap(mapped, axis_name=axis)
    return jax.tree_util.tree_leaves(mapped(tree.unflatten(operands)))


def _abstract_eval(shape: Any, invarying: Any, *avals: Any, batch: Batch, tree: Any, **params: Any) -> tuple[Any, Any]:
    net, sizes, n = params["net"], tuple(size for size, _ in batch), len(batch)
    gone = net.names if invarying(**params) else ()
    message = tree.unflatten(avals)
    leaves = [
        _compat.result_aval([x], sizes + shape(x.shape[n:], i, **params), dtype=x.dtype, rows=n, invarying=gone)
        for i, x in enumerate(message.leaves)
    ]
    like = lambda x: _compat.result_aval([x], x.shape, x.dtype, rows=n)
    results = jax.tree_util.tree_map(like, message.replace(leaves=[], key=None, back=None)).replace(leaves=leaves)
    bound = set(net.names) - {name for _, name in batch}
    return jax.tree_util.tree_leaves(results), net.effects.union(map(_compat.NamedAxisEffect, bound))


def _batch(primitive: Any, same: bool, axis: Any, operands: Any, dims: Any, *, batch: Batch, **params: Any) -> Any:
    ours = axis.name in params["net"].names
    if not ours and all(d is None for d in dims):  # vmap calls this rule even if it maps no operand
        results = primitive.bind(*operands, batch=batch, **params)
        return results, [None] * len(results)
    batch = ((axis.size, axis.name if ours else None), *batch)
    results = primitive.bind(*in_front(operands, dims, axis.size), batch=batch, **params)
    dims = [0] * len(results)
    if ours and same:
        of_results = places(_results(params["tree"]))
        for place in jax.tree_util.tree_leaves([getattr(of_results, field) for field in ("leaves", *SHARED)]):
            results[place], dims[place] = results[place][0], None
    return results, dims


def _jvp(primitive: Any, primals: Any, tangents: Any, *, tree: Any, **params: Any) -> tuple[Any, Any]:
    results = primitive.bind(*primals, tree=tree, **params)
    zeros = [_compat.zero_tangent(r) for r in results]
    message, moving = tree.unflatten(primals), tree.unflatten(tangents).leaves
    if all(type(t) is ad.Zero for t in moving):
        return results, zeros
    tangent = Message(message.ids, list(map(ad.instantiate_zeros, moving)), message.key, message.back)
    moved = bind(primitive, tangent, **params)
    return results, _put_leaves(_results(tree), zeros, moved.leaves)


def _transposed(transpose: Any, cts: Any, *operands: Any, tree: Any, **params: Any) -> list[Any]:
    message = tree.unflatten(operands)
    avals = [x.aval for x in message.leaves]
    if all(type(ct) is ad.Zero for ct in cts):
        back = list(map(ad.Zero, avals))
    else:
        back = transpose(message.replace(leaves=avals), list(map(ad.instantiate_zeros, cts)), **params)
        back = [_compat.vary(ct, _compat.varying_axes(aval)) for ct, aval in zip(back, avals)]
    return _put_leaves(tree, [None] * len(operands), back)


def define(
    name: str,
    run: Callable[..., Message],
    shape: Callable[..., tuple[int, ...]],
    transpose: Callable[..., list[Any]],
    same: bool,
    invarying: Callable[..., bool] = lambda **params: False,
) -> Any:
    """Returns the primitive of an exchange, with its rules.

    Args:
      name: the name, which policies of jax.checkpoint see.
      run: run(message, **params) computes the message of results with lax and the native operations.
      shape: shape(shape, i, **params) returns the shape of result leaf i, from the shape of leaf i.
      transpose: transpose(message, cts, **params) computes the cotangents of the message's leaves from the cotangents
        of the results. The leaves of `message` are types without values.
      same: whether the result leaves are the same on every rank.
      invarying: invarying(**params) returns whether the types of the result leaves say that they are the same.
    """
    primitive = _compat.Primitive(name)
    primitive.multiple_results = True
    define_impl(primitive)
    mlir.register_lowering(primitive, mlir.lower_fun(functools.partial(_lower, run), multiple_results=True))
    primitive.def_effectful_abstract_eval(functools.partial(_abstract_eval, shape, invarying))
    batching.fancy_primitive_batchers[primitive] = functools.partial(_batch, primitive, same)
    ad.primitive_jvps[primitive] = functools.partial(_jvp, primitive)
    ad.primitive_transposes[primitive] = functools.partial(_transposed, transpose)
    return primitive
