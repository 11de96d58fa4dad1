"""Calls outside of jit: the function is traced at every call, and equal programs are compiled once."""

import functools
from typing import Any

import jax

from jaxcgx import _compat

MOST = 64  # the most compiled programs that are kept
_compiled: dict[Any, Any] = {}


def call(traced: Any, *args: Any, mesh: Any) -> Any:
    """Runs a function that jax.jit has traced, and returns its result for these arguments.

    jax.jit would find the function in its cache, and use the values that the function closed over at its first call.
    Here, the text of a program is the key of the cache. Arrays that the function closes over are arguments of the
    program, so their values may change between calls.
    """
    consts, flat = traced.jaxpr.consts, jax.tree_util.tree_leaves(args)
    evaluate = functools.partial(_compat.eval_jaxpr, getattr(traced.jaxpr, "jaxpr", traced.jaxpr))
    lowered = jax.jit(evaluate).lower(consts, *flat)
    text = lowered.as_text()
    places = tuple(x.sharding if getattr(x, "committed", False) else None for x in (*consts, *flat))
    dtypes = tuple(getattr(x, "dtype", None) for x in flat)  # in the text, a random key is an array of its words
    key = text, places, dtypes, mesh, jax.sharding.get_mesh()
    program = None if "callback" in text else _compiled.get(key)  # the text doesn't name the Python function
    if program is None:
        program = _compiled[key] = lowered.compile()
        if len(_compiled) > MOST:
            del _compiled[next(iter(_compiled))]
    with jax.disable_jit(False):  # under jax.disable_jit, JAX runs no compiled program
        results = program(consts, *flat)
    return jax.tree_util.tree_unflatten(jax.tree_util.tree_structure(traced.out_info), results)
