"""What plans and collectives ask of leaves: their names, whether codecs take them, which of them share a message."""

from collections.abc import Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from jaxcgx.codecs.base import Codec
from jaxcgx.codecs.low_rank import LowRank
from jaxcgx.native.layout import DTYPES

# A leaf: a jax.Array, np.ndarray or jax.ShapeDtypeStruct, whose own types JAX leaves open. Tracers are arrays.
Shaped: TypeAlias = Any


def spell_path(path: Any) -> str:
    """A JAX path as rules see it: "a/b/kernel"."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def why_unfit(leaf: Shaped) -> str | None:
    """Why no codec can take a leaf; None if codecs can."""
    if leaf.dtype not in DTYPES:
        return f"{leaf.dtype} is not float32, bfloat16 or float16"
    return "it has no elements" if leaf.size == 0 else None


def why_raw(leaf: Shaped, codecs: Sequence[Codec]) -> str | None:
    """Why a leaf travels raw; None where one of the codecs encodes it and none refuses it."""
    if why := why_unfit(leaf) or ("its codec is Raw()" if all(codec.raw for codec in codecs) else None):
        return why
    return next((why for codec in codecs if (why := codec.why_raw(leaf.shape, jnp.dtype(leaf.dtype)))), None)


def factor_shape(leaf: Shaped, codecs: Sequence[Codec]) -> tuple[int, ...] | None:
    """The shape of a leaf's warm-start factor (PowerSGD), or None.

    Args:
      leaf: the leaf.
      codecs: its codecs, the outermost one first.
    """
    low_rank = next((codec for codec in codecs if isinstance(codec, LowRank)), None)
    return None if low_rank is None or why_raw(leaf, codecs) else low_rank.factor_shape(leaf.shape)


def messages(leaves: Sequence[Shaped], limit: float) -> list[list[int]]:
    """Which leaves share a message: lists of indices, in order, of up to `limit` bytes. A larger leaf travels alone."""
    found: list[list[int]] = []
    room = -1.0
    for i, leaf in enumerate(leaves):
        size = leaf.size * jnp.dtype(leaf.dtype).itemsize
        if size > room:
            found.append([])
            room = limit
        found[-1].append(i)
        room -= size
    return found
