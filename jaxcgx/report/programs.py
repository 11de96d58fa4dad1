"""Compiles functions to programs, no matter which library has jitted them."""

import dataclasses
from collections.abc import Iterable
from typing import Any

import jax

from jaxcgx.checks import wrong


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled program, with its earlier forms if they are known."""

    text: str  # XLA's text
    shardings: Iterable[Any]  # the shardings of the program's arguments and results
    results: list[str]  # the paths of its results
    jaxpr: Any = None
    lowered_text: str = ""  # StableHLO's text with names, before XLA joins operations


def compile_program(fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Program:
    """Returns the program of a function for these arguments. `fn` may also be lowered or compiled already."""
    made = _inner(fn, "compiled", jax.stages.Compiled) or _inner(fn, "lowered", jax.stages.Lowered)
    if made is not None:
        if args or kwargs:
            got = f"{len(args) + len(kwargs)} behind {type(fn).__name__}"
            raise wrong("explain", "args", "none behind a program that is lowered or compiled", got, kind=TypeError)
        return _of_lowered(made) if isinstance(made, jax.stages.Lowered) else _of_compiled(made)
    if not callable(fn):
        expected = "a function, jitted or not, and behind it its arguments; or a program, lowered or compiled"
        raise wrong("explain", "fn", expected, repr(fn), kind=TypeError)
    jitted: Any = fn if hasattr(fn, "lower") else jax.jit(fn)
    if hasattr(jitted, "trace"):
        traced = jitted.trace(*args, **kwargs)
        traced = getattr(traced, "traced", traced)  # nnx.jit wraps JAX's object
        return _of_compiled(traced.lower().compile(), jaxpr=traced.jaxpr)
    lowered = jitted.lower(*args, **kwargs)
    own = _inner(lowered, "lowered", jax.stages.Lowered)
    if lowered is own:  # pmap
        return _of_compiled(lowered.compile(), jaxpr=jax.make_jaxpr(jitted)(*args, **kwargs))
    return _of_lowered(own)


def _inner(given: Any, name: str, kind: type[Any]) -> Any:
    """Returns a stage of JAX, which may be inside a stage of eqx.filter_jit or nnx.jit; None for anything else."""
    found = given if isinstance(given, kind) else getattr(given, name, None)
    return found if isinstance(found, kind) else None


def _of_lowered(lowered: Any) -> Program:
    return _of_compiled(lowered.compile(), lowered_text=lowered.as_text(debug_info=True))


def _of_compiled(compiled: Any, **known: Any) -> Program:
    shardings = jax.tree_util.tree_leaves((compiled.input_shardings, compiled.output_shardings))
    results = jax.tree_util.tree_leaves_with_path(compiled.out_tree.unflatten(range(compiled.out_tree.num_leaves)))
    return Program(compiled.as_text(), shardings, [jax.tree_util.keystr(path) for path, _ in results], **known)
