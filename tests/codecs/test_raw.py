"""Tests that Raw keeps every bit."""

import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_same_bytes
from jax import lax

import jaxcgx as cgx


@pytest.mark.parametrize("codec", [cgx.Raw(), cgx.Lossless()], ids=repr)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_every_number_of_sixteen_bits_keeps_its_bits(dtype, codec):
    """The numbers include NaNs of every payload and sign, infinities, denormals and -0."""
    words = np.arange(2**16, dtype=np.uint16)
    for order in (words, np.random.default_rng(0).permutation(words)):
        x = lax.bitcast_convert_type(jnp.asarray(order), jnp.dtype(dtype))
        assert_same_bytes(cgx.decode(cgx.encode(x, codec), codec, x.shape, dtype), x)
        assert_same_bytes(cgx.roundtrip(x, codec), x)
