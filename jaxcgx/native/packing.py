"""Packs codes into bytes and back: xla_ffi/codec/pack.h in jnp. A bucket is [..., n] codes in int32."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jax import lax

from jaxcgx.typing import DTypeLike

BLOCK, ROWS, LANES = 128, 8, 16


def packed_bytes(n: int, bits: int) -> int:
    """Returns the bytes of n codes of one bucket."""
    return -(-n // ROWS) * bits


def _fields(bits: int) -> Iterator[tuple[int, int]]:
    """Yields (width, first bit) of the fields of a code."""
    at = 0
    for width in (8, 4, 2, 1):
        if bits & width:
            yield width, at
            at += width


def _blocks(n: int) -> Iterator[tuple[int, int, int]]:
    """Yields (first element, number of blocks, lanes) for the whole blocks of a bucket, then for the short block."""
    whole, rest = divmod(n, BLOCK)
    if whole:
        yield 0, whole, LANES
    if rest:
        yield whole * BLOCK, 1, -(-rest // ROWS)


def to_bytes(words: jax.Array) -> jax.Array:
    """Returns the words with the last axis as little-endian bytes."""
    b = lax.bitcast_convert_type(words, jnp.uint8)
    return b.reshape(*words.shape[:-1], words.shape[-1] * words.dtype.itemsize)


def from_bytes(raw: jax.Array, dtype: DTypeLike) -> jax.Array:
    """The inverse of `to_bytes`."""
    size = jnp.dtype(dtype).itemsize
    if size == 1:
        return lax.bitcast_convert_type(raw, dtype)
    return lax.bitcast_convert_type(raw.reshape(*raw.shape[:-1], raw.shape[-1] // size, size), dtype)


def pack(codes: jax.Array, bits: int) -> jax.Array:
    """Returns codes int32[..., n] as uint8[..., packed_bytes(n, bits)]."""
    *lead, n = codes.shape
    parts = []
    for first, number, lanes in _blocks(n):
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
                fields.append(to_bytes(word.astype({8: "uint32", 4: "uint32", 2: "uint16", 1: "uint8"}[width])))
        parts.append(jnp.concatenate(fields, -1).reshape(*lead, -1))
    return jnp.concatenate(parts, -1) if parts else jnp.zeros((*lead, 0), jnp.uint8)


def unpack(raw: jax.Array, bits: int, n: int) -> jax.Array:
    """The inverse of `pack`."""
    lead, at, parts = raw.shape[:-1], 0, []
    for first, number, lanes in _blocks(n):
        block = raw[..., at : at + number * lanes * bits].reshape(*lead, number, lanes * bits)
        at += number * lanes * bits
        codes = jnp.zeros((*lead, number, ROWS, lanes), jnp.uint32)
        offset = 0
        for width, position in _fields(bits):
            rows = 4 if width == 8 else 8
            dtype = {8: "uint32", 4: "uint32", 2: "uint16", 1: "uint8"}[width]
            size = jnp.dtype(dtype).itemsize
            for r in range(0, ROWS, rows):
                word = from_bytes(block[..., offset : offset + lanes * size], dtype).astype(jnp.uint32)
                offset += lanes * size
                shift = (jnp.arange(rows, dtype=jnp.uint32) * width)[:, None]
                field = (word[..., None, :] >> shift) & ((1 << width) - 1)
                codes = codes.at[..., r : r + rows, :].add(field << position)
        parts.append(codes.reshape(*lead, -1)[..., : n - first])
    return (jnp.concatenate(parts, -1) if parts else jnp.zeros((*lead, 0))).astype(jnp.int32)
