"""Runs a primitive outside jit as a compiled program of its own, even under `jax.disable_jit`.

JAX's own primitives do the same. A function that is jitted by hand would call itself forever under `jax.disable_jit`.
"""

import functools
from typing import Any

import jax


def define_impl(primitive: Any) -> None:
    @functools.lru_cache
    def compiled(params: tuple[tuple[str, Any], ...]) -> Any:
        return jax.jit(functools.partial(primitive.bind, **dict(params)))

    def impl(*operands: Any, **params: Any) -> Any:
        with jax.disable_jit(False):
            return compiled(tuple(params.items()))(*operands)

    primitive.def_impl(impl)
