"""The native operations in plain jnp, and their operands by name.

Kernels are tested against these functions. Platforms and codecs without kernels use them. With JAXCGX_REFERENCE=1, all
programs do. This file handles messages. The arithmetic of a bucket is in the codec (codecs/*.py).

The operands of an operation are a pytree: JAX sees its leaves, in the order in which the handlers in xla_ffi/handlers
expect them, and a rule gets the names back from its structure. An operand that is None is left out.
"""

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxcgx import _compat
from jaxcgx.native import ieee
from jaxcgx.native.layout import Layout, Piece
from jaxcgx.native.packing import from_bytes, to_bytes
from jaxcgx.native.rng import noise
from jaxcgx.typing import DType

Arrays = list[Any]  # of jax.Array, tracers or abstract values
# The field `in_place` has the operands that are overwritten if they are donated. They become the last results.


class Encode(NamedTuple):
    leaves: Arrays
    residuals: Arrays | None = None  # float32, added to the leaves
    key: jax.Array | None = None  # uint32[3], for stochastic codecs: rng.kernel_key

    in_place = "residuals"


class Decode(NamedTuple):
    payload: jax.Array  # uint8[chunks, chunk_bytes]

    in_place = None


class Reduce(NamedTuple):
    payloads: jax.Array  # uint8[ranks, chunk_bytes]
    where: jax.Array  # int32[2]: the number of the chunk, and the rank whose payload `own` replaces
    own: Arrays | None = None  # leaves
    residuals: Arrays | None = None  # float32, in the shapes of the whole leaves; never together with `own`
    key: jax.Array | None = None  # uint32[3], if the sum is encoded again by a stochastic codec

    in_place = "residuals"


class Clear(NamedTuple):
    payload: jax.Array  # uint8[chunks, chunk_bytes]
    arrays: Arrays

    in_place = "arrays"


def widen(x: jax.Array) -> jax.Array:
    """Returns a leaf as float32. Denormals are kept."""
    if x.dtype == jnp.bfloat16:
        return jax.lax.bitcast_convert_type(
            jax.lax.bitcast_convert_type(x, jnp.uint16).astype(jnp.uint32) << 16, jnp.float32
        )
    return x.astype(jnp.float32)


def narrow(x: jax.Array, dtype: DType) -> jax.Array:
    """Returns float32 numbers, rounded to a leaf's dtype. Denormals are kept."""
    if dtype == jnp.float32:
        return x
    return jax.lax.bitcast_convert_type(to_bits16(x, dtype).astype(jnp.uint16), dtype)


def to_bits16(x: jax.Array, dtype: DType, noise: jax.Array | None = None) -> jax.Array:
    """Returns the bits of x as bfloat16 or float16, rounded to nearest even or with 16 random bits (codec/cast.h)."""
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
    """Returns (the encoded chunk c, [(leaf, first element, numbers, decoded numbers)] for its stretches).

    fetch(piece, first, count) returns elements as float32. Raw elements may keep the leaf's dtype. draw(piece, first,
    count) returns the random bits of these elements.
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


def _feed_back(lost: list[jax.Array], kept: list[tuple[int, int, jax.Array, jax.Array]]) -> list[jax.Array]:
    """Returns the new residuals: numbers - decoded numbers, or the old ones where the difference is not finite."""
    lost = list(lost)
    for leaf, first, x, decoded in kept:
        stretch, new = slice(first, first + x.size), ieee.add(x, -decoded)
        new = jnp.where(ieee.magnitude_bits(new) < 0x7F800000, new, lost[leaf][stretch])
        lost[leaf] = lost[leaf].at[stretch].set(new)
    return lost


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
            lost = _feed_back(lost, kept)
    return jnp.stack(chunks), [r.reshape(s) for r, s in zip(lost, layout.shapes)]


def encode_drawn(layout: Layout, x: jax.Array, drawn: jax.Array | None) -> jax.Array:
    """Returns the payload of one leaf in one chunk, with given random bits for each element."""
    part = lambda of: lambda p, first, count: of[p.start + first :][:count]
    return _encode_chunk(layout, 0, fetch=part(x), draw=part(drawn))[0]


class Stretch(NamedTuple):
    """Encoded elements of a piece. The raw tail has neither metadata nor buckets: its `meta` and `size` are None."""

    first: int  # the first element, counted in the leaf
    length: int
    meta: Any  # float32[buckets, codec.meta]
    codes: jax.Array  # uint8[buckets, bytes of a bucket]; the bytes of the raw tail
    size: Any  # the elements of a bucket

    def of(self, array: jax.Array) -> jax.Array:
        return array.reshape(-1)[self.first :][: self.length]


def read(layout: Layout, chunk: jax.Array, p: Piece) -> Iterator[Stretch]:
    codec, dtype = layout.codec, layout.dtypes[p.leaf]
    meta_at, code_at = p.meta, p.codes
    for first, number, size in p.buckets():
        width = codec.code_bytes(size, dtype)
        codes = chunk[code_at : code_at + number * width]
        code_at += number * width
        meta = from_bytes(chunk[meta_at : meta_at + number * 4 * codec.meta], jnp.float32).reshape(number, codec.meta)
        meta_at += number * 4 * codec.meta
        yield Stretch(p.start + first, number * size, meta=meta, codes=codes.reshape(number, width), size=size)
    if p.raw:
        tail = chunk[p.tail : p.tail + p.raw * dtype.itemsize]
        yield Stretch(p.start + p.coded, p.raw, meta=None, codes=tail, size=None)


def decode(layout: Layout, operands: Decode) -> list[jax.Array]:
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
            for first, count, meta, codes, size in read(layout, operands.payload[c], p):
                if meta is None:
                    x = from_bytes(codes, dtype)
                else:
                    x = narrow(layout.codec.decode_buckets(meta, codes, size).reshape(-1), dtype)
                x = jax.lax.bitcast_convert_type(x, flat[p.leaf].dtype)
                flat[p.leaf] = flat[p.leaf].at[first : first + count].set(x)
    return [jax.lax.bitcast_convert_type(x, d).reshape(s) for x, d, s in zip(flat, layout.dtypes, layout.shapes)]


def clear(layout: Layout, operands: Clear) -> list[jax.Array]:
    flat = _flat(operands.arrays)
    for c, pieces in enumerate(layout.pieces):
        for p in pieces:
            for first, count, _, codes, _ in read(layout, operands.payload[c], p):
                at = layout.codec.indices(codes[0], count)
                at = jnp.where(at < count, first + at, flat[p.leaf].size)
                flat[p.leaf] = flat[p.leaf].at[at].set(0, mode="drop")
    return [x.reshape(s) for x, s in zip(flat, layout.shapes)]


def _terms(layout: Layout, p: Piece, sent: Stretch) -> list[jax.Array]:
    """Returns the terms whose sum is the decoded stretch: with buckets [bases, values], without [values]."""
    if sent.meta is None:
        return [widen(from_bytes(sent.codes, layout.dtypes[p.leaf]))]
    base, values = layout.codec.split_buckets(sent.meta, sent.codes, sent.size)
    return [base, values] if p.bucket else [values]


def _sums(layout: Layout, operands: Reduce, c: int) -> dict[tuple[int, int], jax.Array]:
    """Returns the sum of the payloads of chunk c and of the residuals, as {(leaf, first element): numbers}."""
    payloads, own, residuals = operands.payloads, operands.own, operands.residuals
    if layout.codec.carrier is not None:
        unpacked = jax.vmap(lambda chunk: layout.codec.unpack_chunk(layout, c, chunk))(payloads)
        return _sums(layout.carried, operands._replace(payloads=unpacked), c)
    sums = {}
    for p in layout.pieces[c]:
        for stretches in zip(*(read(layout, chunk, p) for chunk in payloads)):
            stretch = stretches[0]
            terms = [_terms(layout, p, sent) for sent in stretches]
            if own is not None:
                mine = widen(stretch.of(own[p.leaf]))
                for r, (*bases, values) in enumerate(terms):
                    choose = functools.partial(jnp.where, operands.where[1] == r)
                    terms[r] = [*(choose(0, b) for b in bases), choose(mine.reshape(values.shape), values)]
            # This order is part of the wire format: the bases of all ranks, then the values of one rank after another.
            total = functools.reduce(ieee.add, itertools.chain(*zip(*terms))).reshape(-1)
            if len(terms[0]) == 2:
                total = ieee.positive_zero(total)  # as decode_buckets in codecs/grid.py
            sums[p.leaf, stretch.first] = total if residuals is None else ieee.add(total, stretch.of(residuals[p.leaf]))
    return sums


def reduce(layout: Layout, operands: Reduce, divisor: float = 1.0, encoded: bool = False) -> Any:
    """Returns the sum of a chunk's payloads: float32 leaves or, `encoded`, (the sum encoded again, new residuals)."""
    divided = lambda x: x if divisor == 1.0 else ieee.divide(x, divisor)
    multiplied = lambda x: x if divisor == 1.0 else ieee.multiply(x, divisor)

    def to_payload(c: int) -> tuple[jax.Array, list[jax.Array]]:
        sums = _sums(layout, operands, c)
        fetch = lambda p, first, count: divided(sums[p.leaf, p.start + first])
        sum_layout = layout.of_sum(len(operands.payloads))
        chunk, kept = _encode_chunk(sum_layout, c, fetch=fetch, draw=_noise(layout, operands.key))
        new = operands.residuals or []
        if new:  # of the undivided sum
            undivided = [(leaf, first, sums[leaf, first], multiplied(decoded)) for leaf, first, _, decoded in kept]
            new = _feed_back(_flat(new), undivided)
        # An empty chunk doesn't vary by itself.
        chunk = _compat.match_varying(chunk, operands.payloads, *(operands.own or []))[0]
        return chunk, [r.reshape(s) for r, s in zip(new, layout.shapes)]

    if encoded:
        chunks = [functools.partial(to_payload, c) for c in range(layout.chunks)]
        return chunks[0]() if len(chunks) == 1 else jax.lax.switch(operands.where[0], chunks)
    leaves = [jnp.zeros(n, jnp.float32) for n in layout.sizes]
    for (leaf, first), x in _sums(layout, operands, 0).items():
        leaves[leaf] = leaves[leaf].at[first : first + x.size].set(divided(x))
    return [x.reshape(s) for x, s in zip(leaves, layout.shapes)]
