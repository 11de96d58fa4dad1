"""Tests which bits of Philox are whose noise. tests/test_golden.py has the bits of the reference and of kernels."""

import jax.numpy as jnp
import numpy as np

from jaxcgx.native.rng import noise, philox


def test_an_offset_is_added():
    key = jnp.array([0, 7, 0x5000], jnp.uint32)
    assert [f"{x:04x}" for x in np.asarray(noise(key, 0, 0, 4))] == ["7b7b", "26ac", "bc02", "b9e7"]  # wire-format.md


def test_elements_past_2_to_the_32():
    key = jnp.array([3, 4], jnp.uint32)
    start = 2**37 + 5 * 128
    first = start // 128 * 16
    words = philox(
        [jnp.uint32(first & 0xFFFFFFFF), jnp.uint32(first >> 32), jnp.uint32(0), jnp.uint32(0)], (key[0], key[1])
    )
    assert int(noise(key, 0, start, 1)[0]) == int(words[0]) & 0xFFFF
