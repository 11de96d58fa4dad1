"""Runs a primitive outside jit as a separate compiled program, even under `jax.disable_jit`.

JAX's own primitives do the same. With `jax.jit` alone, `jax.disable_jit` would make the implementation call itself
forever.
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
