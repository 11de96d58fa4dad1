"""Turns lists of indices into bytes and back: xla_ffi/codec/indices.h in jnp.

A list is int32[k]: ascending indices below n. Entries equal to n mean no index. They come last.

There are two forms of bytes, and the shorter one is used. So n and k determine the form. The Elias-Fano form stores the
low bits of each index unchanged. Its high bits are in a bitmap, where index j sets bit j + high. The other form is a
bitmap of the n elements.
"""

import jax
import jax.numpy as jnp
from jax import lax

from jaxcgx.native.packing import from_bytes, pack, packed_bytes, to_bytes, unpack


def _low_bits(n: int, k: int) -> int:
    return (n // k).bit_length() - 1


def _bitmap_bytes(bits: int) -> int:
    return -(-bits // 32) * 4


def _high_count(n: int, k: int) -> int:
    return (n >> _low_bits(n, k)) + k


def _split_bytes(n: int, k: int) -> int:
    low = _low_bits(n, k)
    return _bitmap_bytes(_high_count(n, k)) + low // 8 * k + packed_bytes(k, low % 8)


def index_bytes(n: int, k: int) -> int:
    """Returns the bytes of a list of k of n indices; 0 if k is 0 or n."""
    return 0 if k in (0, n) else min(_split_bytes(n, k), _bitmap_bytes(n))


def _is_split(n: int, k: int) -> bool:
    return _split_bytes(n, k) < _bitmap_bytes(n)


def _to_bitmap(at: jax.Array, bits: int) -> jax.Array:
    """Returns the bytes of a bitmap with ones at `at`. Entries of `at` past the end of the bitmap are ignored."""
    rows = jnp.pad(jnp.zeros(bits, jnp.uint32).at[at].set(1, mode="drop"), (0, -bits % 32)).reshape(-1, 32)
    return to_bytes((rows << jnp.arange(32, dtype=jnp.uint32)).sum(-1, dtype=jnp.uint32))


def _from_bitmap(raw: jax.Array, bits: int, k: int) -> jax.Array:
    """Returns the positions of the first k ones of a bitmap, padded with `bits`."""
    words = from_bytes(raw, jnp.uint32)
    row = (words[:, None] >> jnp.arange(32, dtype=jnp.uint32)) & 1
    return jnp.nonzero(row.reshape(-1)[:bits], size=k, fill_value=bits)[0].astype(jnp.int32)


def to_list(indices: jax.Array, n: int) -> jax.Array:
    """Returns the bytes of a list: uint8[index_bytes(n, k)]."""
    k = indices.size
    if k in (0, n):
        return jnp.zeros(0, jnp.uint8)
    if not _is_split(n, k):
        return _to_bitmap(indices, n)
    low = _low_bits(n, k)
    parts = [_to_bitmap((indices >> low) + jnp.arange(k), _high_count(n, k))]
    parts += [((indices >> 8 * i) & 0xFF).astype(jnp.uint8) for i in range(low // 8)]
    if low % 8:
        parts.append(pack((indices >> low // 8 * 8) & (2 ** (low % 8) - 1), low % 8))
    return jnp.concatenate(parts)


def from_list(raw: jax.Array, n: int, k: int) -> jax.Array:
    """Returns the list int32[k] from any bytes. An index that is not larger than all indices before it becomes n."""
    if k in (0, n):
        return jnp.arange(k, dtype=jnp.int32)
    if not _is_split(n, k):
        return _from_bitmap(raw, n, k)
    low, at = _low_bits(n, k), _bitmap_bytes(_high_count(n, k))
    high = _from_bitmap(raw[:at], _high_count(n, k), k) - jnp.arange(k, dtype=jnp.int32)
    indices = jnp.where(high <= n >> low, high << low, n)
    for i in range(low // 8):
        indices |= raw[at : at + k].astype(jnp.int32) << 8 * i
        at += k
    if low % 8:
        indices |= unpack(raw[at:], low % 8, k) << low // 8 * 8
    before = jnp.concatenate([jnp.full(1, -1, jnp.int32), lax.cummax(indices)[:-1]])
    return jnp.where((indices < n) & (indices > before), indices, n)
