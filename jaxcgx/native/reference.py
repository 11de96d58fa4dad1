"""The native operations in plain jnp.

Kernels are tested against these functions. Platforms and codecs without kernels use them. With JAXCGX_REFERENCE=1, all
programs do. This file handles messages. The arithmetic of a bucket is in the codec (codecs/*.py).
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxcgx import _compat
from jaxcgx.native import ieee
from jaxcgx.native.layout import Layout, Piece
from jaxcgx.native.operands import Clear, Decode, Encode, Reduce
from jaxcgx.native.packing import from_bytes, to_bytes
from jaxcgx.native.rng import noise
from jaxcgx.typing import DType


def widen(x: jax.Array) -> jax.Array:
    """Returns a leaf as float32. Denormals are kept."""
    if x.dtype == jnp.bfloat16:
        return lax.bitcast_convert_type(lax.bitcast_convert_type(x, jnp.uint16).astype(jnp.uint32) << 16, jnp.float32)
    return x.astype(jnp.float32)


def narrow(x: jax.Array, dtype: DType) -> jax.Array:
    """Returns float32 numbers, rounded to a leaf's dtype. Denormals are kept."""
    if dtype == jnp.float32:
        return x
    return lax.bitcast_convert_type(to_bits16(x, dtype).astype(jnp.uint16), dtype)


def to_bits16(x: jax.Array, dtype: DType, noise: jax.Array | None = None) -> jax.Array:
    """Returns the bits of x as bfloat16 or float16, rounded to nearest even, or stochastically with 16 random bits.

    xla_ffi/codec/cast.h is the same in C++.
    """
    raw, magnitude = ieee.bits(x), ieee.magnitude_bits(x)
    drop = 16 if dtype == jnp.bfloat16 else 13
    if noise is None:
        code = (magnitude + (1 << (drop - 1)) - 1 + ((magnitude >> drop) & 1)) >> drop
    else:
        code = ieee.shr(magnitude + (noise >> (16 - drop)), drop)
    if dtype == jnp.float16:
        code = jnp.minimum(code - (112 << 10), 0x7C00)
        small = ieee.as_float(jnp.minimum(magnitude, 0x38800000))
        if noise is None:
            denormal = ieee.round_int(small * 2.0**24)
        else:
            denormal = (ieee.round_int(small * 2.0**40) + noise) >> 16
        code = jnp.where(magnitude < 0x38800000, denormal, code)
    nan = 0x7FC0 if dtype == jnp.bfloat16 else 0x7E00
    return jnp.where(magnitude > 0x7F800000, nan, code | (ieee.shr(raw, 16) & 0x8000))


def _flat(leaves: Sequence[Any]) -> list[jax.Array]:
    return [x.reshape(-1) for x in leaves]


def _noise(layout: Layout, key: Any) -> Callable[[Piece, int, int], jax.Array]:
    """Returns a function that draws the random bits of elements of a piece."""
    ids = layout.ids or ()
    return lambda p, first, count: noise(key, ids[p.leaf], p.start + first, count=count)


def _encode_chunk(
    layout: Layout, c: int, fetch: Callable[..., Any], draw: Callable[..., Any]
) -> tuple[jax.Array, list[tuple[int, int, jax.Array, jax.Array]]]:
    """Returns (the encoded chunk, [(leaf, first element, numbers, decoded numbers)] for its stretches).

    Args:
      layout: the layout of the message.
      c: the number of the chunk.
      fetch: fetch(piece, first, count) returns elements as float32. Raw elements may keep the leaf's dtype.
      draw: draw(piece, first, count) returns the random bits of these elements.
    """
    codec = layout.codec
    if codec.carrier is not None:
        chunk, kept = _encode_chunk(layout.carried, c, fetch=fetch, draw=draw)
        return codec.pack_chunk(layout, c, chunk), kept
    metas, bodies, kept = [], [], []

    def keep(p: Piece, first: int, count: int, x: jax.Array, decoded: jax.Array) -> None:
        kept.append((p.leaf, p.start + first, x.reshape(-1), decoded.reshape(-1)))

    def plain(p: Piece, first: int, count: int) -> jax.Array:
        x = fetch(p, first, count)
        travels = narrow(x, layout.dtypes[p.leaf]) if x.dtype == jnp.float32 else x
        keep(p, first, count=count, x=widen(x), decoded=widen(travels))
        return to_bytes(travels)

    for p in layout.pieces[c]:
        body = []
        for first, number, size in p.buckets():
            x = widen(fetch(p, first, number * size)).reshape(number, size)
            drawn = None
            if codec.stochastic:
                drawn = draw(p, first, number * size).reshape(number, size)
            meta, codes = codec.encode_buckets(x, drawn)
            for name, got, dtype, width in (
                ("metadata", meta, jnp.float32, codec.meta),
                ("codes", codes, jnp.uint8, codec.code_bytes(size, layout.dtypes[p.leaf])),
            ):
                if (got.dtype, got.shape) != (dtype, (number, width)):
                    raise TypeError(
                        f"{type(codec).__name__}.encode_buckets: expected {name} {jnp.dtype(dtype)}[{number},{width}], "
                        f"got {got.dtype}{list(got.shape)}"
                    )
            keep(p, first, count=number * size, x=x, decoded=codec.decode_buckets(meta, codes, size))
            metas.append(to_bytes(meta).reshape(-1))
            body.append(codes.reshape(-1))
        bodies.append((p.codes, body))
        if p.raw:
            bodies.append((p.tail, [plain(p, p.coded, p.raw)]))
    parts, at = [*metas], sum(m.size for m in metas)
    for position, body in [*bodies, (layout.chunk_bytes, [])]:
        parts += [jnp.zeros(position - at, jnp.uint8), *body]
        at = position + sum(b.size for b in body)
    return jnp.concatenate(parts), kept


def _lost(x: jax.Array, decoded: jax.Array, old: jax.Array) -> jax.Array:
    """Returns the new residual: x - decoded, or `old` where the difference is not finite."""
    new = ieee.subtract(x, decoded)
    return jnp.where(ieee.magnitude_bits(new) < 0x7F800000, new, old)


def encode(layout: Layout, operands: Encode) -> tuple[jax.Array, list[jax.Array]]:
    """Returns (uint8[chunks, chunk_bytes], new residuals). Without residuals, the list of new residuals is empty."""
    flat, lost = _flat(operands.leaves), _flat(operands.residuals or [])

    def fetch(p: Piece, first: int, count: int) -> jax.Array:
        part = lambda x: x[p.start + first :][:count]
        x = part(flat[p.leaf])
        return ieee.add(widen(x), part(lost[p.leaf])) if lost else x

    chunks = []
    for c in range(layout.chunks):
        chunk, kept = _encode_chunk(layout, c, fetch=fetch, draw=_noise(layout, operands.key))
        chunks.append(chunk)
        if lost:
            for leaf, first, x, decoded in kept:
                stretch = slice(first, first + x.size)
                lost[leaf] = lost[leaf].at[stretch].set(_lost(x, decoded, lost[leaf][stretch]))
    return jnp.stack(chunks), [r.reshape(s) for r, s in zip(lost, layout.shapes)]


def encode_drawn(layout: Layout, x: jax.Array, drawn: jax.Array | None) -> jax.Array:
    """Returns the payload of one leaf in one chunk, with given random bits for each element."""
    part = lambda of: lambda p, first, count: of[p.start + first :][:count]
    return _encode_chunk(layout, 0, fetch=part(x), draw=part(drawn))[0]


def _read(layout: Layout, chunk: jax.Array, p: Piece) -> Iterator[tuple[Any, ...]]:
    """Yields the stretches of a piece: (first element, count, meta, codes, elements of a bucket).

    The raw tail has neither metadata nor buckets. For the tail, meta and the elements of a bucket are None.
    """
    codec, dtype = layout.codec, layout.dtypes[p.leaf]
    meta_at, code_at = p.meta, p.codes
    for first, number, size in p.buckets():
        width = codec.code_bytes(size, dtype)
        codes = chunk[code_at : code_at + number * width]
        code_at += number * width
        meta = from_bytes(chunk[meta_at : meta_at + number * 4 * codec.meta], jnp.float32).reshape(number, codec.meta)
        meta_at += number * 4 * codec.meta
        yield first, number * size, meta, codes.reshape(number, width), size
    if p.raw:
        yield p.coded, p.raw, None, chunk[p.tail : p.tail + p.raw * dtype.itemsize], None


def decode(layout: Layout, operands: Decode) -> list[jax.Array]:
    """Returns the leaves of a payload."""
    if layout.codec.carrier is not None:
        chunks = [layout.codec.unpack_chunk(layout, c, chunk) for c, chunk in enumerate(operands.payload)]
        return decode(layout.carried, Decode(jnp.stack(chunks)))
    # The leaves are put together as integers: XLA moves bfloat16 through float32, and on some processors the conversion
    # back flushes denormals.
    unsigned = {2: jnp.uint16, 4: jnp.uint32}
    flat = [jnp.zeros(n, unsigned[d.itemsize]) for n, d in zip(layout.sizes, layout.dtypes)]
    for c, pieces in enumerate(layout.pieces):
        for p in pieces:
            dtype = layout.dtypes[p.leaf]
            for first, count, meta, codes, size in _read(layout, operands.payload[c], p):
                if meta is None:
                    x = from_bytes(codes, dtype)
                else:
                    x = narrow(layout.codec.decode_buckets(meta, codes, size).reshape(-1), dtype)
                x = lax.bitcast_convert_type(x, flat[p.leaf].dtype)
                flat[p.leaf] = flat[p.leaf].at[p.start + first : p.start + first + count].set(x)
    return [lax.bitcast_convert_type(x, d).reshape(s) for x, d, s in zip(flat, layout.dtypes, layout.shapes)]


def clear(layout: Layout, operands: Clear) -> list[jax.Array]:
    """Returns the arrays with 0 where the payload has an element."""
    flat = _flat(operands.arrays)
    for c, pieces in enumerate(layout.pieces):
        for p in pieces:
            for first, count, _, codes, _ in _read(layout, operands.payload[c], p):
                at = layout.codec.indices(codes[0], count)
                at = jnp.where(at < count, p.start + first + at, flat[p.leaf].size)
                flat[p.leaf] = flat[p.leaf].at[at].set(0, mode="drop")
    return [x.reshape(s) for x, s in zip(flat, layout.shapes)]


def reduce(layout: Layout, operands: Reduce, divisor: float = 1.0, encoded: bool = False) -> Any:
    """Sums the payloads of one chunk in rank order.

    Returns float32 leaves or, with `encoded`, (the sum encoded again, new residuals).
    """
    payloads, where = operands.payloads, operands.where
    ranks = payloads.shape[0]
    sum_layout = layout.of_sum(ranks)
    carried = layout if layout.codec.carrier is None else layout.carried
    own = None if operands.own is None else _flat(operands.own)
    lost = _flat(operands.residuals or [])

    def reduce_chunk(c: int) -> dict[tuple[int, int], jax.Array]:
        """Returns the sum of the payloads as {(leaf, first element): numbers}."""
        pieces, chunks = carried.pieces[c], payloads
        if layout.codec.carrier is not None:
            chunks = jax.vmap(lambda chunk: layout.codec.unpack_chunk(layout, c, chunk))(payloads)
        sums = {}
        for p in pieces:
            read = [list(_read(carried, chunks[r], p)) for r in range(ranks)]
            for stretch in zip(*read):
                first, count, meta, _, size = stretch[0]
                mine: Any = None if own is None else widen(own[p.leaf][p.start + first :][:count])
                is_own = lambda r: where[1] == r
                total: Any = None
                split: list[tuple[jax.Array, jax.Array]] = []
                if meta is None:
                    terms = [widen(from_bytes(s[3], layout.dtypes[p.leaf])) for s in stretch]
                else:
                    split = [layout.codec.split_buckets(s[2], s[3], size) for s in stretch]
                    terms = [value.reshape(-1) for _, value in split]
                if meta is not None and p.bucket:
                    bases = [
                        base if own is None else jnp.where(is_own(r), 0, base) for r, (base, _) in enumerate(split)
                    ]
                    total = bases[0]
                    for base in bases[1:]:
                        total = ieee.add(total, base)
                    total = jnp.broadcast_to(total, (count // size, size)).reshape(-1)
                for r, term in enumerate(terms):
                    if own is not None:
                        term = jnp.where(is_own(r), mine, term)
                    total = term if total is None else ieee.add(total, term)
                if meta is not None and p.bucket:
                    total = ieee.positive_zero(total)  # as decode_buckets in codecs/grid.py
                if lost:
                    total = ieee.add(total, lost[p.leaf][p.start + first :][:count])
                sums[p.leaf, p.start + first] = total
        return sums

    def divided(x: jax.Array) -> jax.Array:
        return x if divisor == 1.0 else ieee.divide(x, divisor)

    if encoded:

        def chunk(c: int) -> Any:
            sums = reduce_chunk(c)
            fetch = lambda p, first, count: divided(sums[p.leaf, p.start + first])
            encoded, kept = _encode_chunk(sum_layout, c, fetch=fetch, draw=_noise(layout, operands.key))
            new = list(lost)
            for leaf, first, x, decoded in kept if lost else ():
                stretch, given = (
                    slice(first, first + x.size),
                    decoded if divisor == 1.0 else ieee.multiply(decoded, divisor),
                )
                new[leaf] = new[leaf].at[stretch].set(_lost(sums[leaf, first], given, lost[leaf][stretch]))
            encoded = _compat.match_varying(encoded, payloads, *(own or []))[0]  # an empty chunk doesn't vary by itself
            return encoded, [r.reshape(s) for r, s in zip(new, layout.shapes)]

        if layout.chunks == 1:
            return chunk(0)
        return lax.switch(where[0], [lambda c=c: chunk(c) for c in range(layout.chunks)])
    leaves = [jnp.zeros(n, jnp.float32) for n in layout.sizes]
    for (leaf, first), x in reduce_chunk(0).items():
        leaves[leaf] = leaves[leaf].at[first : first + x.size].set(divided(x))
    return [x.reshape(s) for x, s in zip(leaves, layout.shapes)]
