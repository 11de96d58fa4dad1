"""Finds the results of a traced program that may differ between ranks."""

from collections.abc import Callable, Sequence
from typing import Any

from jaxcgx import _compat

# Collectives that give all ranks the same result.
_SHARED = {"psum", "psum2", "psum_invariant", "pmax", "pmin", "all_gather", "all_gather_invariant"}


def differing(jaxpr: Any, inputs: Sequence[bool], names: tuple[Any, ...]) -> list[bool]:
    """Returns for each result of a program whether it may differ between ranks.

    Args:
      jaxpr: the program.
      inputs: for each input, whether it differs between ranks.
      names: the axes of the ranks. A value that is reduced over all of them is the same on every rank.
    """
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)  # newer versions of JAX have only one class of jaxprs
    found = {x for x, differs in zip(jaxpr.invars, inputs) if differs}
    differs = lambda x: not hasattr(x, "val") and x in found
    for eqn in jaxpr.eqns:
        results = _of_equation(eqn, [differs(x) for x in eqn.invars], names)
        found.update(x for x, each in zip(eqn.outvars, results) if each)
    return [differs(x) for x in jaxpr.outvars]


def _of_equation(eqn: Any, given: list[bool], names: tuple[Any, ...]) -> list[bool]:
    kind, params, count = eqn.primitive.name, eqn.params, len(eqn.outvars)
    inner = lambda jaxpr: lambda given: differing(jaxpr, given, names)
    if kind == "axis_index":
        return [True]
    if kind in _SHARED and names and not params.get("axis_index_groups"):
        axes = params.get("axes", params.get("axis_name", ()))
        axes = axes if isinstance(axes, tuple | list) else (axes,)
        return [any(given) and not set(names) <= set(axes)] * count
    if kind == "scan":
        consts, carry = _compat.counts_of_scan(params)
        return _of_loop(inner(params["jaxpr"]), given[:consts], given[consts : consts + carry], given[consts + carry :])
    if kind == "while":
        of_test, of_body = params["cond_nconsts"], params["body_nconsts"]
        carry = given[of_test + of_body :]
        done = _of_loop(inner(params["body_jaxpr"]), given[of_test : of_test + of_body], carry, [])
        return [True] * count if any(inner(params["cond_jaxpr"])([*given[:of_test], *done])) else done
    if kind == "cond":
        results = [inner(branch)(given[1:]) for branch in params["branches"]]
        return [given[0] or any(each) for each in zip(*results)]
    programs = [value for value in params.values() if hasattr(getattr(value, "jaxpr", value), "eqns")]
    if len(programs) == 1 and len(getattr(programs[0], "jaxpr", programs[0]).invars) == len(given):
        found = inner(programs[0])(given)
        if len(found) == count:
            return found
    return [any(given)] * count


def _of_loop(body: Callable[..., list[bool]], consts: list[bool], carry: list[bool], xs: list[bool]) -> list[bool]:
    """Returns for each result of a loop whether it may differ between ranks.

    The body is repeated until no further carried value differs, because the next iteration gets these values.
    """
    while True:
        results = body([*consts, *carry, *xs])
        after = [was or now for was, now in zip(carry, results)]
        if after == carry:
            return [*carry, *results[len(carry) :]]
        carry = after
