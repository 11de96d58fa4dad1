"""Tests Philox against its authors' vectors, and the use of its bits."""

import jax.numpy as jnp
import numpy as np

from jaxcgx.native.rng import noise, philox

# Random123's known answers for philox4x32-10: counter, key, result
KNOWN = [
    ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


def test_known_answers():
    for counter, key, expected in KNOWN:
        got = philox([jnp.uint32(c) for c in counter], [jnp.uint32(k) for k in key])
        assert [int(x) for x in got] == expected


def test_where_the_bits_of_an_element_come_from():
    key = jnp.array([3, 4], jnp.uint32)
    drawn = np.asarray(noise(key, 9, 0, 512))
    for element in (0, 1, 15, 16, 31, 32, 127, 128, 300, 511):
        block, row, lane = element // 128, element % 128 // 16, element % 16
        words = philox([jnp.uint32(c) for c in (16 * block + lane, 0, 9, 0)], (key[0], key[1]))
        assert drawn[element] == (int(words[row // 2]) >> (16 * (row % 2))) & 0xFFFF
    np.testing.assert_array_equal(noise(key, 9, 100, 150), drawn[100:250])


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
