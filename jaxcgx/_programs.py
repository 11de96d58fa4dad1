"""Looks into traced programs, for what their shapes and types don't say. `explain` has looks of its own."""

import re
from collections.abc import Sequence
from typing import Any

import jax

from jaxcgx import _compat

# The order in which gradients are ready. Hooks on parameters would only give the order of the tree.


def ready(program: Any, n: int) -> tuple[int, ...]:
    """Returns the numbers of the first n results of a traced program, in the order in which they are ready."""
    ends = _ends(program.jaxpr, [0] * len(program.jaxpr.invars))[:n]
    return tuple(sorted(range(n), key=ends.__getitem__))


def _ends(jaxpr: Any, begins: Sequence[int]) -> list[int]:
    """Returns for each result the number of operations on the longest path from the arguments to this result.

    The order in which a program lists its operations doesn't show when results are ready. For example, an operation on
    every gradient is often listed for all gradients at the end. `begins` has the operations before each argument.
    """
    known = dict(zip(jaxpr.invars, begins))
    end = lambda atom: known.get(atom, 0) if not hasattr(atom, "val") else 0  # a literal can't be a key
    for eqn in jaxpr.eqns:
        given = [end(atom) for atom in eqn.invars]
        inner = [getattr(value, "jaxpr", value) for value in eqn.params.values()]
        inner = [value for value in inner if hasattr(value, "eqns")]
        if len(inner) == 1 and len(inner[0].invars) == len(given) and not eqn.primitive.name.startswith(_LOOPS):
            found = _ends(inner[0], given)
        else:  # all results of a loop are ready at the same time
            found = [max(given, default=0) + 1 + _length(inner)] * len(eqn.outvars)
        known.update(zip(eqn.outvars, found))
    return [end(atom) for atom in jaxpr.outvars]


_LOOPS = ("scan", "while")


def _length(programs: Sequence[Any]) -> int:
    """Returns the number of operations on the longest path through any of the programs."""
    return max((max(_ends(each, [0] * len(each.invars)), default=0) for each in programs), default=0)


# Whether an optimizer is the same under vmap. Otherwise it would always have to run without, where it isn't in place.


def same_in_vmap(program: Any) -> bool:
    """Returns whether vmap leaves what a traced program does as it is.

    It runs both branches of a conditional, and refuses or repeats calls of functions that aren't JAX's.
    """
    program = _compat.open_jaxpr(program)
    values = [value for eqn in program.eqns for value in jax.tree_util.tree_leaves(list(eqn.params.values()))]
    inner = [value for value in values if hasattr(getattr(value, "jaxpr", value), "eqns")]
    changed = any(re.search("cond|while|callback|ffi_call", eqn.primitive.name) for eqn in program.eqns)
    return not (program.effects or changed) and all(map(same_in_vmap, inner))


# Whether a loss closes over the examples of all ranks. Their gradient would be wrong without an error.


def closed_over(jaxpr: Any, count: int) -> list[Any]:
    """Returns the arrays that a traced function of `count` arrays closes over, or only their types."""
    inner = _compat.open_jaxpr(jaxpr)
    found = [*jaxpr.consts, *(x.aval for x in inner.invars[: len(inner.invars) - count])]
    for eqn in inner.eqns:
        for value in eqn.params.values():
            if hasattr(value, "consts"):
                found += closed_over(value, len(getattr(value, "jaxpr", value).invars))
    return found


# Where a loss constrains how arrays are sharded. Over the ranks' axes, which shard_map has made manual, it must not.
# Without check_vma, JAX refuses a NamedSharding only when it compiles, in the caller's jit. Nothing could explain that.


def constraints(jaxpr: Any) -> list[Any]:
    """Returns the PartitionSpecs of all sharding constraints in a traced program."""
    found: list[Any] = []
    for eqn in _compat.open_jaxpr(jaxpr).eqns:
        if eqn.primitive.name == "sharding_constraint":
            found.append(getattr(eqn.params.get("sharding"), "spec", ()))
        for param in eqn.params.values():
            for value in param if isinstance(param, tuple | list) else [param]:
                if hasattr(getattr(value, "jaxpr", value), "eqns"):
                    found += constraints(value)
    return found


# Whether a program has been compiled before. A loss may close over other values at its next call. jit wouldn't see it.


def key(lowered: Any, args: Sequence[Any], mesh: Any) -> Any:
    """Returns a key that only programs of the same text for the same kinds of arguments share.

    None: there is none, because the text doesn't name the Python functions that the program calls.
    """
    text = lowered.as_text()
    places = tuple(x.sharding if getattr(x, "committed", False) else None for x in args)
    dtypes = tuple(getattr(x, "dtype", None) for x in args)  # in the text, a random key is an array of its words
    return None if "callback" in text else (text, places, dtypes, mesh, jax.sharding.get_mesh())
