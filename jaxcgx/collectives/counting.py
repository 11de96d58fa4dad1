"""Finds the results of a traced program that count the examples of a rank's part of a batch."""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jaxcgx import _compat
from jaxcgx.collectives.differing import differing

_MOST = 10_000_000  # the most elements that are computed to compare two programs
_SCALES = 0, 1, 1000  # of the made-up inputs


def counted(
    part: Any,
    more: Callable[[], Any],
    whole: Callable[[], Any] | None,
    *,
    inputs: Sequence[bool],
    results: Sequence[bool],
    sizes: Mapping[Any, int],
) -> dict[int, str]:
    """Returns {number: what is wrong} for the results that depend on how many examples a rank has.

    Results that depend on the values of the batch or on random keys are never among them. The others must be the same
    as those of a plain program, which has the whole batch and no ranks. Both programs are computed for made-up inputs.
    If that fails, there is no error.

    Args:
      part: the program of a rank's part.
      more: a function that traces it for more examples. If this changes nothing, `whole` isn't called.
      whole: a function that traces it for the whole batch, with axes of size 1. None: there are no named axes, and only
        constants are found.
      inputs: for each input, whether it belongs to the batch or is a random key.
      results: for each result, whether to look at it.
      sizes: the number of ranks along each axis.
    """
    program = getattr(part, "jaxpr", part)
    given = set(program.invars)
    unchanged = [not hasattr(x, "val") and x in given for x in program.outvars]
    differ = differing(part, inputs, names=())
    chosen = [wanted and not (differs or same) for wanted, differs, same in zip(results, differ, unchanged)]
    if not any(chosen) or (larger := _attempt(more)) is None or _same(part, larger, chosen):
        return {}
    alone = lambda i: [k == i for k in range(len(chosen))]
    found = [i for i, each in enumerate(chosen) if each and not _same(part, larger, alone(i))]
    if (plain := None if whole is None else _attempt(whole)) is None:
        constants = ((i, _constant(part, i), _constant(larger, i)) for i in found)
        pairs = {i: (one, other) for i, one, other in constants if one is not None and other is not None}
        return {i: f"{one}, and {other} for more examples" for i, (one, other) in pairs.items() if one != other}
    ones = dict.fromkeys(sizes, 1)
    pairs = {i: (_probe(part, alone(i), inputs, sizes), _probe(plain, alone(i), inputs, ones)) for i in found}
    spelled = {i: _difference(*pair) for i, pair in pairs.items()}
    return {i: text for i, text in spelled.items() if text}


def remedy_of_counts(names: Sequence[Any]) -> str:
    """Returns the remedy for a result that `counted` finds. `names` are the axes of the ranks."""
    if not names:
        return ""
    axes = repr(names[0]) if len(names) == 1 else repr(tuple(names))
    return f"multiply x.shape[0] by jax.lax.axis_size({axes})".replace("'", '"')


def _attempt(trace: Callable[[], Any]) -> Any:
    """Returns a program, or None if the function can't take so many examples or ranks."""
    try:
        return trace()
    except Exception:  # any error of the user's function
        return None


def _constant(program: Any, i: int) -> str | None:
    """Returns the value of a result as text if it is a constant."""
    x = getattr(program, "jaxpr", program).outvars[i]
    return str(np.asarray(x.val)) if hasattr(x, "val") else None


def _same(one: Any, other: Any, results: list[bool]) -> bool:
    """Returns whether two programs compute these results alike, from the same inputs."""
    (first, of_first), (second, of_second) = (_compat.slice_program(x, results) for x in (one, other))
    text = lambda jaxpr: re.sub(" at 0x[0-9a-f]+", "", str(jaxpr))
    if of_first != of_second or text(first) != text(second):
        return False
    pairs = list(zip(_consts(one, first), _consts(other, second)))
    small = lambda x: not isinstance(x, Tracer) and np.size(x) <= 1000
    return all(x is y or (small(x) and small(y) and np.array_equal(x, y)) for x, y in pairs)


def _consts(program: Any, jaxpr: Any) -> Iterator[Any]:
    """Yields the arrays that a program closes over: `jaxpr` is the part of the program that counts."""
    yield from getattr(program, "consts", ())
    for eqn in jaxpr.eqns:
        for value in eqn.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                if hasattr(getattr(inner, "jaxpr", inner), "eqns"):
                    yield from _consts(inner, getattr(inner, "jaxpr", inner))


def _probe(program: Any, results: list[bool], inputs: Sequence[bool], sizes: Mapping[Any, int]) -> Any:
    """Returns the only result that is chosen by `results`, for inputs of each scale, or None if that is too hard.

    vmap does what collectives do among ranks that have the same numbers.
    """
    jaxpr, used = _compat.slice_program(program, results)
    shapes = [x.aval for x in jaxpr.invars]
    size = sum(math.prod(getattr(x.aval, "shape", ())) for eqn in jaxpr.eqns for x in eqn.outvars)
    if any(differs for use, differs in zip(used, inputs) if use) or size > _MOST:
        return None
    call = lambda args: _compat.eval_jaxpr(jaxpr, program.consts, *args)[0]
    for name, count in sizes.items():
        call = jax.vmap(call, in_axes=None, axis_name=name, axis_size=count)
    try:
        with jax.ensure_compile_time_eval():
            found = [np.asarray(call([_made_up(x, scale) for x in shapes])) for scale in _SCALES]
    except Exception:  # an operation that can't run here, such as one of another device
        return None
    return [x[(0,) * len(sizes)] for x in found]


def _made_up(x: Any, scale: int) -> jax.Array:
    """Returns an input like x, a shape and a dtype."""
    numbers = np.arange(math.prod(x.shape)).reshape(x.shape) % 7
    inexact = jnp.issubdtype(x.dtype, jnp.inexact)
    return jnp.asarray((scale * (0.5 + numbers / 8 if inexact else 1 + numbers)).astype(x.dtype))


def _difference(part: Any, whole: Any) -> str:
    """Returns in words how the results of `_probe` differ; "" if they don't, or if they aren't known."""
    if part is None or whole is None or any(x.shape != y.shape for x, y in zip(part, whole)):
        return ""
    for x, y, scale in zip(part, whole, _SCALES):
        inexact = jnp.issubdtype(x.dtype, jnp.inexact)
        near = dict(rtol=float(jnp.finfo(x.dtype).eps) ** 0.5 if inexact else 0, atol=0)
        equal = np.isclose(x.astype(complex), y.astype(complex), equal_nan=True, **near)
        if not equal.all():
            numbers = f"{x[~equal].flat[0]} of a rank's part, {y[~equal].flat[0]} of all"
            return f"for made-up inputs {numbers}" if scale else numbers
    return ""
