"""Patches of words, in NumPy: the part of docs/wire-format.md#patches that the native module has, too.

Words are an array of one dimension, of unsigned integers. They have the bits of an array of any dtype.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from jaxcgx.checks import wrong

Words: TypeAlias = np.ndarray[Any, Any]
Buffer: TypeAlias = bytes | memoryview

BLOCK = 2**15  # words
WHOLE = 2**16 - 1  # in place of the number of changed words: the block has all of its words as they are
HEAD = np.dtype(("<u2", 3))  # of a block: the numbers of changed words, small steps and raw words

MASK, GOLDEN = 2**64 - 1, 0x9E3779B97F4A7C15
GROUP = 512  # words of 64 bits
_PART = 2**20  # bytes that are hashed at once


def shape_of(x: Any) -> tuple[int, int]:
    """Returns the number of an array's words, and their bytes: a complex number is two words."""
    parts = 1 + (x.dtype.kind == "c")
    return x.size * parts, x.dtype.itemsize // parts


def mix(x: Any) -> Any:
    """Returns the finalizer of SplitMix64 of an integer below 2^64, or of an array of uint64."""
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & MASK
    x = (x ^ x >> 27) * 0x94D049BB133111EB & MASK
    return x ^ x >> 31


def _from_one(first: int, count: int) -> Words:
    return np.arange(first + 1, first + count + 1, dtype=np.uint64) * np.uint64(GOLDEN)


FACTORS = mix(_from_one(0, GROUP)) | 1


def digest_of(words: Words) -> int:
    """Returns the digest of the bytes of words: 64 bits."""
    data, total, size = words.view(np.uint8), 0, 8 * GROUP
    for first in range(0, data.size, _PART):
        part = data[first : first + _PART]
        groups = np.concatenate([part, np.zeros(-part.size % size, np.uint8)]).view("<u8").reshape(-1, GROUP)
        sums = ((groups ^ groups >> 32) * FACTORS).sum(1, dtype=np.uint64)
        total += int(mix(sums + _from_one(first // size, len(sums))).sum(dtype=np.uint64))
    return total & MASK


class Part(NamedTuple):
    """What a patch has of a leaf."""

    heads: Buffer
    blocks: Buffer
    old: int  # the digest of the old words
    new: int


def seal(parts: Sequence[Buffer], at: int) -> bytes:
    """Returns the parts as one, with the digest of the bytes from `at` on in the 8 bytes before them."""
    data = b"".join(parts)
    return data[: at - 8] + digest_of(np.frombuffer(data, np.uint8)[at:]).to_bytes(8, "little") + data[at:]


def encode(olds: Sequence[Words], news: Sequence[Words]) -> list[Part]:
    """Returns what a patch has of each leaf. The native module returns tuples of the same."""
    parts = list[Part]()
    for old, new in zip(olds, news):
        blocks = [_encode(old[at : at + BLOCK], new[at : at + BLOCK]) for at in range(0, old.size, BLOCK)]
        heads = np.array([head for head, _ in blocks], "<u2").tobytes()
        parts.append(Part(heads, b"".join(data for _, data in blocks), digest_of(old), digest_of(new)))
    return parts


def apply(
    heads: Sequence[Buffer], blocks: Sequence[Buffer], olds: Sequence[Words], news: Sequence[Words]
) -> tuple[list[int], list[int]]:
    """Writes the new words to `news`, which may be `olds`. Returns the digests of the old and of the new ones."""
    old_digests = [digest_of(x) for x in olds]
    for head, block, old, new in zip(heads, blocks, olds, news, strict=True):
        reader = _Reader(block)
        new[:] = old
        for each, at in zip(np.frombuffer(head, HEAD).tolist(), range(0, old.size, BLOCK), strict=True):
            _apply(reader, each, new[at : at + BLOCK])
        reader.check(reader.at == len(block))
    return old_digests, [digest_of(x) for x in news]


def block_sizes(heads: Words, size: int, width: int) -> Words:
    """Returns the bytes of each block of `size` words of `width` bytes, by its heads."""
    changed, small, raw = heads.astype(np.int64).T
    n = np.minimum(size - BLOCK * np.arange(len(heads)), BLOCK)
    low = np.maximum(np.frexp(n // np.maximum(changed, 1))[1] - 1, 0)
    split = _row_bytes((n >> low) + changed) + _row_bytes(changed * low)
    listed = np.where((changed == 0) | (changed == n), 0, np.minimum(split, _row_bytes(n)))
    coded = listed + _row_bytes(2 * changed) + small * max(1, width // 2) + raw * width
    return np.where(changed == WHOLE, n * width, coded)


def refused() -> Exception:
    """Returns the error for a patch whose checksum is right, but whose blocks aren't."""
    return wrong("patch.apply", "patch", "blocks as jaxcgx.patch.encode writes them", "others")


class _Reader:
    """Reads one part of the blocks of a leaf after another."""

    def __init__(self, body: Buffer):
        self.body, self.at = body, 0

    def check(self, fits: bool) -> None:
        if not fits:
            raise refused()

    def numbers(self, dtype: np.dtype[Any], count: int) -> Words:
        begin, self.at = self.at, self.at + count * dtype.itemsize
        self.check(self.at <= len(self.body))
        return np.frombuffer(memoryview(self.body)[begin : self.at], dtype)

    def bits(self, count: int, width: int = 1) -> Words:
        """Reads `count` numbers of `width` bits."""
        bits = np.unpackbits(self.numbers(np.dtype(np.uint8), _row_bytes(count * width)), bitorder="little")
        return bits[: count * width].reshape(count, width) @ (1 << np.arange(width))


def _row(numbers: Words, width: int = 1) -> bytes:
    """Returns numbers of `width` bits as one row of bits, low bits first."""
    return np.packbits(numbers[:, None] >> np.arange(width) & 1, bitorder="little").tobytes()


def _row_bytes(bits: Any) -> Any:
    return -(-bits // 8)


def _low_bits(n: int, k: int) -> int | None:
    """Returns how many bits of an index are stored as they are. None: a row of n bits is as short as that form."""
    low = (n // k).bit_length() - 1
    return low if _row_bytes((n >> low) + k) + _row_bytes(k * low) < _row_bytes(n) else None


def _to_list(index: Words, n: int) -> bytes:
    k = index.size
    if k in (0, n):
        return b""
    low = _low_bits(n, k)
    if low is None:
        return _row(np.bincount(index, minlength=n))
    high = np.bincount((index >> low) + np.arange(k), minlength=(n >> low) + k)
    return _row(high) + _row(index, low)


def _from_list(reader: _Reader, n: int, k: int) -> Words:
    if k in (0, n):
        return np.arange(k)
    low = _low_bits(n, k)
    ones = np.flatnonzero(reader.bits(n if low is None else (n >> low) + k))
    reader.check(ones.size == k)
    index = ones if low is None else (ones - np.arange(k) << low) + reader.bits(k, low)
    reader.check(bool((np.diff(index) > 0).all()) and index[-1] < n)
    return index


def _small(words: Words) -> np.dtype[Any]:
    """Returns the dtype of small steps: half a word, but at least a byte."""
    return np.dtype(f"<u{max(1, words.itemsize // 2)}")


def _encode(old: Words, new: Words) -> tuple[tuple[int, int, int], bytes]:
    """Returns a block: its head and its bytes."""
    index = np.flatnonzero(old != new)
    step, small = new[index] - old[index], _small(new)
    # The rank of a step: 0 is -1, 1 is +1, 2 is -2, and so on.
    rank = (step << 1 ^ 0 - (step >> 8 * new.itemsize - 1)) - 1
    code = np.minimum(rank, 2).astype(np.uint8) + (rank.astype(np.uint64) >= 2 + 2 ** (8 * small.itemsize))
    smalls, raws = (rank[code == 2] - 2).astype(small), new[index[code == 3]]
    data = b"".join([_to_list(index, new.size), _row(code, 2), smalls.tobytes(), raws.tobytes()])
    if len(data) >= new.nbytes:
        return (WHOLE, 0, 0), new.tobytes()
    return (index.size, smalls.size, raws.size), data


def _apply(reader: _Reader, head: list[int], words: Words) -> None:
    """Makes new words of the old ones of a block, in place."""
    k, smalls, raws = head
    if k == WHOLE:
        reader.check(smalls == raws == 0)
        words[:] = reader.numbers(words.dtype, words.size)
        return
    reader.check(k <= words.size)
    index, code = _from_list(reader, words.size, k), reader.bits(k, 2)
    reader.check(smalls == np.count_nonzero(code == 2) and raws == np.count_nonzero(code == 3))
    rank = code.astype(np.uint64)
    rank[code == 2] += reader.numbers(_small(words), smalls)
    new = words[index] + (rank + 1 >> 1 ^ 0 - (rank + 1 & 1)).astype(words.dtype)
    new[code == 3] = reader.numbers(words.dtype, raws)
    words[index] = new
