"""Programs outside of jit: traced at every call, and compiled once."""

import functools
from typing import Any

import jax

from jaxcgx import _compat

MOST = 64  # programs that are kept
_compiled: dict[Any, Any] = {}


def call(traced: Any, *args: Any, mesh: Any) -> Any:
    """What a function that jax.jit has traced returns for these arguments.

    jax.jit would recognize the function, and use what it closed over at the first call. Here equal programs are
    compiled once. Arrays that a function closes over are arguments of its program, so that they may change.
    """
    consts, flat = traced.jaxpr.consts, jax.tree_util.tree_leaves(args)
    evaluate = functools.partial(_compat.eval_jaxpr, getattr(traced.jaxpr, "jaxpr", traced.jaxpr))
    lowered = jax.jit(evaluate).lower(consts, *flat)
    text = lowered.as_text()
    places = tuple(x.sharding if getattr(x, "committed", False) else None for x in (*consts, *flat))
    key = text, places, mesh, jax.sharding.get_mesh()
    program = None if "callback" in text else _compiled.get(key)  # the text doesn't say which function of Python
    if program is None:
        program = _compiled[key] = lowered.compile()
        if len(_compiled) > MOST:
            del _compiled[next(iter(_compiled))]
    return jax.tree_util.tree_unflatten(jax.tree_util.tree_structure(traced.out_info), program(consts, *flat))
