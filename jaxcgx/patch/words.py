"""Patches of words, in NumPy: the part of docs/wire-format.md#patches that the native module has, too.

Words are an array of one dimension, of unsigned integers. They have the bits of an array of any dtype.
"""

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

from jaxcgx.checks import wrong

Words: TypeAlias = np.ndarray[Any, Any]

BLOCK = 2**15  # words
_WHOLE = 2**16 - 1  # in place of the number of changed words: the block has all of its words as they are
_TAIL = bytes(8)  # lets decoders read 8 bytes at a time
_HEAD = 3  # numbers of a block: changed words, small steps, raw words

MASK, _GOLDEN = 2**64 - 1, 0x9E3779B97F4A7C15
_GROUP = 512  # words of 64 bits
_PART = 2**20  # bytes that are hashed at once


def mix(x: Any) -> Any:
    """Returns the finalizer of SplitMix64 of an integer below 2^64, or of an array of uint64."""
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & MASK
    x = (x ^ x >> 27) * 0x94D049BB133111EB & MASK
    return x ^ x >> 31


def _from_one(first: int, count: int) -> Words:
    return np.arange(first + 1, first + count + 1, dtype=np.uint64) * np.uint64(_GOLDEN)


_FACTORS = mix(_from_one(0, _GROUP)) | 1


def digest_of(words: Words) -> int:
    """Returns the digest of the bytes of words: 64 bits."""
    data, total, size = words.view(np.uint8), 0, 8 * _GROUP
    for first in range(0, data.size, _PART):
        part = data[first : first + _PART]
        groups = np.concatenate([part, np.zeros(-part.size % size, np.uint8)]).view("<u8").reshape(-1, _GROUP)
        sums = ((groups ^ groups >> 32) * _FACTORS).sum(1, dtype=np.uint64)
        total += int(mix(sums + _from_one(first // size, len(sums))).sum(dtype=np.uint64))
    return total & MASK


def encode(olds: Sequence[Words], news: Sequence[Words]) -> tuple[bytes, list[int], list[int]]:
    """Returns the heads and blocks of all leaves, the digests of the old ones and those of the new ones."""
    blocks = [
        _encode(old[at : at + BLOCK], new[at : at + BLOCK])
        for old, new in zip(olds, news)
        for at in range(0, old.size, BLOCK)
    ]
    heads = np.array([head for head, _ in blocks], "<u2").tobytes()
    body = b"".join([heads, *(data for _, data in blocks), _TAIL])
    return body, [digest_of(x) for x in olds], [digest_of(x) for x in news]


def apply(body: bytes, olds: Sequence[Words], news: Sequence[Words]) -> tuple[list[int], list[int]]:
    """Writes the new words to `news`, which may be `olds`. Returns the digests of the old and of the new ones."""
    old_digests = [digest_of(x) for x in olds]
    count = sum(-(-old.size // BLOCK) for old in olds)
    reader = _Reader(body)
    heads = iter(reader.numbers(np.dtype("<u2"), _HEAD * count).reshape(count, _HEAD).tolist())
    for old, new in zip(olds, news):
        new[:] = old
        for at in range(0, old.size, BLOCK):
            _apply(reader, next(heads), new[at : at + BLOCK])
    reader.check(reader.at + len(_TAIL) == len(body))
    return old_digests, [digest_of(x) for x in news]


class _Reader:
    """Reads one part of a body after another."""

    def __init__(self, body: bytes):
        self.body, self.at = body, 0

    def check(self, fits: bool) -> None:
        if not fits:
            raise wrong("patch.apply", "patch", "blocks as jaxcgx.patch.encode writes them", "others")

    def numbers(self, dtype: np.dtype[Any], count: int) -> Words:
        begin, self.at = self.at, self.at + count * dtype.itemsize
        self.check(self.at + len(_TAIL) <= len(self.body))
        return np.frombuffer(self.body, dtype, count, begin)

    def bits(self, count: int, width: int = 1) -> Words:
        """Reads `count` numbers of `width` bits."""
        bits = np.unpackbits(self.numbers(np.dtype(np.uint8), _row_bytes(count * width)), bitorder="little")
        return bits[: count * width].reshape(count, width) @ (1 << np.arange(width))


def _row(numbers: Words, width: int = 1) -> bytes:
    """Returns numbers of `width` bits as one row of bits, low bits first."""
    return np.packbits(numbers[:, None] >> np.arange(width) & 1, bitorder="little").tobytes()


def _row_bytes(bits: int) -> int:
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
        return (_WHOLE, 0, 0), new.tobytes()
    return (index.size, smalls.size, raws.size), data


def _apply(reader: _Reader, head: list[int], words: Words) -> None:
    """Makes new words of the old ones of a block, in place."""
    k, smalls, raws = head
    if k == _WHOLE:
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
