"""Checks of codecs, of their keys, and of the arrays that they take."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxcgx.checks import as_array, check_hashable, wrong
from jaxcgx.codecs.base import Codec, spell
from jaxcgx.native.layout import as_dtype
from jaxcgx.native.rng import key_words


def check_codec(function: str, codec: Any, argument: str = "codec") -> Codec:
    if not isinstance(codec, Codec):
        raise wrong(function, argument, "a codec such as jaxcgx.MaxMin(bits=4)", repr(codec), kind=TypeError)
    if codec.skips:
        remedy = "as a rule of a jaxcgx.Plan, or as its default, it says which leaves are not sent"
        raise wrong(function, argument, "a codec that sends something", spell(codec), remedy)
    return check_hashable(function, argument, codec, f"make {type(codec).__name__} a dataclass(frozen=True)")


def check_encodes(function: str, codec: Any, argument: str = "codec") -> Codec:
    if check_codec(function, codec, argument).low_rank:
        expected = "a codec that makes bytes of an array, such as jaxcgx.MaxMin(bits=4)"
        remedy = "pass it to compressed_psum, compressed_pmean or what is made of them"
        raise wrong(function, argument, expected, f"{spell(codec)}, which is for sums", remedy)
    return codec


def as_key(
    function: str, codec: Codec, key: Any, which: str = "another one every step", argument: str = "key"
) -> jax.Array | None:
    """Returns the two words of the key if the codec draws noise, else None. Errors say `which` key to pass."""
    if not codec.stochastic:
        return None
    if key is None:
        expected = f"a random key, because {spell(codec)} draws random bits"
        raise wrong(function, argument, expected, None, f"pass {argument}=jax.random.key(...), {which}")
    return key_words(function, key)


def as_leaf(function: str, x: Any) -> jax.Array:
    """Returns x as an array, after a check that codecs take its dtype."""
    if not hasattr(x, "dtype"):
        x = as_array(function, "x", x)
    as_dtype(function, "x", x.dtype)  # before JAX converts NumPy's float64 to float32
    return jnp.asarray(x)
