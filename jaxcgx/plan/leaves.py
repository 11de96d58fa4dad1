"""What a plan and the collectives ask of leaves: their names, whether a codec can take them, which share a message."""

import jax
import jax.numpy as jnp

from jaxcgx.native.layout import DTYPES


def spell_path(path):
    """A JAX path as rules see it: "a/b/kernel"."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def why_unfit(leaf):
    """Why no codec can take a leaf."""
    if leaf.dtype not in DTYPES:
        return f"{leaf.dtype} is not float32, bfloat16 or float16"
    return "it has no elements" if leaf.size == 0 else None


def why_raw(leaf, codecs):
    """Why a leaf travels as it is; None where one of the codecs encodes it, and none refuses it."""
    if why := why_unfit(leaf) or ("its codec is Raw()" if all(codec.raw for codec in codecs) else None):
        return why
    return next((why for codec in codecs if (why := codec.why_raw(leaf.shape, jnp.dtype(leaf.dtype)))), None)


def factor_shape(leaf, codecs):
    """Of the factor that a leaf with these codecs, outermost first, hands from step to step (PowerSGD); None if there
    is none."""
    low_rank = next((codec for codec in codecs if codec.low_rank), None)
    return None if low_rank is None or why_raw(leaf, codecs) else low_rank.factor_shape(leaf.shape)


def messages(leaves, limit):
    """Lists of indices into `leaves`, in order, each of leaves of up to `limit` bytes together; a larger leaf travels
    alone."""
    found, room = [], -1
    for i, leaf in enumerate(leaves):
        size = leaf.size * jnp.dtype(leaf.dtype).itemsize
        if size > room:
            found.append([])
            room = limit
        found[-1].append(i)
        room -= size
    return found
