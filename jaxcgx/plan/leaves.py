"""Functions on leaves, for plans and collectives: paths, the reasons why leaves travel raw, and shared messages."""

from collections.abc import Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from jaxcgx.codecs.base import Codec, LowRank
from jaxcgx.native.layout import DTYPES

# A leaf: a jax.Array (tracers count, too), np.ndarray or jax.ShapeDtypeStruct. JAX has no precise types for their
# shapes and dtypes.
Shaped: TypeAlias = Any


def spell_path(path: Any) -> str:
    """Returns a JAX path as a text such as "a/b/kernel", which rules match."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def why_unfit(leaf: Shaped) -> str | None:
    """Returns the reason why no codec can take a leaf, or None if codecs can."""
    if leaf.dtype not in DTYPES:
        return f"{leaf.dtype} is not float32, bfloat16 or float16"
    return "it has no elements" if leaf.size == 0 else None


def why_raw(leaf: Shaped, codecs: Sequence[Codec]) -> str | None:
    """Returns the reason why a leaf travels raw, or None if one of its codecs compresses it and none refuses it."""
    if why := why_unfit(leaf) or ("its codec is Raw()" if all(codec.raw for codec in codecs) else None):
        return why
    return next((why for codec in codecs if (why := codec.why_raw(leaf.shape, jnp.dtype(leaf.dtype)))), None)


def factor_shape(leaf: Shaped, codecs: Sequence[Codec]) -> tuple[int, ...] | None:
    """Returns the shape of a leaf's warm-start factor (PowerSGD), or None if the leaf has no factor.

    Args:
      leaf: the leaf.
      codecs: the codecs of the leaf, outermost first.
    """
    low_rank = next((codec for codec in codecs if isinstance(codec, LowRank)), None)
    return None if low_rank is None or why_raw(leaf, codecs) else low_rank.factor_shape(leaf.shape)


def messages(leaves: Sequence[Shaped], limit: float) -> list[list[int]]:
    """Groups leaves into messages of at most `limit` bytes. A larger leaf travels alone.

    Returns the messages as lists of the leaves' indices, in order.
    """
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
