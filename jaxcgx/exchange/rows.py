"""Gathers, all-to-alls, scatters and permutations of trees.

Messages carry rows: a row is for one rank, or came from one rank. A permutation has whole leaves in place of rows.

Over several stages, the rows of a message are [ranks of the first stage, ranks of the second stage, ..., ...].
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxcgx.exchange import primitives
from jaxcgx.exchange.message import Message, Stage, Sum, back_key, fold, fold_stage
from jaxcgx.exchange.routes import Envelope, Travel
from jaxcgx.transports.base import Pairs, join_rows, split_rows
from jaxcgx.typing import Key, PyTree


def gather(x: PyTree, travel: Travel, key: Key | None, to: str = "varying") -> PyTree:
    """Returns every rank's leaves, joined along the dimensions of `travel.way`. `to` is as in lax.all_gather."""
    dims, tiled = travel.way.dims, travel.way.tiled

    def plain(leaf: jax.Array, i: int) -> jax.Array:
        return travel.net.plain_all_gather(leaf, dims[i] or 0, tiled=tiled, to=to)

    def of_message(message: Message, stages: tuple[Stage, ...]) -> list[jax.Array]:
        sizes = tuple(stage.net.size for stage in stages)
        join = primitives.Join(tuple(dims[i] or 0 for i in message.ids), tiled, sizes)
        leaves = message.leaves
        for j, stage in enumerate(stages):
            # Going back, ranks along the outer stages send different rows.
            others = stages[:j] + stages[j + 1 :]
            words = _key(message.key, stages, j, stages[j + 1 :]), _key(back_key(message.key), stages, j, others)
            part = message.replace(key=words[0], back=words[1], leaves=leaves)
            leaves = primitives.all_gather(part, stage, to, join=join if stage is stages[-1] else None)
        return leaves

    return _exchange(x, travel, key, plain=plain, of_message=of_message)


def all_to_all(x: PyTree, travel: Travel, key: Key | None, concat: tuple[int, ...]) -> PyTree:
    """Returns the leaves with slice r, along the dimension of `travel.way`, sent to rank r, joined along `concat`."""
    size, tiled, split = travel.net.size, travel.way.tiled, travel.way.dims

    def plain(leaf: jax.Array, i: int) -> jax.Array:
        return travel.net.plain_all_to_all(leaf, split[i] or 0, concat_axis=concat[i], tiled=tiled)

    def of_message(message: Message, stages: tuple[Stage, ...]) -> list[jax.Array]:
        parts = _split(message.leaves, [split[i] or 0 for i in message.ids], stages, tiled)
        for j, stage in reversed(list(enumerate(stages))):
            words = _key(message.key, stages, j, stages[:j] + stages[j + 1 :])
            part = message.replace(key=words, leaves=[jnp.moveaxis(x, j, 0) for x in parts])
            parts = [jnp.moveaxis(x, 0, j) for x in primitives.all_to_all(part, stage)]
        whole = [x.reshape(size, *x.shape[len(stages) :]) for x in parts]
        return [join_rows(x, concat[i], tiled) for x, i in zip(whole, message.ids)]

    return _exchange(x, travel, key, plain=plain, of_message=of_message)


def permute(x: PyTree, travel: Travel, key: Key | None, pairs: Pairs) -> PyTree:
    """Returns the leaves of the rank that sends to this rank; zeros on a rank to which no rank sends."""

    def plain(leaf: jax.Array, i: int) -> jax.Array:
        return travel.net.plain_ppermute(leaf, pairs)

    def of_message(message: Message, stages: tuple[Stage, ...]) -> list[jax.Array]:
        return primitives.ppermute(message, stages[0], pairs)

    return _exchange(x, travel, key, plain=plain, of_message=of_message)


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
        parts = primitives.psum_scatter(part, stage, Sum(travel.how.own, 1.0 if j else travel.how.divisor))
    if parts.residuals is None:
        return parts
    return parts.replace(residuals=[join_rows(x, d, way.tiled) for x, d in zip(parts.residuals, dims)])


def _split(arrays: list[jax.Array], dims: list[int], stages: tuple[Stage, ...], tiled: bool) -> list[jax.Array]:
    """Returns the rows of arrays, which are split along their dimensions."""
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
) -> PyTree:
    """Returns the tree of results: those of `plain(leaf, its number)`, and of messages and their stages."""
    leaves, found = travel.routes.each(x), dict[int, jax.Array]()
    for each in travel.plain:
        for i, why in zip(each.ids, each.why):
            with travel.leaf_scope(i, why):
                found[i] = plain(leaves[i], i)
    for envelope in travel.envelopes:
        message = Message(envelope.ids, [leaves[i] for i in envelope.ids], key if envelope.stochastic else None)
        with travel.scope(envelope.ids):
            found |= zip(envelope.ids, of_message(message, envelope.stages))
    return travel.routes.tree.unflatten([found[i] for i in range(len(leaves))])
