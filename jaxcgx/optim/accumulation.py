"""The gradients of one rank's batch, added up over micro-batches."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxcgx import _compat
from jaxcgx.checks import spell_array, wrong
from jaxcgx.collectives.gradients import without_constraints
from jaxcgx.optim.ranks import Ranks

OP = "make_train_step"


class Found(NamedTuple):
    """What a rank finds of a batch."""

    loss: Any
    aux: Any  # None without has_aux
    gradients: Any


def local_gradients(loss_fn: Callable[..., Any], ranks: Ranks, *, has_aux: bool, accumulate: int) -> Callable[..., Any]:
    """A function (params, batch, key) -> Found, of one rank's own batch.

    Args:
      loss_fn: a function (params, batch), or (params, batch, key) where there is a key, that returns the loss.
      ranks: every one draws a key of its own.
      has_aux: whether `loss_fn` returns (loss, aux).
      accumulate: the number of micro-batches, each with a key of its own. They share the scalars of the batch.
    """
    value_and_grad = ranks.value_and_grad(loss_fn, has_aux)

    def of_micro_batch(params: Any, batch: Any, key: jax.Array | None) -> Found:
        with without_constraints(OP, "loss_fn", ranks.net().names):
            value, grads = value_and_grad(params, batch, *(() if key is None else (key,)))
        loss, aux = jax.tree_util.tree_map(jnp.asarray, value if has_aux else (value, None))
        return Found(loss, aux, grads)

    def of_batch(params: Any, batch: Any, key: jax.Array | None) -> Found:
        if key is not None:
            key = jax.random.fold_in(key, ranks.net().rank)
        if accumulate == 1:
            return of_micro_batch(params, batch, key)
        parts = jax.tree_util.tree_map(functools.partial(_split, accumulate), batch)

        def of_part(i: Any) -> Found:
            part = jax.tree_util.tree_map(lambda x: x[i] if x.ndim else x, parts)
            return of_micro_batch(params, part, None if key is None else jax.random.fold_in(key, i))

        return _mean(of_part, accumulate, _compat.tracked_axes(ranks.net().names))

    return of_batch


def _mean(find: Callable[..., Any], parts: int, tracked: frozenset[Any]) -> Found:
    """The mean of find(i) over all parts, added up in at least float32; it varies over the axes `tracked`.

    What can't be added is that of the last part.
    """
    shapes = jax.eval_shape(find, 0)
    leaves, structure = jax.tree_util.tree_flatten(shapes)
    added = [addable(x) for x in leaves]

    def add(totals: list[jax.Array], i: jax.Array) -> tuple[list[jax.Array], list[jax.Array]]:
        found = jax.tree_util.tree_leaves(find(i))
        numbers = [x for x, number in zip(found, added) if number]
        others = [x for x, number in zip(found, added) if not number]
        return [t + x.astype(t.dtype) for t, x in zip(totals, numbers)], others

    zeros = [_compat.vary(jnp.zeros(x.shape, _wide(x.dtype)), tracked) for x, number in zip(leaves, added) if number]
    totals, others = lax.scan(add, zeros, jnp.arange(parts))
    mean, last = (x / parts for x in totals), (x[-1] for x in others)
    found = structure.unflatten([next(mean) if number else next(last) for number in added])
    narrow = jax.tree_util.tree_map(lambda x, shape: x.astype(shape.dtype), found.gradients, shapes.gradients)
    return found._replace(gradients=narrow)


def addable(x: Any) -> bool:
    """Whether an array has numbers. Random keys have none."""
    return not jnp.issubdtype(x.dtype, jax.dtypes.extended)


def _split(parts: int, x: jax.Array) -> jax.Array:
    """[parts, size / parts, ...]; a scalar as it is."""
    if x.ndim == 0:
        return x
    if x.shape[0] % parts:
        expected = f"batches that every rank can split into {parts}"
        raise wrong(OP, "accumulate", expected, f"{spell_array(x)} on a rank")
    return x.reshape(parts, x.shape[0] // parts, *x.shape[1:])


def _wide(dtype: Any) -> Any:
    """The dtype that numbers of a dtype are added up in."""
    return dtype if jnp.issubdtype(dtype, jnp.inexact) and dtype.itemsize >= 4 else jnp.dtype(jnp.float32)
