"""Gradients of one rank's part of a batch, averaged over its micro-batches."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxcgx.checks import spell_array, wrong
from jaxcgx.collectives.gradients import without_constraints
from jaxcgx.optim.ranks import Ranks

OP = "make_train_step"


class Given(NamedTuple):
    """The arguments of a loss function besides the trained parameters."""

    frozen: Any  # the parameters that are not trained
    model_state: Any  # None if the model has no state
    batch: Any
    key: jax.Array | None


class Output(NamedTuple):
    """How an auxiliary output is combined over micro-batches and ranks.

    If it has no dimension of the examples and is not averaged, the value of the last micro-batch is taken.
    """

    rows: int | None  # the dimension of the examples, along which outputs are concatenated
    averaged: bool  # whether it is averaged over micro-batches and ranks, by their weights
    dtype: Any = None  # the dtype of the output


class Parts(NamedTuple):
    """The micro-batches of a rank, and how their auxiliary outputs are combined."""

    number: int
    # for each leaf of a batch, the dimension that is split; None: every micro-batch gets the whole leaf
    dimensions: list[int | None]
    outputs: Sequence[Output] = ()  # one for each leaf of the auxiliary outputs
    guessed: bool = False  # whether it is only a guess that the examples are along `dimensions`


class Found(NamedTuple):
    """The results of a rank for a micro-batch, or their mean over micro-batches."""

    loss: Any  # if there is a weight, the sum of the losses
    weight: Any  # None without `weighted`
    aux: Any  # None without `has_aux`; if there is a weight, averaged outputs are multiplied by it
    gradients: Any
    model_state: Any  # the new model state


def local_gradients(objective: Callable[..., Any], ranks: Ranks, parts: Parts) -> Callable[..., Found]:
    """Returns a function (params, Given) -> Found for one rank's own part of a batch.

    Args:
      objective: a function (params, Given) that returns (loss, (weight, model state, aux)).
      ranks: the ranks. Each rank gets a different random key.
      parts: the micro-batches. Each gets a different random key, and the model state that the micro-batch before
        returned.
    """
    value_and_grad = ranks.value_and_grad(objective)

    def of_micro_batch(params: Any, given: Given) -> Found:
        with without_constraints(OP, "loss_fn", ranks.net().names):
            (loss, (weight, model_state, aux)), grads = value_and_grad(params, given)
        loss, aux = jax.tree_util.tree_map(jnp.asarray, (loss, aux))
        if weight is not None:
            leaves, structure = jax.tree_util.tree_flatten(aux)
            # With weight 0, a mean over no examples may be NaN. It must not make the sum NaN.
            times = lambda x: jnp.where(weight == 0, 0, x.astype(wide(x.dtype)) * weight.astype(wide(x.dtype)))
            aux = structure.unflatten(times(x) if y.averaged else x for x, y in zip(leaves, parts.outputs))
        return Found(loss, weight, aux, gradients=grads, model_state=model_state)

    def of_batch(params: Any, given: Given) -> Found:
        key = given.key
        if key is not None:
            key = jax.random.fold_in(key, ranks.net().rank)
        if parts.number == 1:
            return of_micro_batch(params, given._replace(key=key))
        leaves, structure = jax.tree_util.tree_flatten(given.batch)
        split = [x if d is None else _split(parts.number, x, d) for x, d in zip(leaves, parts.dimensions)]

        def of_part(model_state: Any, i: Any) -> Found:
            own = Given(
                frozen=given.frozen,
                model_state=model_state,
                batch=structure.unflatten(x if d is None else x[i] for x, d in zip(split, parts.dimensions)),
                key=None if key is None else jax.random.fold_in(key, i),
            )
            return of_micro_batch(params, own)

        return _mean(of_part, given.model_state, parts)

    return of_batch


def _mean(find: Callable[..., Found], model_state: Any, parts: Parts) -> Found:
    """Returns the mean of find(model state, i) over all micro-batches, added up in at least float32.

    Each micro-batch gets the model state that the one before returned. `parts` says how auxiliary outputs are combined.
    """
    states, state_structure = jax.tree_util.tree_flatten(model_state)
    renewed = [True] * len(states)

    def first() -> Found:
        found = find(model_state, 0)
        renewed[:] = [new is not old for new, old in zip(jax.tree_util.tree_leaves(found.model_state), states)]
        return found._replace(model_state=None)

    shapes = jax.eval_shape(first)
    leaves, structure = jax.tree_util.tree_flatten(shapes)
    kinds = jax.tree_util.tree_map(lambda _: Output(None, True), shapes)
    kinds = kinds._replace(aux=jax.tree_util.tree_structure(shapes.aux).unflatten(parts.outputs))
    outputs = jax.tree_util.tree_leaves(kinds, is_leaf=lambda x: isinstance(x, Output))
    added = [output.averaged for output in outputs]

    def whole(changing: list[Any]) -> Any:
        """Returns the model state with new arrays for the leaves that change. Other leaves stay the same objects."""
        new = iter(changing)
        return state_structure.unflatten([next(new) if is_new else old for is_new, old in zip(renewed, states)])

    def changes(state: Any) -> list[Any]:
        return list(itertools.compress(jax.tree_util.tree_leaves(state), renewed))

    def add(carry: tuple[list[jax.Array], list[Any]], i: jax.Array) -> tuple[Any, list[jax.Array]]:
        totals, changing = carry
        part = find(whole(changing), i)
        found = jax.tree_util.tree_leaves(part._replace(model_state=None))
        numbers = [x for x, number in zip(found, added) if number]
        others = [x for x, number in zip(found, added) if not number]
        return ([t + x.astype(t.dtype) for t, x in zip(totals, numbers)], changes(part.model_state)), others

    # On an Explicit mesh, gradients are sharded over the other axes like their parameters, also in their types.
    zeros = [jnp.zeros(x.shape, wide(x.dtype), out_sharding=x.sharding) for x, number in zip(leaves, added) if number]
    (totals, changing), others = lax.scan(add, (zeros, changes(model_state)), jnp.arange(parts.number))
    mean, each = (x / parts.number for x in totals), iter(others)
    found = structure.unflatten([next(mean) if y.averaged else _join(next(each), y.rows) for y in outputs])
    narrow = jax.tree_util.tree_map(lambda x, shape: x.astype(shape.dtype), found.gradients, shapes.gradients)
    return found._replace(gradients=narrow, model_state=whole(changing))


def addable(x: Any) -> bool:
    """Returns whether an array holds numbers. Arrays of random keys don't."""
    return not jnp.issubdtype(x.dtype, jax.dtypes.extended)


def _split(parts: int, x: jax.Array, d: int) -> jax.Array:
    """Returns [parts, ...]: the array, split into `parts` equal parts along dimension `d`."""
    if x.shape[d] % parts:
        expected = f"batches that every rank can split into {parts}"
        raise wrong(OP, "accumulate", expected, f"{spell_array(x)} on a rank")
    return jnp.moveaxis(x.reshape(*x.shape[:d], parts, x.shape[d] // parts, *x.shape[d + 1 :]), d, 0)


def _join(x: jax.Array, d: int | None) -> jax.Array:
    """Returns the parts of [parts, ...], joined along dimension `d`. Without a dimension, returns the last part."""
    if d is None:
        return x[-1]
    x = jnp.moveaxis(x, 0, d)
    return x.reshape(*x.shape[:d], -1, *x.shape[d + 2 :])


def wide(dtype: Any) -> Any:
    """Returns the dtype in which numbers of a dtype are added up.

    It is float32 for integers and for smaller floating-point numbers, else the same dtype.
    """
    return dtype if jnp.issubdtype(dtype, jnp.inexact) and dtype.itemsize >= 4 else jnp.dtype(jnp.float32)
