"""Gathers, all-to-alls, scatters and permutations of trees.

Messages carry rows: a row is for one rank, or came from one rank. A permutation has whole leaves in place of rows.

Over several stages, the rows of a message are [ranks of the first stage, ranks of the second stage, ..., ...].
"""

import functools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from jaxcgx.codecs.quantized import Quantized, straight_through
from jaxcgx.exchange import primitives, schedules
from jaxcgx.exchange.message import ENDS, Carry, Message, Stage, Sum, back_key, fold, fold_stage
from jaxcgx.exchange.routes import Envelope, Kept, Travel
from jaxcgx.transports.base import Pairs, join_rows, split_rows
from jaxcgx.typing import Key, PyTree

NO_ROW = jnp.iinfo(jnp.int32).max  # an index past the end of every array


def gather(x: PyTree, travel: Travel, key: Key | None, to: str = "varying", as_parts: bool = False) -> PyTree:
    """Returns every rank's leaves, joined along the dimensions of `travel.way`."""
    dims, tiled = travel.way.dims, travel.way.tiled

    plain = lambda leaf, i: travel.net.plain_all_gather(leaf, dims[i] or 0, tiled=tiled, to=to)

    def of_message(message: Message, stages: tuple[Stage, ...]) -> list[jax.Array]:
        sizes = tuple(stage.net.size for stage in stages)
        join = primitives.Join(tuple(dims[i] or 0 for i in message.ids), tiled, sizes)
        leaves = message.leaves
        for j, stage in enumerate(stages):
            # Going back, ranks along the outer stages send different rows.
            others = stages[:j] + stages[j + 1 :]
            words = _key(message.key, stages, j, stages[j + 1 :]), _key(back_key(message.key), stages, j, others)
            part = message.replace(key=words[0], back=words[1], leaves=leaves)
            last = join if stage is stages[-1] else None
            leaves = primitives.bind_over(primitives.all_gather_p, part, stage, to=to, join=last).leaves
        return leaves

    def in_parts(message: Message, stages: tuple[Stage, ...]) -> list[Quantized]:
        found = schedules.all_gather(stages[0], message, read=schedules.quantized_rows)
        mark = lambda a: primitives.same(a, travel.net.names) if to == "invarying" else a
        joined = lambda q, dim: jax.tree.map(lambda a: mark(join_rows(a, dim, tiled)), q)
        return [joined(q, dims[i] or 0) for q, i in zip(found, message.ids)]

    return _exchange(x, travel, key, plain=plain, of_message=of_message, in_parts=in_parts if as_parts else None)


def all_to_all(x: PyTree, travel: Travel, key: Key | None, concat: tuple[int, ...], as_parts: bool = False) -> PyTree:
    """Sends slices along the dimensions of `travel.way` to their ranks, and joins those that arrive along `concat`."""
    size, tiled, split = travel.net.size, travel.way.tiled, travel.way.dims

    plain = lambda leaf, i: travel.net.plain_all_to_all(leaf, split[i] or 0, concat_axis=concat[i], tiled=tiled)

    def of_message(message: Message, stages: tuple[Stage, ...]) -> list[jax.Array]:
        parts = _split(message.leaves, [split[i] or 0 for i in message.ids], stages, tiled)
        for j, stage in reversed(list(enumerate(stages))):
            words = _key(message.key, stages, j, stages[:j] + stages[j + 1 :])
            part = message.replace(key=words, leaves=[jnp.moveaxis(x, j, 0) for x in parts])
            part = primitives.bind_over(primitives.all_to_all_p, part, stage)
            parts = [jnp.moveaxis(x, 0, j) for x in part.leaves]
        whole = [x.reshape(size, *x.shape[len(stages) :]) for x in parts]
        return [join_rows(x, concat[i], tiled) for x, i in zip(whole, message.ids)]

    def in_parts(message: Message, stages: tuple[Stage, ...]) -> list[Quantized]:
        rows = _split(message.leaves, [split[i] or 0 for i in message.ids], stages, tiled)
        found = schedules.all_to_all(stages[0], message.replace(leaves=rows), read=schedules.quantized_rows)
        return [jax.tree.map(lambda a, i=i: join_rows(a, concat[i], tiled), q) for q, i in zip(found, message.ids)]

    return _exchange(x, travel, key, plain=plain, of_message=of_message, in_parts=in_parts if as_parts else None)


def places(offsets: jax.Array, sizes: jax.Array, capacity: int) -> jax.Array:
    """Returns the index in a ragged array of each row to or from each rank, int[ranks, capacity]; NO_ROW past the last.

    `offsets` and `sizes` are those of the slices of each rank, int[ranks, slices].
    """
    ends, row = jnp.cumsum(sizes, 1), jnp.arange(capacity)
    which = (row[:, None] >= ends[:, None]).sum(-1)
    first = jnp.take_along_axis(offsets - ends + sizes, jnp.minimum(which, sizes.shape[1] - 1), 1)
    return jnp.where(which < sizes.shape[1], first + row, NO_ROW)


def take(x: jax.Array, index: jax.Array, otherwise: jax.Array | float) -> jax.Array:
    """Returns the rows of x with these indices, or `otherwise` where an index is NO_ROW."""
    x = x if len(x) else jnp.zeros((1, *x.shape[1:]), x.dtype)
    there = (index < NO_ROW).reshape(*index.shape, *(1,) * (x.ndim - 1))
    return jnp.where(there, x.at[index].get(mode="clip"), jnp.asarray(otherwise, x.dtype))


def broadcast(x: PyTree, travel: Travel, key: Key | None, source: int, to: str) -> PyTree:

    plain = lambda leaf, _: travel.net.plain_pbroadcast(leaf, source, to)
    bind = functools.partial(primitives.bind_over, primitives.pbroadcast_p, source=source, to=to)
    return _exchange(x, travel, key, plain=plain, of_message=lambda message, stages: bind(message, stages[0]).leaves)


def permute(x: PyTree, carry: Carry, travel: Travel, key: Key | None, pairs: Pairs) -> tuple[PyTree, Carry]:
    """Returns (the leaves of the rank that sends to this rank; zeros on a rank to which no rank sends, the carry)."""
    kept = Kept(carry, travel.routes, ENDS)

    def of_message(message: Message, stages: tuple[Stage, ...]) -> list[jax.Array]:
        fed = () if stages[0].codec.raw else kept.arrays  # raw leaves, which the transpose compresses, keep nothing
        part = message.replace(**{kind: kept.of(kind, message.ids) for kind in fed})
        done = primitives.bind_over(primitives.ppermute_p, part, stages[0], pairs=pairs)
        kept.update(message.ids, done)
        return done.leaves

    plain = lambda leaf, _: travel.net.plain_ppermute(leaf, pairs)
    return _exchange(x, travel, key, plain=plain, of_message=of_message), kept.carry()


def scatter(message: Message, envelope: Envelope, travel: Travel) -> Message:
    """Returns this rank's slices of the sums of a message. Its new residuals are those of whole leaves."""
    stages, way = envelope.stages, travel.way
    dims = [way.dims[i] or 0 for i in envelope.ids]  # the message's own numbers are for noise
    residuals = message.residuals and _split(message.residuals, dims, stages, way.tiled)
    parts = message.replace(leaves=_split(message.leaves, dims, stages, way.tiled), residuals=residuals)
    key = fold(message.key, 0)
    for j, stage in reversed(list(enumerate(stages))):
        words = _key(key, stages, j, stages[:j] + stages[j + 1 :])
        part = parts.replace(key=words, leaves=[jnp.moveaxis(x, j, 0) for x in parts.leaves])
        how = Sum(travel.how.own, 1.0 if j else travel.how.divisor)
        parts = primitives.bind_over(primitives.psum_scatter_p, part, stage, how=how)
    if parts.residuals is None:
        return parts
    return parts.replace(residuals=[join_rows(x, d, way.tiled) for x, d in zip(parts.residuals, dims)])


def _split(arrays: list[jax.Array], dims: list[int], stages: tuple[Stage, ...], tiled: bool) -> list[jax.Array]:
    sizes = [stage.net.size for stage in stages]
    rows = [split_rows(x, d, size=math.prod(sizes), tiled=tiled) for x, d in zip(arrays, dims)]
    return [x.reshape(*sizes, *x.shape[1:]) for x in rows]


def _key(key: Key | None, stages: tuple[Stage, ...], j: int, others: tuple[Stage, ...]) -> Key | None:
    """Returns the key of stage j. Ranks with different places along the stages `others` draw different noise."""
    return key if len(stages) == 1 else fold_stage(key, j, others)


def _exchange(
    x: PyTree,
    travel: Travel,
    key: Key | None,
    plain: Callable[[jax.Array, int], jax.Array],
    of_message: Callable[[Message, tuple[Stage, ...]], list[jax.Array]],
    in_parts: Callable[[Message, tuple[Stage, ...]], list[Quantized]] | None = None,
) -> PyTree:
    """Returns the tree of results: those of `plain(leaf, its number)`, and of messages and their stages.

    With `in_parts`, messages have its results, and the derivatives of `of_message`.
    """
    leaves, found = travel.routes.each(x), dict[int, PyTree]()

    def exchanged(message: Message, stages: tuple[Stage, ...]) -> Sequence[PyTree]:
        if in_parts is None or stages[0].codec.raw:  # a raw leaf, which the transpose compresses
            return of_message(message, stages)
        parts = in_parts(message.replace(leaves=list(map(jax.lax.stop_gradient, message.leaves))), stages)
        linear = lambda message, tangent: of_message(message.replace(leaves=tangent.leaves), stages)
        return straight_through(linear, message, parts)

    for each in travel.plain:
        for i, why in zip(each.ids, each.why):
            route = travel.routes.leaves[i]
            with travel.leaf_scope(i, why):
                found[i] = plain(leaves[i], i)
                if in_parts is not None and route.encoded:  # there is one rank
                    found[i] = Quantized.of(found[i], route.codecs[0], fold(key, i))
    for envelope in travel.envelopes:
        message = Message(envelope.ids, [leaves[i] for i in envelope.ids], key if envelope.stochastic else None)
        with travel.scope(envelope.ids):
            found |= zip(envelope.ids, exchanged(message, envelope.stages))
    return travel.routes.tree.unflatten([found[i] for i in range(len(leaves))])
