"""Encoding and decoding one array."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxcgx.checks import as_shape, spell_array, wrong
from jaxcgx.codecs.base import Codec
from jaxcgx.codecs.checks import as_key, as_leaf, check_codec, check_encodes
from jaxcgx.native import ops
from jaxcgx.native.layout import as_dtype, layout_of
from jaxcgx.typing import ArrayLike, DTypeLike


def encode(x: ArrayLike, codec: Codec, key: ArrayLike | None = None) -> jax.Array:
    """Returns the bytes of an array: uint8[codec.wire_bytes(x.shape, x.dtype)].

    Differentiating through it is an error, because bytes have no derivative. `roundtrip` and the collectives have one.

    Args:
      x: an array of any shape, in float32, bfloat16 or float16.
      codec: any codec that makes bytes (all except PowerSGD).
      key: a random key, for codecs that round stochastically.
    """
    check_encodes("encode", codec)
    x = as_leaf("encode", x)
    return ops.encode(layout_of(codec, x.shape, x.dtype), [x], as_key("encode", codec, key)).reshape(-1)


def decode(payload: ArrayLike, codec: Codec, shape: tuple[int, ...], dtype: DTypeLike) -> jax.Array:
    """Returns the array that a payload holds. Any bytes of the right number decode to some array.

    Args:
      payload: uint8[codec.wire_bytes(shape, dtype)], from `encode` with the same codec.
      codec: the codec that made the payload.
      shape: the shape of the array.
      dtype: the dtype of the array: float32, bfloat16 or float16.
    """
    check_encodes("decode", codec)
    dtype = as_dtype("decode", "dtype", dtype)
    shape = as_shape("decode", "shape", shape)
    layout = layout_of(codec, shape, dtype)
    if (getattr(payload, "dtype", None), getattr(payload, "shape", None)) != (jnp.uint8, (layout.chunk_bytes,)):
        expected = f"uint8[{layout.chunk_bytes}], which is what {codec} makes of {dtype}{list(shape)}"
        got = spell_array(payload) if hasattr(payload, "dtype") else type(payload).__name__
        raise wrong("decode", "payload", expected, got)
    return ops.decode(layout, jnp.asarray(payload).reshape(1, layout.chunk_bytes))[0]


def roundtrip(x: ArrayLike, codec: Codec, key: ArrayLike | None = None) -> jax.Array:
    """Returns decode(encode(x)), the array that a receiver gets. Its gradient is the identity (straight-through).

    For a codec that only sums can use (PowerSGD), it is the sum over one rank.

    Args:
      x: an array of any shape, in float32, bfloat16 or float16.
      codec: any codec.
      key: a random key, for codecs that round stochastically.
    """
    check_codec("roundtrip", codec)
    x = as_leaf("roundtrip", x)
    return _roundtrip(codec, x, as_key("roundtrip", codec, key))


# The derivative of quantization, a staircase, is zero almost everywhere, and tells an optimizer nothing. So that of
# x -> x is used, the function that it approximates. The key has no tangent.
@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _roundtrip(codec: Codec, x: jax.Array, key: jax.Array | None) -> jax.Array:
    return codec.approximate(x, key)


@_roundtrip.defjvp
def _roundtrip_jvp(codec: Codec, primals: Any, tangents: Any) -> tuple[jax.Array, Any]:
    return _roundtrip(codec, *primals), tangents[0]
