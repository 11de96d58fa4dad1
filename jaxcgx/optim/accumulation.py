"""The gradients of one rank's batch, added up over micro-batches."""

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
    """What a loss function is given beside the parameters that are trained."""

    frozen: Any  # the other parameters
    model_state: Any  # None without one
    batch: Any
    key: jax.Array | None


class Output(NamedTuple):
    """What becomes of an auxiliary output of a rank's micro-batches."""

    rows: int | None  # the dimension of the examples, which stay beside each other
    averaged: bool  # over micro-batches and ranks, by their weights; if neither, it is the last one
    dtype: Any = None  # of one that is averaged


class Parts(NamedTuple):
    """The micro-batches of a rank, and what becomes of their auxiliary outputs."""

    number: int
    dimensions: list[int | None]  # that are split, for each leaf of a batch; None where micro-batches share it
    outputs: Sequence[Output] = ()  # for each leaf of the auxiliary outputs
    guessed: bool = False  # whether nobody said that these dimensions are those of the examples


class Found(NamedTuple):
    """What a rank finds of a batch."""

    loss: Any  # a sum where it has a weight
    weight: Any  # None without weighted
    aux: Any  # None without has_aux; what is averaged is times the weight
    gradients: Any
    model_state: Any  # the new one


def local_gradients(objective: Callable[..., Any], ranks: Ranks, parts: Parts) -> Callable[..., Found]:
    """A function (params, Given) -> Found, of one rank's own batch.

    Args:
      objective: a function (params, Given) that returns (loss, (weight, model state, aux)).
      ranks: every one draws a key of its own.
      parts: the micro-batches, each with a key of its own, and with the model state that the one before returned.
    """
    value_and_grad = ranks.value_and_grad(objective)

    def of_micro_batch(params: Any, given: Given) -> Found:
        with without_constraints(OP, "loss_fn", ranks.net().names):
            (loss, (weight, model_state, aux)), grads = value_and_grad(params, given)
        loss, aux = jax.tree_util.tree_map(jnp.asarray, (loss, aux))
        if weight is not None:
            leaves, structure = jax.tree_util.tree_flatten(aux)
            # A mean of nothing counts nothing, though it is NaN.
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
    """The mean of find(model state, i) over all parts, added up in at least float32.

    The model state goes from part to part. Auxiliary outputs become what `parts` says.
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
        """The model state, whose other arrays stay as they are."""
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

    zeros = [jnp.zeros(x.shape, wide(x.dtype)) for x, number in zip(leaves, added) if number]
    (totals, changing), others = lax.scan(add, (zeros, changes(model_state)), jnp.arange(parts.number))
    mean, each = (x / parts.number for x in totals), iter(others)
    found = structure.unflatten([next(mean) if y.averaged else _join(next(each), y.rows) for y in outputs])
    narrow = jax.tree_util.tree_map(lambda x, shape: x.astype(shape.dtype), found.gradients, shapes.gradients)
    return found._replace(gradients=narrow, model_state=whole(changing))


def addable(x: Any) -> bool:
    """Whether an array has numbers. Random keys have none."""
    return not jnp.issubdtype(x.dtype, jax.dtypes.extended)


def _split(parts: int, x: jax.Array, d: int) -> jax.Array:
    """[parts, ...], with 1 / parts of dimension `d`."""
    if x.shape[d] % parts:
        expected = f"batches that every rank can split into {parts}"
        raise wrong(OP, "accumulate", expected, f"{spell_array(x)} on a rank")
    return jnp.moveaxis(x.reshape(*x.shape[:d], parts, x.shape[d] // parts, *x.shape[d + 1 :]), d, 0)


def _join(x: jax.Array, d: int | None) -> jax.Array:
    """[parts, ...] as one array along dimension `d`; None: the last part."""
    if d is None:
        return x[-1]
    x = jnp.moveaxis(x, 0, d)
    return x.reshape(*x.shape[:d], -1, *x.shape[d + 2 :])


def wide(dtype: Any) -> Any:
    """The dtype that numbers of a dtype are added up in."""
    return dtype if jnp.issubdtype(dtype, jnp.inexact) and dtype.itemsize >= 4 else jnp.dtype(jnp.float32)
