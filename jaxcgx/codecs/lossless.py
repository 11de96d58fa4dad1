"""Lossless: every element keeps all its bits, and exponents take fewer bits if they are similar."""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxcgx.codecs.attribute import Kind
from jaxcgx.codecs.base import Codec
from jaxcgx.codecs.raw import Raw
from jaxcgx.native.layout import Layout, align16, runs
from jaxcgx.native.packing import from_bytes, pack, packed_bytes, to_bytes, unpack
from jaxcgx.typing import DType, DTypeLike

BLOCK = 512  # the elements of a block, which has one center
_EXPONENT = {"float32": 8, "bfloat16": 8, "float16": 5}  # bits
_MANTISSA = {"float32": 23, "bfloat16": 7, "float16": 10}
_WORD = {2: jnp.uint16, 4: jnp.uint32}  # the bits of an element, by its bytes
_LIKELY = 0.77  # the mean bits of an exponent in the overflow, for normally distributed numbers
_ZERO = 10  # the code of exponent 0


def _planes_bytes(n: int, dtype: DType) -> int:
    """Returns the bytes of a block's planes: the first digits of exponents, the signs and the mantissas."""
    rest = {"float32": 3 * n, "bfloat16": n, "float16": n + packed_bytes(n, 3)}[dtype.name]
    return packed_bytes(n, 2) + rest


def _most(n: int, dtype: DType) -> int:
    """Returns the most bytes that a block has in the overflow: the bytes of the upper bits of all exponents."""
    return -(-packed_bytes(n, _EXPONENT[dtype.name] - 2) // 2) * 2


@dataclasses.dataclass(frozen=True)
class Lossless(Codec):
    """Keeps all bits of every element, and takes fewer bytes if exponents are similar.

    bfloat16 gradients take 0.7 of their bytes. Sums have the same bits as with `Raw()`. A payload always has room for
    arrays whose exponents are not similar. `jaxcgx.Tcp` sends only its used bytes. Other transports send all bytes.
    """

    kind = Kind.LOSSLESS

    @property
    def carrier(self) -> Codec:
        """`Raw()`, whose chunks it packs."""
        return Raw()

    def code_bytes(self, n: int, dtype: DType) -> int:
        whole, rest = divmod(n, BLOCK)
        planes = whole * _planes_bytes(BLOCK, dtype) + _planes_bytes(rest, dtype)
        return align16(2 * (whole + (rest > 0))) + planes

    def overflow_bytes(self, n: int, dtype: DType) -> int:
        return n // BLOCK * _most(BLOCK, dtype) + _most(n % BLOCK, dtype)

    def weight(self, n: int, dtype: DType) -> int:
        return n * dtype.itemsize

    def approximate(self, x: jax.Array, key: jax.Array | None) -> jax.Array:
        return x

    def likely_bytes(self, shape: tuple[int, ...], dtype: DTypeLike) -> int:
        """Returns the bytes of normally distributed numbers of this shape and dtype, without the unused end."""
        unused = self.overflow_bytes(math.prod(shape), jnp.dtype(dtype)) - math.ceil(_LIKELY * math.prod(shape) / 8)
        return self.wire_bytes(shape, dtype) - max(unused, 0)

    def pack_chunk(self, layout: Layout, c: int, chunk: jax.Array) -> jax.Array:
        parts, packed, at = [], [], 0
        for p, raw in zip(layout.pieces[c], layout.carried.pieces[c], strict=True):
            dtype = layout.dtypes[p.leaf]
            first, blocks = raw.tail, []
            for _, number, n in runs(p.coded, BLOCK):
                elements = chunk[first:][: number * n * dtype.itemsize].reshape(number, -1)
                first += elements.size
                blocks.append(_pack(from_bytes(elements, _WORD[dtype.itemsize]), dtype))
            heads = jnp.concatenate([jnp.stack([b.center, b.length // 2], -1).reshape(-1) for b in blocks])
            parts += [jnp.zeros(p.codes - at, jnp.uint8), heads.astype(jnp.uint8)]
            parts += [jnp.zeros(align16(heads.size) - heads.size, jnp.uint8), *(b.planes.reshape(-1) for b in blocks)]
            at = p.codes + self.code_bytes(p.coded, dtype)
            packed += blocks
        begin = layout.overflows[c]
        overflow = jnp.zeros(layout.chunk_bytes - begin, jnp.uint8)
        for block, starts in zip(packed, _starts([b.length for b in packed])):
            k = jnp.arange(block.overflow.shape[1])
            to = jnp.where(k < block.length[:, None], starts[:, None] + k, overflow.size)
            overflow = overflow.at[to].set(block.overflow, mode="drop")
        return jnp.concatenate([*parts, jnp.zeros(begin - at, jnp.uint8), overflow])

    def unpack_chunk(self, layout: Layout, c: int, chunk: jax.Array) -> jax.Array:
        lengths, read = [], []
        for p in layout.pieces[c]:
            dtype, at, first = layout.dtypes[p.leaf], p.codes + align16(2 * -(-p.coded // BLOCK)), 0
            heads = chunk[p.codes :][: 2 * -(-p.coded // BLOCK)].reshape(-1, 2).astype(jnp.int32)
            for _, number, n in runs(p.coded, BLOCK):
                planes = chunk[at:][: number * _planes_bytes(n, dtype)].reshape(number, -1)
                at += planes.size
                head = heads[first : first + number]
                first += number
                lengths.append(jnp.minimum(2 * head[:, 1], _most(n, dtype)))
                read.append((p, n, head[:, 0], planes))
        elements: dict[int, list[jax.Array]] = {}
        overflow = jnp.pad(chunk[layout.overflows[c] :], (0, BLOCK))
        for (p, n, center, planes), length, starts in zip(read, lengths, _starts(lengths)):
            dtype = layout.dtypes[p.leaf]
            k = jnp.arange(_most(n, dtype))
            more = jnp.where(k < length[:, None], overflow[starts[:, None] + k], 0)
            bits = _unpack(_Packed(center, length, planes, more), n, dtype)
            elements.setdefault(p.leaf, []).append(to_bytes(bits).reshape(-1))
        parts, end = [], 0
        for raw in layout.carried.pieces[c]:
            parts += [jnp.zeros(raw.tail - end, jnp.uint8), *elements[raw.leaf]]
            end = raw.tail + raw.raw * layout.dtypes[raw.leaf].itemsize
        return jnp.concatenate([*parts, jnp.zeros(layout.carried.chunk_bytes - end, jnp.uint8)])


class _Packed(NamedTuple):
    """Packed blocks that have the same number of elements."""

    center: Any  # int32[blocks]
    length: Any  # int32[blocks]: the bytes in the overflow
    planes: Any  # uint8[blocks, bytes]
    overflow: Any  # uint8[blocks, bytes]


def _starts(lengths: list[jax.Array]) -> list[jax.Array]:
    """Returns the positions where the overflow of each block begins. There are no gaps between blocks."""
    starts, at = [], 0
    for length in lengths:
        starts.append(at + jnp.cumsum(length) - length)
        at = at + length.sum()
    return starts


def _digit_at(at: jax.Array, alive: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns (byte, bit), the position of each element's digit in a list of digits."""
    # The list begins at byte `at`, has a digit for each element in `alive`, and is packed as in packing.py.
    number = alive.sum(-1, keepdims=True)
    j = jnp.cumsum(alive, -1) - 1
    block, place = j // 128, j % 128
    lanes = jnp.clip(-(-(number - 128 * block) // 8), 1, 16)
    row, lane = place // lanes, place % lanes
    return at[:, None] + 32 * block + 2 * lane + row // 4, 2 * (row % 4)


# A code is 4 * level + digit. At each level, the digits 0 and 1 mean the next two exponents, from the center downwards,
# and the digit 2 means the next exponent above the center. Normally distributed numbers have about twice as many
# exponents below as above. At level 2, the digit 2 means exponent 0, which zeros have.
def _pack(bits: jax.Array, dtype: DType) -> _Packed:
    """Packs blocks from the bits of their elements, [blocks, n]."""
    mantissa, width = _MANTISSA[dtype.name], _EXPONENT[dtype.name]
    most = _most(bits.shape[-1], dtype)
    word = bits.astype(jnp.uint32)
    exponent = ((word >> mantissa) & (2**width - 1)).astype(jnp.int32)
    rest = (word & (2**mantissa - 1)) | ((word >> width) & 2**mantissa)
    number = (exponent > 0).sum(-1, dtype=jnp.int32)
    mean = exponent.sum(-1, dtype=jnp.int32) // jnp.maximum(number, 1)
    center = jnp.where(number > 0, jnp.minimum(mean + 1, 2**width - 1), 0)
    down, up = center[:, None] - exponent, exponent - center[:, None]
    code = jnp.where(down >= 0, (down >> 1) << 2 | (down & 1), (up << 2) + jnp.where(up > 2, 2, -2))
    code = jnp.where((exponent == 0) & (center[:, None] > 0), _ZERO, code)

    def later(state: Any) -> Any:
        code, alive, at, out = state
        byte, bit = _digit_at(at, alive)
        to = jnp.where(alive & (byte < most), byte, most)
        out = out.at[jnp.arange(len(out))[:, None], to].add(jnp.minimum(code, 3) << bit, mode="drop")
        at = at + 2 * -(-alive.sum(-1, dtype=jnp.int32) // 8)
        return code - 4, alive & (code > 3), at, out

    at = jnp.zeros_like(center)
    state = (code - 4, code > 3, at, at[:, None] + jnp.zeros(most, jnp.int32))
    state = jax.lax.while_loop(lambda state: (state[1] & (state[2] < most)[:, None]).any(), later, state)
    length, coded = state[2], state[3].astype(jnp.uint8)
    full = length >= most
    upper = pack(exponent >> 2, width - 2)
    upper = jnp.pad(upper, ((0, 0), (0, most - upper.shape[1])))
    first = jnp.where(full[:, None], exponent & 3, jnp.minimum(code, 3))
    planes = [pack(first, 2)]
    if dtype.itemsize == 4:
        planes += [to_bytes((rest & 0xFFFF).astype(jnp.uint16)), (rest >> 16).astype(jnp.uint8)]
    else:
        planes += [(rest & 0xFF).astype(jnp.uint8)]
    if dtype == jnp.float16:
        planes += [pack((rest >> 8).astype(jnp.int32), 3)]
    overflow = jnp.where(full[:, None], upper, coded)
    return _Packed(center, jnp.where(full, most, length), jnp.concatenate(planes, -1), overflow)


def _unpack(packed: _Packed, n: int, dtype: DType) -> jax.Array:
    """Returns the bits of the elements, [blocks, n]."""
    mantissa, width = _MANTISSA[dtype.name], _EXPONENT[dtype.name]
    most, center = _most(n, dtype), packed.center[:, None]
    planes, at = packed.planes, packed_bytes(n, 2)
    first = unpack(planes[:, :at], 2, n)
    if dtype.itemsize == 4:
        low = from_bytes(planes[:, at : at + 2 * n], jnp.uint16).astype(jnp.uint32)
        rest = low | planes[:, at + 2 * n :].astype(jnp.uint32) << 16
    else:
        rest = planes[:, at : at + n].astype(jnp.uint32)
    if dtype == jnp.float16:
        rest |= unpack(planes[:, at + n :], 3, n).astype(jnp.uint32) << 8

    more = jnp.pad(packed.overflow, ((0, 0), (0, 1))).astype(jnp.int32)  # the last byte is 0

    def later(state: Any) -> Any:
        code, alive, at = state
        byte, bit = _digit_at(at, alive)
        found = jnp.take_along_axis(more, jnp.minimum(byte, most), 1) >> bit & 3
        step = jnp.where(found == 3, 4, found)
        at = at + 2 * -(-alive.sum(-1, dtype=jnp.int32) // 8)
        return code + jnp.where(alive, step, 0), alive & (found == 3), at

    full = packed.length == most
    alive = (first == 3) & ~full[:, None]
    state = jnp.where(alive, 4, first), alive, jnp.zeros_like(packed.length)
    code = jax.lax.while_loop(lambda state: state[1].any(), later, state)[0]
    upper = unpack(packed.overflow[:, : packed_bytes(n, width - 2)], width - 2, n)
    level, digit = code >> 2, code & 3
    above = jnp.where(level == 2, 0, center + level + jnp.where(level < 2, 1, 0))
    exponent = jnp.where(digit == 2, above, center - 2 * level - digit)
    exponent = jnp.where(full[:, None], first | upper << 2, exponent) & (2**width - 1)
    sign = (rest >> mantissa) << (mantissa + width)
    bits = (rest & (2**mantissa - 1)) | (exponent.astype(jnp.uint32) << mantissa) | sign
    return bits.astype(_WORD[dtype.itemsize])
