"""Packs codes and lists of indices into bytes and back: xla_ffi/codec/pack.h and indices.h in jnp.

A bucket is [..., n] codes in int32.

A list is int32[k]: ascending indices below n. Entries equal to n mean no index. They come last. There are two forms of
bytes, and the shorter one is used. So n and k determine the form. The Elias-Fano form stores the low bits of each index
unchanged. Its high bits are in a bitmap, where index j sets bit j + high. The other form is a bitmap of the n elements.
"""

from collections.abc import Iterator

import jax
import jax.numpy as jnp

from jaxcgx.native.layout import runs
from jaxcgx.typing import DTypeLike

BLOCK, ROWS, LANES = 128, 8, 16
_WORDS = {8: jnp.uint32, 4: jnp.uint32, 2: jnp.uint16, 1: jnp.uint8}  # by the bits of a field


def packed_bytes(n: int, bits: int) -> int:
    return -(-n // ROWS) * bits


def _fields(bits: int) -> Iterator[tuple[int, int]]:
    at = 0
    for width in (8, 4, 2, 1):
        if bits & width:
            yield width, at
            at += width


def to_bytes(words: jax.Array) -> jax.Array:
    """Returns the words with the last axis as little-endian bytes."""
    b = jax.lax.bitcast_convert_type(words, jnp.uint8)
    return b.reshape(*words.shape[:-1], words.shape[-1] * words.dtype.itemsize)


def from_bytes(raw: jax.Array, dtype: DTypeLike) -> jax.Array:
    size = jnp.dtype(dtype).itemsize
    if size == 1:
        return jax.lax.bitcast_convert_type(raw, dtype)
    return jax.lax.bitcast_convert_type(raw.reshape(*raw.shape[:-1], raw.shape[-1] // size, size), dtype)


def pack(codes: jax.Array, bits: int) -> jax.Array:
    """Returns codes int32[..., n] as uint8[..., packed_bytes(n, bits)]."""
    *lead, n = codes.shape
    parts = []
    for first, number, size in runs(n, BLOCK):
        lanes = -(-size // ROWS)
        block = codes[..., first : first + number * lanes * ROWS]
        pad = number * lanes * ROWS - block.shape[-1]
        block = jnp.pad(block, [(0, 0)] * len(lead) + [(0, pad)]).astype(jnp.uint32).reshape(*lead, number, ROWS, lanes)
        fields = []
        for width, at in _fields(bits):
            field = (block >> at) & ((1 << width) - 1)
            rows = 4 if width == 8 else 8  # the rows in a word
            for r in range(0, ROWS, rows):
                shift = (jnp.arange(rows, dtype=jnp.uint32) * width)[:, None]
                word = (field[..., r : r + rows, :] << shift).sum(-2, dtype=jnp.uint32)
                fields.append(to_bytes(word.astype(_WORDS[width])))
        parts.append(jnp.concatenate(fields, -1).reshape(*lead, -1))
    return jnp.concatenate(parts, -1) if parts else jnp.zeros((*lead, 0), jnp.uint8)


def unpack(raw: jax.Array, bits: int, n: int) -> jax.Array:
    lead, at, parts = raw.shape[:-1], 0, []
    for first, number, size in runs(n, BLOCK):
        lanes = -(-size // ROWS)
        block = raw[..., at : at + number * lanes * bits].reshape(*lead, number, lanes * bits)
        at += number * lanes * bits
        codes = jnp.zeros((*lead, number, ROWS, lanes), jnp.uint32)
        offset = 0
        for width, position in _fields(bits):
            rows = 4 if width == 8 else 8
            size = lanes * rows * width // 8
            for r in range(0, ROWS, rows):
                word = from_bytes(block[..., offset : offset + size], _WORDS[width]).astype(jnp.uint32)
                offset += size
                shift = (jnp.arange(rows, dtype=jnp.uint32) * width)[:, None]
                field = (word[..., None, :] >> shift) & ((1 << width) - 1)
                codes = codes.at[..., r : r + rows, :].add(field << position)
        parts.append(codes.reshape(*lead, -1)[..., : n - first])
    return (jnp.concatenate(parts, -1) if parts else jnp.zeros((*lead, 0))).astype(jnp.int32)


# Lists of indices


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
    before = jnp.concatenate([jnp.full(1, -1, jnp.int32), jax.lax.cummax(indices)[:-1]])
    return jnp.where((indices < n) & (indices > before), indices, n)
