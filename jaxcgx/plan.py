"""Which leaves share a message."""
import jax.numpy as jnp

from jaxcgx.native.layout import DTYPES


def why_raw(leaf, codecs):
    """Why a leaf travels as it is; None where one of the codecs encodes it."""
    if leaf.dtype not in DTYPES:
        return f"{leaf.dtype} is not float32, bfloat16 or float16"
    if leaf.size == 0:
        return "it has no elements"
    return "its codec is Raw()" if all(codec.raw for codec in codecs) else None


def messages(leaves, limit):
    """Lists of indices into `leaves`, in order, each of leaves of up to `limit` bytes together; a larger leaf travels alone."""
    found, room = [], -1
    for i, leaf in enumerate(leaves):
        size = leaf.size * jnp.dtype(leaf.dtype).itemsize
        if size > room:
            found.append([])
            room = limit
        found[-1].append(i)
        room -= size
    return found
