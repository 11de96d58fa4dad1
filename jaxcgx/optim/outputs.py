"""Finds how the auxiliary outputs of a loss function are combined, by comparing its programs for two batch sizes."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxcgx.checks import spell_array, wrong
from jaxcgx.collectives.counting import counted, remedy_of_counts
from jaxcgx.collectives.differing import differing
from jaxcgx.optim.accumulation import OP, Given, Output, Parts, addable


class Traced(NamedTuple):
    """The program of a rank: (parameters, model state, batch, key) -> (new model state, aux)."""

    jaxpr: Any
    shapes: Any  # the shapes of the results


def find_outputs(
    objective: Callable[..., Any], params: Any, given: Given, *, parts: Parts, own: Any, names: tuple[Any, ...]
) -> tuple[Any, list[Output]]:
    """Returns (the structure of the auxiliary outputs, an `Output` for each).

    Outputs that can't be combined are an error.

    Args:
      objective: the function (params, Given) of a rank, as from `make_objective`.
      params: whole parameters.
      given: the other arguments, with a rank's part of a batch.
      parts: the micro-batches of this part.
      own: for each leaf of the model state, whether it differs between ranks before a step. None: each rank has its own
        state, so all leaves may differ, before and after a step.
      names: the axes of the ranks.
    """
    leaves, tree = jax.tree_util.tree_flatten(given.batch)
    first = lambda x, d: jax.lax.slice_in_dim(x, 0, max(x.shape[d] // parts.number, 1), axis=d)
    small = [x if d is None else first(x, d) for x, d in zip(leaves, parts.dimensions)]
    times = lambda n: [x if d is None else jnp.concatenate([x] * n, d) for x, d in zip(small, parts.dimensions)]

    def results(params: Any, model_state: Any, batch: list[Any], key: Any) -> tuple[Any, Any]:
        own = given._replace(model_state=model_state, batch=tree.unflatten(batch), key=key)
        _, (_, new, aux) = objective(params, own)
        return new, jax.tree_util.tree_map(jnp.asarray, aux)

    def trace(batch: list[Any], axes: Sequence[tuple[Any, int]] = ()) -> Traced:
        traced = jax.make_jaxpr(results, axis_env=axes, return_shape=True)
        return Traced(*traced(params, given.model_state, batch, given.key))

    traced = other = trace(small)
    double = lambda: trace(times(2))
    if jax.tree_util.tree_leaves(traced.shapes[1]):
        try:
            other = double()
        except (TypeError, ValueError) as error:
            if not parts.guessed:  # a wrong guess is no error: the batch may have no examples
                expected, got = "a function of any number of examples, with has_aux", "one that fails for twice as many"
                raise wrong(OP, "loss_fn", expected, got, "take sizes from the shapes of the batch") from error
    states = jax.tree_util.tree_leaves(given.model_state)
    of_state = [True] * len(states) if own is None else own
    known = [False] * len(jax.tree_util.tree_leaves(params)), [d is not None for d in parts.dimensions]
    keys = [True] * (given.key is not None)

    def differ(names: tuple[Any, ...], several: bool) -> list[bool]:
        """Returns for each result whether it may differ between ranks.

        With `several`, results may also differ because each micro-batch gets the model state of the one before.
        """
        state = list(of_state)
        while True:
            found = differing(traced.jaxpr, [*known[0], *state, *known[1], *keys], names)
            after = [was or now for was, now in zip(state, found)] if several else state
            if after == state:
                return found
            state = after

    several = parts.number > 1
    if own is not None:
        _check_states(traced.shapes[0], differ(names, several), states)
    # With several micro-batches, a result that is the same on all ranks may still differ between micro-batches.
    of_aux = differ(() if several else names, several)[len(states) :]
    outputs = _of_aux(traced, other, of_aux)
    found = jax.tree_util.tree_leaves_with_path(traced.shapes)
    sizes = {name: jax.lax.axis_size(name) for name in names}
    alone, examples = [(name, 1) for name in names], math.prod(sizes.values())
    wrong_counts = counted(
        traced.jaxpr,
        lambda: (double() if other is traced else other).jaxpr,
        (lambda: trace(times(examples), alone).jaxpr) if names else None,
        inputs=[*known[0], *of_state, *known[1], *keys],
        results=[path[0].idx == 1 or (own is not None and bool(names)) for path, _ in found],
        sizes=sizes,
    )
    for i, got in wrong_counts.items():
        (result, *path), _ = found[i]
        what = "auxiliary outputs that don't" if result.idx else "a model state that doesn't"
        expected = f"{what} depend on the number of examples in a rank's part"
        raise wrong(OP, "loss_fn", expected, got, remedy_of_counts(names), path=path)
    return jax.tree_util.tree_structure(traced.shapes[1]), outputs


def _check_states(shapes: Any, differ: list[bool], states: list[Any]) -> None:
    """Refuses integers and flags of a model state if they may differ between ranks."""
    for (path, x), differs in zip(jax.tree_util.tree_leaves_with_path(shapes), differ):
        if differs and addable(x) and not jnp.issubdtype(x.dtype, jnp.inexact):
            expected = "integers and flags of a model state that don't depend on a rank's part of the batch"
            remedy = 'add them up over the ranks, as jax.lax.psum(n, data_axis), or pass model_state="per_rank"'
            raise wrong(OP, "loss_fn", expected, f"{spell_array(x)} that do", remedy, path=path)


def _of_aux(traced: Traced, other: Traced, differ: Sequence[bool]) -> list[Output]:
    """Returns an `Output` for each auxiliary output, from the programs for two batch sizes."""
    outputs: list[Output] = []
    found = jax.tree_util.tree_leaves_with_path(traced.shapes[1])
    for (path, x), y, differs in zip(found, jax.tree_util.tree_leaves(other.shapes[1]), differ):
        rows = [i for i, (n, m) in enumerate(zip(x.shape, y.shape)) if n != m]
        if len(rows) > 1 or x.ndim != y.ndim or any(y.shape[i] != 2 * x.shape[i] for i in rows):
            expected = "auxiliary outputs that have the examples along one dimension, or along none"
            got = f"{spell_array(x)}, and {spell_array(y)} for twice as many examples"
            raise wrong(OP, "loss_fn", expected, got, path=path)
        inexact = jnp.issubdtype(x.dtype, jnp.inexact)
        if differs and not rows and not inexact and addable(x):
            expected = "auxiliary outputs that are means in floating point, or have a row for each example"
            remedy = "return a mean, as in (prediction == label).mean()"
            raise wrong(OP, "loss_fn", expected, f"{spell_array(x)} that depends on the batch", remedy, path=path)
        outputs.append(Output(rows[0] if rows else None, bool(differs and inexact and not rows), x.dtype))
    return outputs
