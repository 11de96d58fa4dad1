"""The random bits of stochastic rounding: xla_ffi/codec/rng.h in jnp."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxcgx.checks import spell_array, wrong

BLOCK, LANES = 128, 16
_RAW_SHAPES = ((2,), (4,))  # the shapes of keys from jax.random.PRNGKey: threefry2x32, and rbg or unsafe_rbg


def key_words(function: str, key: Any) -> jax.Array:
    """Returns uint32[2] from a JAX random key, typed or raw."""
    dtype = getattr(key, "dtype", None)
    if dtype is None or not jnp.issubdtype(dtype, jax.dtypes.prng_key):
        if dtype != jnp.uint32 or key.shape not in _RAW_SHAPES:
            got = spell_array(key)
            raise wrong(function, "key", "a random key (jax.random.key or PRNGKey)", got, kind=TypeError)
        return key[:2]
    if key.ndim:
        raise wrong(function, "key", "one key", f"an array of keys of shape {key.shape}")
    return jax.random.key_data(key)[:2]


def kernel_key(key: jax.Array) -> jax.Array:
    """Returns uint32[3]: the two words of a key, and an offset. Without a third word in the key, the offset is 0."""
    return key if key.shape == (3,) else jnp.pad(key, (0, 1))


def _multiply_wide(a: jax.Array, b: int) -> tuple[jax.Array, jax.Array]:
    """Returns (high, low), the words of a * b, from 16-bit halves: jnp has no 64-bit integers by default."""
    a_low, a_high, b_low, b_high = a & 0xFFFF, a >> 16, b & 0xFFFF, b >> 16
    low = a_low * b_low
    middle = a_high * b_low + (low >> 16)
    cross = a_low * b_high + (middle & 0xFFFF)
    return a_high * b_high + (middle >> 16) + (cross >> 16), (cross << 16) | (low & 0xFFFF)


def philox(counter: Sequence[jax.Array], key: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
    """Returns the four words of Philox4x32-10, from a counter of four words and a key of two words (uint32 arrays)."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        high0, low0 = _multiply_wide(c0, 0xD2511F53)
        high1, low1 = _multiply_wide(c2, 0xCD9E8D57)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = k0 + jnp.uint32(0x9E3779B9), k1 + jnp.uint32(0xBB67AE85)
    return c0, c1, c2, c3


def noise(key: jax.Array, leaf: int, start: int, count: int) -> jax.Array:
    """Returns the random bits of a leaf's elements from `start` on: int32[count] in [0, 65536)."""
    # The key's offset is added to them modulo 2^16.
    k0, k1, offset = kernel_key(key)
    first, last = start // BLOCK, -(-(start + count) // BLOCK)
    index = np.arange(first * LANES, last * LANES, dtype=np.uint64)
    low, high = jnp.uint32(index & 0xFFFFFFFF), jnp.uint32(index >> np.uint64(32))
    zero = jnp.zeros_like(low)
    drawn = philox((low, high, zero + jnp.uint32(leaf & 0xFFFFFFFF), zero), (k0, k1))
    rows = jnp.stack([half for word in drawn for half in (word & 0xFFFF, word >> 16)])  # [8, blocks * 16]
    flat = rows.reshape(8, last - first, LANES).transpose(1, 0, 2).reshape(-1).astype(jnp.int32)
    return (flat[start - first * BLOCK :][:count] + offset.astype(jnp.int32)) & 0xFFFF
