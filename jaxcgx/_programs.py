"""Looks into traced programs, for what their shapes and types don't say, and runs them."""

import functools
import hashlib
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from jaxcgx import _compat
from jaxcgx.typing import PyTree


def _inner(eqn: Any) -> list[Any]:
    """Returns the programs that an operation runs, such as the branches of a conditional."""
    values = jax.tree.leaves(list(eqn.params.values()))
    return [value for value in values if hasattr(_compat.open_jaxpr(value), "eqns")]


def _called(eqn: Any) -> Any:
    """Returns the program that an operation runs once, with the arguments of the operation; None if it runs no such."""
    inner = [_compat.open_jaxpr(each) for each in _inner(eqn)]
    alone = len(inner) == 1 and len(inner[0].invars) == len(eqn.invars) and not eqn.primitive.name.startswith(_LOOPS)
    return inner[0] if alone else None


_LOOPS = ("scan", "while")


def operations(program: Any, outer: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yields the operations of a traced program and of the programs inside it, each behind those that it is inside."""
    for eqn in _compat.open_jaxpr(program).eqns:
        yield *outer, eqn
        for each in _inner(eqn):
            yield from operations(each, (*outer, eqn))


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
        if (called := _called(eqn)) is not None:
            found = _ends(called, given)
        else:  # all results of a loop are ready at the same time
            inner = [_compat.open_jaxpr(each) for each in _inner(eqn)]
            ends = [end for each in inner for end in _ends(each, [0] * len(each.invars))]
            found = [max(given, default=0) + 1 + max(ends, default=0)] * len(eqn.outvars)
        known.update(zip(eqn.outvars, found))
    return [end(atom) for atom in jaxpr.outvars]


# Whether an optimizer is the same under vmap. Otherwise it would always have to run without, where it isn't in place.


def same_in_vmap(program: Any) -> bool:
    """Returns whether vmap leaves a program as it is. It runs both branches of conditionals, and repeats callbacks."""
    changed = re.compile("cond|while|callback|ffi_call")
    names = [eqn.primitive.name for *_, eqn in operations(program)]
    return not _compat.open_jaxpr(program).effects and not any(map(changed.search, names))


# Whether an optimizer has momentum: the state of optax.adam(rate, b1=0) looks as if it had.


def depends(program: Any, arguments: Collection[int]) -> list[bool]:
    """Returns whether each result depends on any of these arguments. A product with a literal 0 depends on nothing."""
    jaxpr = _compat.open_jaxpr(program)
    moving = {x for i, x in enumerate(jaxpr.invars) if i in arguments}
    moves = lambda atom: not hasattr(atom, "val") and atom in moving  # a literal can't be in a set
    for eqn in jaxpr.eqns:
        given = {i for i, atom in enumerate(eqn.invars) if moves(atom)}
        if eqn.primitive.name == "mul" and any(np.ndim(x := getattr(a, "val", 1)) == 0 and x == 0 for a in eqn.invars):
            continue
        called = _called(eqn)
        found = [bool(given)] * len(eqn.outvars) if called is None else depends(called, given)
        moving.update(x for x, each in zip(eqn.outvars, found) if each)
    return list(map(moves, jaxpr.outvars))


# Whether a loss closes over the examples of all ranks. Their gradient would be wrong without an error.


def closed_over(jaxpr: Any, count: int) -> list[Any]:
    """Returns the arrays that a traced function of `count` arrays closes over, or only their types."""
    arguments = _compat.open_jaxpr(jaxpr).invars
    found = [*getattr(jaxpr, "consts", ()), *(x.aval for x in arguments[: len(arguments) - count])]
    for *_, eqn in operations(jaxpr):
        found += [x.val for x in eqn.invars if np.ndim(getattr(x, "val", 0))]
        found += [x for each in _inner(eqn) for x in getattr(each, "consts", ())]
    return found


# Where a loss constrains how arrays are sharded. Where vmap has made the ranks, a constraint over their axes means the
# devices of a rank, and JAX's vmap refuses it.


def constrained_without(names: Collection[Any], program: Any) -> Any:
    """Returns a traced program whose sharding constraints don't have the axes `names`.

    A program without constraints is returned itself, so that JAX finds it in its caches.
    """
    values = (x for *_, eqn in operations(program) for x in jax.tree.leaves(list(eqn.params.values())))
    if not any(isinstance(x, jax.sharding.NamedSharding) for x in values):
        return program

    def replaced(value: Any) -> Any:
        if isinstance(value, jax.sharding.NamedSharding):
            others = lambda part: tuple(name for name in part if name not in names) or None
            parts = [(part,) if isinstance(part, str) else part for part in value.spec]
            return value.update(spec=P(*(others(part) if isinstance(part, tuple) else part for part in parts)))
        return constrained_without(names, value) if hasattr(_compat.open_jaxpr(value), "eqns") else value

    def of_operation(eqn: Any) -> Any:
        found = _inner(eqn) or eqn.primitive.name == "sharding_constraint"
        return eqn.replace(params=jax.tree.map(replaced, eqn.params)) if found else eqn

    inner = _compat.open_jaxpr(program)
    new = inner.replace(eqns=list(map(of_operation, inner.eqns)))
    return new if inner is program else program.replace(jaxpr=new)


# Whether processes have the same outer optimizer. Functions can't be compared, and settings are closed over.


def digest_of(function: Callable[..., Any], *args: PyTree) -> str:
    """Returns a digest of what a function computes from such arguments, with its constants."""
    program = jax.make_jaxpr(function)(*args)
    text = re.sub(r"0x[0-9a-f]+", "", str(program))  # addresses of functions
    constants = b"".join(np.asarray(x).tobytes() for x in program.consts)
    return hashlib.sha256(text.encode() + constants).hexdigest()[:8]


# Whether a program has been compiled before. A loss may close over other values at its next call. jit wouldn't see it.

MOST_COMPILED = 64  # the most programs that are kept
_compiled: dict[Any, Any] = {}


def jitted(function: Callable[..., Any], *args: PyTree, mesh: Any) -> PyTree:
    """Runs a new function under jit, and returns its result for these arguments.

    jax.jit would compile it at every call. Here, the text of a program is the key of the cache. Arrays that the
    function closes over are arguments of the program, so their values may change between calls.
    """
    if not _compat.is_eager():
        return jax.jit(function)(*args)
    traced = jax.jit(function).trace(*args)
    flat = [*traced.jaxpr.consts, *jax.tree.leaves(args)]
    count, run = len(traced.jaxpr.consts), functools.partial(_compat.eval_jaxpr, _compat.open_jaxpr(traced.jaxpr))
    lowered = jax.jit(lambda *flat: run(flat[:count], *flat[count:])).lower(*flat)
    text = lowered.as_text()
    places = tuple(x.sharding if getattr(x, "committed", False) else None for x in flat)
    dtypes = tuple(getattr(x, "dtype", None) for x in flat)  # in the text, a random key is an array of its words
    key = text, places, dtypes, mesh, jax.sharding.get_mesh()
    program = None if "callback" in text else _compiled.get(key)  # the text doesn't name the Python function
    if program is None:
        program = _compiled[key] = lowered.compile()
        if len(_compiled) > MOST_COMPILED:
            del _compiled[next(iter(_compiled))]
    with jax.disable_jit(False):  # under jax.disable_jit, JAX runs no compiled program
        results = program(*flat)
    return jax.tree.unflatten(jax.tree.structure(traced.out_info), results)


# What a traced program returns: a loss is traced once, looked at, and then is a part of its caller's program.


def evaluate(program: Any, shapes: PyTree, *args: PyTree) -> PyTree:
    """Returns what a traced program returns for these arguments, in the structure of `shapes`."""
    found = _compat.eval_jaxpr(_compat.open_jaxpr(program), program.consts, *jax.tree.leaves(args))
    return jax.tree.unflatten(jax.tree.structure(shapes), found)
