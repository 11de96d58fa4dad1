"""The exchanges as JAX primitives, and the rules that these share. One bind exchanges one message.

`psum` sums to all ranks. `all_gather`, its transpose `psum_scatter`, and `all_to_all`, its own transpose, exchange
rows: leaves are [ranks, ...], and row r is for rank r, or came from rank r. `ppermute` sends leaves from rank to rank.
`pbroadcast` sends those of one rank to all, and its transpose `sum_to` sums to one rank.

A `Message` goes through bind as a pytree: its arrays are the operands, and its structure is the static parameter
`tree`. The results are a message without a key. `net` is the transport.

The parameter `batch` has a pair (size, name) for every axis that vmap added. Each array has these axes in front. The
name is None unless the exchange itself runs over the axis (vmap with axis_name).

Linearization ignores quantization (straight-through), because the derivative of a staircase tells an optimizer nothing.
An exchange without quantization is linear in its leaves. So a tangent goes through the same exchange, compressed the
same way, with the same key. Residuals and factors count as constants. Tangents start without them.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxcgx import _compat
from jaxcgx._compat import ad, batching, mlir
from jaxcgx.exchange import hierarchy, schedules
from jaxcgx.exchange.message import ENDS, SHARED, STATE, Message, Stage, Sum, back_key
from jaxcgx.native.rules import define_impl, in_front, places
from jaxcgx.transports.base import Transport, join_rows, split_rows
from jaxcgx.typing import PyTree

Batch = tuple[tuple[int, Any], ...]


def bind(primitive: _compat.Primitive, message: Message, **params: Any) -> Message:
    """Binds the primitive, and returns the message of results: leaves, and the new arrays of each kind of state."""
    operands, tree = jax.tree.flatten(match_varying(message, params["net"]))
    return _results(tree).unflatten(primitive.bind(*operands, **{"batch": (), **params}, tree=tree))


def bind_over(primitive: _compat.Primitive, message: Message, stage: Stage, **params: Any) -> Message:
    """Binds the primitive of an exchange over one stage. The same transport may have more ranks over another mesh."""
    return bind(primitive, message, net=stage.net, stage=stage, ranks=stage.net.size, **params)


def match_varying(message: Message, net: Transport) -> Message:
    """Returns the message, marked as varying over every axis of its arrays; factors not over those of the exchange."""
    leaves = message.leaves
    kept: dict[str, Any] = {kind: old for kind in (*STATE, *ENDS) if (old := getattr(message, kind)) is not None}
    if message.key is not None:  # the results vary over the axes of the noise, too
        leaves = [_compat.vary(x, _compat.varying_axes(message.key)) for x in leaves]
    for arrays in kept.values():
        leaves = [_compat.vary(x, _compat.varying_axes(a)) for x, a in zip(leaves, arrays)]
    for kind, arrays in kept.items():
        same = frozenset(net.names) if kind in SHARED else frozenset()
        kept[kind] = [_compat.vary(a, _compat.varying_axes(x) - same) for x, a in zip(leaves, arrays)]
    return message.replace(leaves=leaves, **kept)


@functools.lru_cache
def _results(tree: PyTree) -> PyTree:
    return jax.tree.structure(places(tree).replace(key=None, back=None))


def _put_leaves(tree: PyTree, values: Sequence[Any], leaves: Sequence[Any]) -> list[Any]:
    """Returns the flat values of a structure, with `leaves` in place of the values of the message's leaves."""
    values = list(values)
    for place, leaf in zip(places(tree).leaves, leaves):
        values[place] = leaf
    return values


def _lower(run: Callable[..., Message], *operands: Any, batch: Batch, tree: PyTree, **params: Any) -> list[jax.Array]:
    mapped: Callable[[Message], Message] = functools.partial(run, **params)
    for _, axis in reversed(batch):
        mapped = jax.vmap(mapped, axis_name=axis)
    return jax.tree.leaves(mapped(tree.unflatten(operands)))


def _abstract_eval(
    shape: Callable[..., tuple[int, ...]],
    invarying: Callable[..., bool],
    *avals: Any,
    batch: Batch,
    tree: PyTree,
    **params: Any,
) -> tuple[Any, Any]:
    net, sizes, n = params["net"], tuple(size for size, _ in batch), len(batch)
    gone = net.names if invarying(**params) else ()
    message = tree.unflatten(avals)
    leaves = [
        _compat.result_aval([x], sizes + shape(x.shape[n:], i, **params), dtype=x.dtype, rows=n, invarying=gone)
        for i, x in enumerate(message.leaves)
    ]
    like = lambda x: _compat.result_aval([x], x.shape, x.dtype, rows=n)
    results = jax.tree.map(like, message.replace(leaves=[], key=None, back=None)).replace(leaves=leaves)
    bound = set(net.names) - {name for _, name in batch}
    return jax.tree.leaves(results), net.effects.union(map(_compat.NamedAxisEffect, bound))


def _batch(
    primitive: _compat.Primitive,
    same: bool,
    axis: Any,
    operands: Sequence[Any],
    dims: Sequence[int | None],
    *,
    batch: Batch,
    **params: Any,
) -> tuple[list[Any], list[int | None]]:
    ours = axis.name in params["net"].names
    if not ours and all(d is None for d in dims):  # vmap calls this rule even if it maps no operand
        results = primitive.bind(*operands, batch=batch, **params)
        return results, [None] * len(results)
    batch = ((axis.size, axis.name if ours else None), *batch)
    results = primitive.bind(*in_front(operands, dims, axis.size), batch=batch, **params)
    mapped: list[int | None] = [0] * len(results)
    if ours and same:
        of_results = places(_results(params["tree"]))
        for place in jax.tree.leaves([getattr(of_results, field) for field in ("leaves", *SHARED)]):
            results[place], mapped[place] = results[place][0], None
    return results, mapped


def _jvp(
    primitive: _compat.Primitive, primals: Sequence[Any], tangents: Sequence[Any], *, tree: PyTree, **params: Any
) -> tuple[Any, Any]:
    results = primitive.bind(*primals, tree=tree, **params)
    zeros = [_compat.zero_tangent(r) for r in results]
    message, moving = tree.unflatten(primals), tree.unflatten(tangents).leaves
    if all(type(t) is ad.Zero for t in moving):
        return results, zeros
    tangent = Message(message.ids, list(map(ad.instantiate_zeros, moving)), message.key, message.back)
    moved = bind(primitive, tangent, **params)
    return results, _put_leaves(_results(tree), zeros, moved.leaves)


def _transposed(
    transpose: Callable[..., list[Any]], cts: Sequence[Any], *operands: Any, tree: PyTree, **params: Any
) -> list[Any]:
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
    transpose: Callable[..., list[Any]],
    same: bool,
    shape: Callable[..., tuple[int, ...]] = lambda shape, i, **params: shape,
    invarying: Callable[..., bool] = lambda **params: False,
) -> _compat.Primitive:
    """Returns the primitive of an exchange, with its rules.

    Args:
      name: the name, which policies of jax.checkpoint see.
      run: run(message, **params) computes the message of results with lax and the native operations.
      transpose: transpose(message, cts, **params) computes the cotangents of the message's leaves from the cotangents
        of the results. The leaves of `message` are types without values.
      same: whether the result leaves are the same on every rank.
      shape: shape(shape, i, **params) returns the shape of result leaf i, from the shape of leaf i.
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


def _back(message: Message, cts: list[Any], batch: Batch) -> Message:
    return Message(message.ids, cts, back_key(message.key, len(batch)) if message.back is None else message.back)


def _sent_back(
    primitive: _compat.Primitive, message: Message, cts: list[Any], *, stage: Stage, batch: Batch, **params: Any
) -> list[Any]:
    """Returns the cotangents after the exchange back, with its own codec and noise."""
    return bind(primitive, _back(message, cts, batch), stage=stage.transposed(), batch=batch, **params).leaves


# psum


def psum(message: Message, net: Transport, stages: tuple[Stage, ...], how: Sum) -> Message:
    """Returns the sum of a message, and its new state, over `net`, the ranks of all stages (outermost first)."""
    tracked = bool(_compat.tracked_axes(net.names))  # whether JAX tracks over which axes values vary (check_vma)
    return bind(psum_p, message, net=net, stages=stages, how=how, tracked=tracked)


# If JAX tracks over which axes values vary (check_vma), the cotangent of a sum is the same on every rank. The transpose
# of the sum then gives each rank a copy of the cotangent (pcast), and sends no bytes. If JAX doesn't track this, a
# cotangent may differ from rank to rank, and the transpose of psum is psum.
def _psum_transpose(
    message: Message, cts: list[Any], *, how: Sum, tracked: bool, batch: Batch, **params: Any
) -> list[Any]:
    if tracked:
        return [ct / how.divisor for ct in cts]
    return bind(psum_p, _back(message, cts, batch), how=how, tracked=tracked, batch=batch, **params).leaves


psum_p: _compat.Primitive = define(
    "jaxcgx_psum",
    lambda message, net, stages, how, **_: hierarchy.allreduce(net, stages, message=message, how=how),
    _psum_transpose,
    same=True,
    invarying=lambda **params: True,
)

same_p: _compat.Primitive = _compat.Primitive("jaxcgx_same")


def same(x: jax.Array, names: tuple[Any, ...]) -> jax.Array:
    """Returns x, marked as the same on every rank if JAX tracks that."""
    return same_p.bind(x, names=names) if _compat.tracked_axes(names) else x


def shared(done: Message, names: tuple[Any, ...]) -> Message:
    """Returns sums, and the state that is the same on every rank, marked as such."""
    mark = lambda arrays: [same(x, names) for x in arrays]
    kept = {kind: mark(arrays) for kind in SHARED if (arrays := getattr(done, kind)) is not None}
    return done.replace(leaves=mark(done.leaves), **kept)


define_impl(same_p)
same_p.def_abstract_eval(lambda x, names: _compat.result_aval([x], x.shape, x.dtype, rows=x.ndim, invarying=names))
batching.primitive_batchers[same_p] = lambda xs, dims, names: (same_p.bind(*xs, names=names), *dims)
mlir.register_lowering(same_p, lambda ctx, x, names: [x])


# all_gather


class Join(NamedTuple):
    """Joins the result of several gathers, [ranks of the last gather, ..., ranks of the first gather, ...].

    The join is part of the last gather's primitive. Otherwise, policies of jax.checkpoint would see a separate reshape,
    and save its result, the whole weights.
    """

    dimensions: tuple[int, ...]  # for each leaf: the dimension to join along, counted from the front
    tiled: bool  # as in lax
    sizes: tuple[int, ...]  # the number of ranks of each gather, outermost first

    def shape(self, gathered: tuple[int, ...], i: int) -> tuple[int, ...]:
        """Returns the shape of joined leaf i, from the shape of the gathered leaf."""
        shape, n, d = list(gathered[len(self.sizes) :]), math.prod(self.sizes), self.dimensions[i]
        return (*shape[:d], n * shape[d], *shape[d + 1 :]) if self.tiled else (*shape[:d], n, *shape[d:])

    def join(self, leaves: list[Any]) -> list[jax.Array]:
        n = len(self.sizes)
        joined: list[jax.Array] = []
        for x, d in zip(leaves, self.dimensions):
            outermost_first = jnp.transpose(x, (*reversed(range(n)), *range(n, x.ndim)))
            joined.append(join_rows(outermost_first.reshape(math.prod(self.sizes), *x.shape[n:]), d, self.tiled))
        return joined

    def split(self, leaves: list[Any]) -> list[jax.Array]:
        """The inverse of `join`."""
        n = len(self.sizes)
        split: list[jax.Array] = []
        for x, d in zip(leaves, self.dimensions):
            rows = split_rows(x, d, size=math.prod(self.sizes), tiled=self.tiled)
            apart = rows.reshape(*self.sizes, *rows.shape[1:])
            split.append(jnp.transpose(apart, (*reversed(range(n)), *range(n, apart.ndim))))
        return split


# The primitive has the name of lax's primitive. So policies of jax.checkpoint treat the results of both alike.
# Row r of every rank's result is rank r's leaf, so the leaf's cotangent is the sum of the cotangents of these rows:
# psum_scatter. If the type of the result says that all ranks share one value ("invarying"), all ranks have the same
# cotangent, and rank r takes row r of it. An axis of vmap has no such type: each of its ranks has its own cotangent,
# with mostly zero rows, and psum_scatter adds them. If ranks share a cotangent along another mesh axis,
# psum_scatter counts it several times. The factor corrects this.
def _all_gather_transpose(
    message: Message, cts: list[Any], *, to: str, join: Join | None, batch: Batch, **params: Any
) -> list[Any]:
    if join is not None:
        split = join.split
        for _ in batch:
            split = jax.vmap(split)
        cts = split(cts)
    shares = _shares(cts, batch, params["ranks"], to)
    if shares is None:
        return [jax.lax.dynamic_index_in_dim(ct, params["net"].rank, len(batch), keepdims=False) for ct in cts]
    return _sent_back(psum_scatter_p, message, shares, how=Sum(), batch=batch, **params)


def _shares(cts: list[Any], batch: Batch, ranks: int, to: str) -> list[Any] | None:
    """Returns the cotangents that the ranks add up, or None if all ranks have the same cotangents."""
    mapped = math.prod(size for size, name in batch if name is not None)
    return cts if to == "varying" else None if mapped == 1 else [ct * (mapped / ranks) for ct in cts]


def _gathered_shape(shape: tuple[int, ...], i: int, *, ranks: int, join: Join | None, **params: Any) -> tuple[int, ...]:
    rows = (ranks, *shape)
    return rows if join is None else join.shape(rows, i)


all_gather_p: _compat.Primitive = define(
    "all_gather",
    lambda message, stage, join, **_: Message(
        message.ids, (list if join is None else join.join)(schedules.all_gather(stage, message))
    ),
    _all_gather_transpose,
    same=True,
    shape=_gathered_shape,
    invarying=lambda to, **params: to == "invarying",
)


# psum_scatter


def _psum_scatter(message: Message, *, stage: Stage, how: Sum, **_: Any) -> Message:
    """Returns the divided sum over ranks of this rank's row, and the new residuals if the message has residuals."""
    summed = schedules.reduce_scatter(stage, message, how)
    leaves = [x.astype(leaf.dtype) for x, leaf in zip(summed.leaves, message.leaves)]
    return message.replace(key=None, back=None, leaves=leaves, residuals=summed.residuals)


# Row r of every rank's leaf was added to the sum of rank r, so on every rank its cotangent is the cotangent of rank r's
# sum.
def _psum_scatter_transpose(message: Message, cts: list[Any], *, how: Sum, **params: Any) -> list[Any]:
    return _sent_back(all_gather_p, message, [ct / how.divisor for ct in cts], to="varying", join=None, **params)


psum_scatter_p: _compat.Primitive = define(
    "jaxcgx_psum_scatter",
    _psum_scatter,
    _psum_scatter_transpose,
    same=False,
    shape=lambda shape, i, **params: shape[1:],
)


# all_to_all


# Row r went to rank r, so its cotangent comes back from rank r by the same exchange.
all_to_all_p: _compat.Primitive = define(
    "jaxcgx_all_to_all",
    lambda message, stage, **_: Message(message.ids, schedules.all_to_all(stage, message)),
    lambda message, cts, **params: _sent_back(all_to_all_p, message, cts, **params),
    same=False,
)


# pbroadcast


# The cotangent of the source's leaf is the sum of the cotangents of all ranks. If the type of the result says that all
# ranks share one value, they have the same cotangent, and the source takes it, as with all_gather.
def _pbroadcast_transpose(
    message: Message, cts: list[Any], *, source: int, to: str, batch: Batch, **params: Any
) -> list[Any]:
    shares = _shares(cts, batch, params["ranks"], to)
    if shares is None:
        return [jnp.where(params["net"].rank == source, ct, jnp.zeros_like(ct)) for ct in cts]
    return _sent_back(sum_to_p, message, shares, target=source, batch=batch, **params)


pbroadcast_p: _compat.Primitive = define(
    "jaxcgx_pbroadcast",
    lambda message, stage, source, **_: Message(message.ids, schedules.pbroadcast(stage, message, source)),
    _pbroadcast_transpose,
    same=True,
    invarying=lambda to, **params: to == "invarying",
)


sum_to_p: _compat.Primitive = define(
    "jaxcgx_sum_to",
    lambda message, stage, target, **_: Message(message.ids, schedules.sum_to(stage, message, target)),
    lambda message, cts, target, **params: _sent_back(
        pbroadcast_p, message, cts, source=target, to="varying", **params
    ),
    same=False,
)


# ppermute


# Cotangents go back from receivers to senders.
ppermute_p: _compat.Primitive = define(
    "jaxcgx_ppermute",
    lambda message, stage, pairs, **_: schedules.ppermute(stage, message, pairs),
    lambda message, cts, pairs, **params: _sent_back(
        ppermute_p, message, cts, pairs=tuple((receiver, sender) for sender, receiver in pairs), **params
    ),
    same=False,
)
