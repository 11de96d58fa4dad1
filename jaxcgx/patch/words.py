"""Patches of words: the encoders on devices, in jnp and by CUDA's kernels, and what all encoders have.

Words are an array of one dimension, of unsigned integers. They have the bits of an array of any dtype
(docs/wire-format.md#patches). jnp is the reference of all kernels, and encodes on the host, too, where there is no
native module. On a device, a block has a slot of its own, as long as its words. Only the used parts of all slots,
together, travel to the host, and to the device only the blocks of a patch.
"""

import contextlib
import functools
from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from jaxcgx.checks import wrong
from jaxcgx.native import registration

Words: TypeAlias = np.ndarray[Any, Any]
Buffer: TypeAlias = bytes | memoryview

BLOCK = 2**15  # words
WHOLE = 2**16 - 1  # in place of the number of changed words: the block has all of its words as they are
HEAD = np.dtype(("<u2", 3))  # of a block: the numbers of changed words, small steps and raw words

MASK, GOLDEN = 2**64 - 1, 0x9E3779B97F4A7C15
GROUP = 512  # words of 64 bits
_PART = 2**20  # bytes that are hashed at once
HOST = "cpu"  # the platform whose arrays are on the host
_AT_ONCE = 64  # blocks for which jnp has temporaries


def shape_of(x: Any) -> tuple[int, int]:
    """Returns the number of an array's words, and their bytes: a complex number is two words."""
    parts = 1 + (x.dtype.kind == "c")
    return x.size * parts, x.dtype.itemsize // parts


def mix(x: Any, number: Callable[[int], Any] = int) -> Any:
    """Returns the finalizer of SplitMix64, with constants of the type `number`, of integers below 2^64 or of uint64."""
    x = (x ^ x >> 30) * number(0xBF58476D1CE4E5B9) & number(MASK)
    x = (x ^ x >> 27) * number(0x94D049BB133111EB) & number(MASK)
    return x ^ x >> 31


FACTORS = mix(np.arange(1, GROUP + 1, dtype=np.uint64) * np.uint64(GOLDEN)) | 1


def digest_of(words: Words) -> int:
    """Returns the digest of the bytes of words, 64 bits, in NumPy."""
    data, total, size = words.view(np.uint8), 0, 8 * GROUP
    for first in range(0, data.size, _PART):
        part = data[first : first + _PART]
        groups = np.concatenate([part, np.zeros(-part.size % size, np.uint8)]).view("<u8").reshape(-1, GROUP)
        total += int(_sum_of(groups, first // size, np))
    return total & MASK


def _sum_of(groups: Any, first: int, xp: Any) -> Any:
    """Returns what groups add to a digest. `first` is the number of the first group, `xp` is NumPy or jnp."""
    sums, numbers = ((groups ^ groups >> 32) * FACTORS).sum(1), xp.arange(first + 1, first + len(groups) + 1)
    return mix(sums + numbers.astype(np.uint64) * np.uint64(GOLDEN), np.uint64).sum()


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


class Places(NamedTuple):
    """Where the parts of a block are."""

    low: Any  # the low bits of an index; 0 if the list isn't split
    split: Any
    row: Any  # bits of the list's first row
    codes: Any  # the byte where the codes begin, as the next ones
    small: Any
    raw: Any
    end: Any

    @classmethod
    def of(cls, n: Any, width: int, head: Sequence[Any], xp: Any) -> "Places":
        """Returns those of blocks of n words, by their heads. `xp` is NumPy or jnp."""
        changed, small, raw = head
        row_bytes = lambda bits: (bits + 7) // 8
        low = xp.maximum(xp.frexp(n // xp.maximum(changed, 1))[1] - 1, 0)
        listed = (changed > 0) & (changed < n)
        split = listed & (row_bytes((n >> low) + changed) + row_bytes(changed * low) < row_bytes(n))
        low = xp.where(split, low, 0)
        row = xp.where(listed, xp.where(split, (n >> low) + changed, n), 0)
        codes = row_bytes(row) + row_bytes(changed * low)
        smalls = codes + row_bytes(2 * changed)
        raws = smalls + small * max(1, width // 2)
        return cls(low, split, row, codes=codes, small=smalls, raw=raws, end=raws + raw * width)


def block_sizes(heads: Words, size: int, width: int) -> Words:
    """Returns the bytes of each block of `size` words of `width` bytes, by its heads."""
    changed, *others = heads.astype(np.int64).T
    n = np.minimum(size - BLOCK * np.arange(len(heads)), BLOCK)
    return np.where(changed == WHOLE, n * width, Places.of(n, width, (changed, *others), np).end)


def refused() -> Exception:
    """Returns the error for a patch whose checksum is right, but whose blocks aren't."""
    return wrong("patch.apply", "patch", "blocks as jaxcgx.patch.encode writes them", "others")


# Arrays on a device


@contextlib.contextmanager
def numbers() -> Generator[None]:
    """Makes programs use 64 bits, and the promotion of this file, whatever the user has chosen for others."""
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        yield


def has_words(x: Any) -> bool:
    """Returns whether JAX has whole bytes for the elements of x. NumPy has a byte for 4 bits, JAX may not."""
    if not isinstance(x, jax.Array | jax.ShapeDtypeStruct) or x.size == 0:
        return False
    info = jnp.iinfo if jnp.issubdtype(x.dtype, jnp.integer) else jnp.finfo
    return x.dtype == bool or info(x.dtype).bits >= 8


def device_of(*leaves: Any) -> Any:
    """Returns the device on which these arrays are encoded, or None: the host."""
    # An array over several devices is gathered on one of them.
    if not all(has_words(x) and x.sharding.is_fully_addressable for x in leaves):
        return None
    device = min(leaves[0].sharding.device_set, key=lambda device: device.id)
    return None if device.platform == HOST else device


def home_of(x: Any) -> Any:
    """Returns the device that has all of an array, if it is encoded there. Without a sharding, it has no device yet."""
    sharding = getattr(x, "sharding", None)
    there = sharding and len(sharding.device_set) == 1 and sharding.memory_kind in (None, "device")
    return device_of(x) if there else None


@numbers()
def zeros(size: int, dtype: Any, device: Any) -> Any:
    """Returns an array of one dimension on a device, or one of NumPy if the device is None."""
    return np.zeros(size, dtype) if device is None else jnp.zeros(size, dtype, device=device)


# As words, because XLA may change NaNs and denormal numbers while it copies bfloat16.
@numbers()
@functools.partial(jax.jit, static_argnums=1)
def pieces_of(x: jax.Array, elements: int) -> list[jax.Array]:
    """Returns copies of the parts of an array, of one dimension, with `elements` elements each. The last has fewer."""
    words, each = jnp.copy(_words(x)), elements * shape_of(x)[0] // x.size
    like = lambda words: jax.ShapeDtypeStruct((words.size * elements // each,), x.dtype)
    return [_like(part, like(part)) for part in jnp.split(words, [*range(each, words.size, each)])]


@numbers()
@functools.partial(jax.jit, static_argnums=1)
def joined(pieces: Sequence[jax.Array], shape: tuple[int, ...]) -> jax.Array:
    """Returns an array of pieces, in memory of its own."""
    words = jnp.concatenate(jax.lax.optimization_barrier([*map(_words, pieces)]))  # or XLA makes them numbers before
    return _like(jnp.copy(jax.lax.optimization_barrier(words)), jax.ShapeDtypeStruct(shape, pieces[0].dtype))


@numbers()
def encode_on(device: Any, old: jax.Array, new: jax.Array) -> Part:
    heads, slots, digests = _encode(_gathered(old, device), _gathered(new, device))
    heads, digests = jax.device_get((heads, digests))
    sizes = block_sizes(heads, *shape_of(old))
    blocks = np.asarray(_pack(slots, sizes, _padded(used := int(sizes.sum()))))[:used]
    return Part(heads.tobytes(), blocks.tobytes(), *map(int, digests))


@numbers()
def apply_on(device: Any, old: jax.Array, heads: Buffer, blocks: Buffer, *, donate: bool) -> tuple[jax.Array, int, int]:
    """Returns (the new array, the digest of the old one, the digest of the new one).

    The digest of an old one that is donated is 0.
    """
    run = _apply_donated if donate else _apply
    table = np.frombuffer(heads, HEAD)
    sizes = block_sizes(table, *shape_of(old))
    if sizes.sum() != len(blocks):
        raise refused()
    data = np.pad(np.frombuffer(blocks, np.uint8), (0, _padded(len(blocks)) - len(blocks)))
    new, fits, digests = run(_gathered(old, device), table, np.cumsum(sizes) - sizes, data)
    fits, (before, after) = jax.device_get((fits, digests))
    if not fits:
        raise refused()
    return new if old.sharding == new.sharding else jax.device_put(new, old.sharding), int(before), int(after)


@numbers()
def digest_on(device: Any, x: jax.Array) -> int:
    return int(_digest_of(_gathered(x, device)))


@numbers()
def encode(olds: Sequence[Words], news: Sequence[Words]) -> list[Part]:
    """Returns what a patch has of each leaf, as `encode` of the native module."""
    pairs = [(jnp.asarray(old), jnp.asarray(new)) for old, new in zip(olds, news)]
    return [encode_on(old.device, old, new) if old.size else Part(b"", b"", 0, 0) for old, new in pairs]


@numbers()
def apply(
    heads: Sequence[Buffer], blocks: Sequence[Buffer], olds: Sequence[Words], news: Sequence[Words]
) -> tuple[list[int], list[int]]:
    """Writes the new words to `news`. Returns the digests of the old words, 0 if overwritten, and of the new ones."""
    before, after = [0] * len(olds), [0] * len(olds)
    for i, (head, block, old, new) in enumerate(zip(heads, blocks, map(jnp.asarray, olds), news, strict=True)):
        if old.size:
            new[:], before[i], after[i] = apply_on(old.device, old, head, block, donate=False)
    return [x * (old is not new) for x, old, new in zip(before, olds, news)], after


def _gathered(x: jax.Array, device: Any) -> jax.Array:
    return x if x.devices() == {device} else jax.device_put(x, device)


def _padded(size: int) -> int:
    """Returns one of few lengths that arrays have, because a program is compiled for each."""
    return 1 << max(12, (size - 1).bit_length())


# Bits


def _words(x: jax.Array) -> jax.Array:
    if x.dtype.kind == "c":
        x = jnp.stack([x.real, x.imag], -1)
    if x.dtype == bool:
        x = x.astype(jnp.uint8)
    return jax.lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}").reshape(-1)


def _like(words: jax.Array, x: jax.Array | jax.ShapeDtypeStruct) -> jax.Array:
    if x.dtype == bool:
        return words.astype(bool).reshape(x.shape)
    if x.dtype.kind != "c":
        return jax.lax.bitcast_convert_type(words, x.dtype).reshape(x.shape)
    parts = jax.lax.bitcast_convert_type(words, jnp.finfo(x.dtype).dtype).reshape(*x.shape, 2)
    return jax.lax.complex(parts[..., 0], parts[..., 1])


# Digests


def _digest(words: jax.Array) -> jax.Array:
    width = words.dtype.itemsize
    groups = jnp.pad(words, (0, -words.size % (8 * GROUP // width))).reshape(-1, GROUP, 8 // width)
    return _sum_of(groups[..., 0] if width == 8 else jax.lax.bitcast_convert_type(groups, jnp.uint64), 0, jnp)


_digest_of = jax.jit(lambda x: _digest(_words(x)))


# Blocks


def _count(marks: jax.Array) -> jax.Array:
    """Returns how many marks are before each one."""
    return jnp.cumsum(marks, dtype=jnp.int32) - marks


def _encode_block(old: jax.Array, new: jax.Array, n: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the head and the slot of a block of n words, behind which old and new words are the same."""
    (most,), width, bits = old.shape, old.dtype.itemsize, 8 * old.dtype.itemsize
    half = max(1, width // 2)
    step, changed = new - old, old != new
    number = step << 1 ^ 0 - (step >> bits - 1)  # the rank + 1; 0: the same
    raw = number > min(2 + 2 ** (8 * half), 2**bits - 1)
    small = (number > 2) & ~raw
    code = jnp.where(raw, 3, jnp.minimum(number, 3).astype(jnp.int32) - 1)
    head = jnp.sum(changed, dtype=jnp.int32), jnp.sum(small, dtype=jnp.int32), jnp.sum(raw, dtype=jnp.int32)
    at = Places.of(n, width, head, jnp)
    i, j = jnp.arange(most, dtype=jnp.int32), _count(changed)
    one, lows = jnp.where(at.split, (i >> at.low) + j, i), (i & (1 << at.low) - 1) << (j * at.low & 7)
    byte = lambda numbers, b: (numbers >> 8 * b).astype(jnp.uint8)
    parts = [  # which words have a byte, its place, the byte
        (changed & (at.row > 0), one >> 3, (1 << (one & 7)).astype(jnp.uint8)),
        *((changed & at.split, (at.row + 7) // 8 + (j * at.low >> 3) + b, byte(lows, b)) for b in range(3)),
        (changed, at.codes + (j >> 2), (code << 2 * (j & 3)).astype(jnp.uint8)),
        *((small, at.small + _count(small) * half + b, byte(number - 3, b)) for b in range(half)),
        *((raw, at.raw + _count(raw) * width + b, byte(new, b)) for b in range(width)),
    ]
    to = jnp.concatenate([jnp.where(has, place, most * width) for has, place, _ in parts])
    slot = jnp.zeros(most * width, jnp.uint8).at[to].add(jnp.concatenate([value for _, _, value in parts]), mode="drop")
    whole = at.end >= n * width
    head = jnp.where(whole, jnp.array([WHOLE, 0, 0]), jnp.stack(head)).astype(jnp.uint16)
    return head, jnp.where(whole, jax.lax.bitcast_convert_type(new, jnp.uint8).reshape(-1), slot)


def _apply_block(
    data: jax.Array, old: jax.Array, n: jax.Array, head: jax.Array, begin: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns the new words of a block of n, and whether its bytes are as `_encode_block` writes them."""
    (most,), width, half = old.shape, old.dtype.itemsize, max(1, old.dtype.itemsize // 2)
    slot = data[jnp.minimum(begin + jnp.arange(most * width + 8), len(data) - 1)]
    head = head.astype(jnp.int32)
    changed, smalls, raws = head
    whole = changed == WHOLE
    at = Places.of(n, width, (jnp.minimum(changed, n), smalls, raws), jnp)

    def number(place: jax.Array, size: int) -> jax.Array:
        parts = [slot[jnp.minimum(place + b, len(slot) - 1)].astype(jnp.uint64) << 8 * b for b in range(size)]
        return functools.reduce(jnp.bitwise_or, parts)

    i = jnp.arange(most, dtype=jnp.int32)
    ones = (slot[i >> 3] >> (i & 7).astype(jnp.uint8) & 1).astype(bool) & (i < at.row)
    j = _count(ones)
    lows = number((at.row + 7) // 8 + (j * at.low >> 3), 3) >> (j * at.low & 7).astype(jnp.uint64)
    index = jnp.where(ones, (i - j << at.low) | lows.astype(jnp.int32) & (1 << at.low) - 1, most)
    listed = jnp.full(most, most, jnp.int32).at[jnp.where(ones, j, most)].set(index, mode="drop")
    ascends = jnp.all((listed[1:] > listed[:-1]) | (i[1:] >= changed)) & (jnp.max(jnp.where(ones, index, 0)) < n)
    found = jnp.zeros(most, bool).at[index].set(True, mode="drop")
    marks = jnp.where(at.split, found, jnp.where(at.row == 0, (changed == n) & (i < n), ones))
    fits = (jnp.where(at.row == 0, marks, ones).sum() == changed) & (ascends | ~at.split)

    j = _count(marks)
    code = slot[jnp.minimum(at.codes + (j >> 2), len(slot) - 1)] >> 2 * (j & 3).astype(jnp.uint8) & 3
    small, raw = marks & (code == 2), marks & (code == 3)
    rank = code + jnp.where(small, number(at.small + _count(small) * half, half), jnp.uint64(0)) + 1
    step = (rank >> 1 ^ 0 - (rank & 1)).astype(old.dtype)
    new = jnp.where(raw, number(at.raw + _count(raw) * width, width).astype(old.dtype), old + step)
    fits &= (small.sum() == smalls) & (raw.sum() == raws)
    words = slot[: most * width].reshape(most, width)
    words = words[:, 0] if width == 1 else jax.lax.bitcast_convert_type(words, old.dtype)
    return jnp.where(whole, words, jnp.where(marks, new, old)), jnp.where(whole, (smalls == 0) & (raws == 0), fits)


def _rows(words: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns blocks of words, and how many words each has. A short array is one short block."""
    most = min(BLOCK, words.size)
    rows = jnp.pad(words, (0, -words.size % most)).reshape(-1, most)
    return rows, jnp.clip(words.size - most * jnp.arange(len(rows), dtype=jnp.int32), 0, most)


def _encode_in_jnp(old: jax.Array, new: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the heads and the slots of all blocks of words."""
    blocks = _rows(old)[0], *_rows(new)
    heads, slots = jax.lax.map(lambda block: _encode_block(*block), blocks, batch_size=_AT_ONCE)
    return heads, jnp.pad(slots, ((0, 0), (0, BLOCK * old.dtype.itemsize - slots.shape[1])))


def _apply_in_jnp(old: jax.Array, heads: jax.Array, begins: jax.Array, data: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the new words, and whether the bytes of each block fit."""
    blocks = *_rows(old), heads, begins
    new, fits = jax.lax.map(lambda block: _apply_block(data, *block), blocks, batch_size=_AT_ONCE)
    return new.reshape(-1)[: old.size], fits.astype(jnp.uint8)


def _encode_by_kernel(old: jax.Array, new: jax.Array) -> tuple[jax.Array, jax.Array]:
    blocks, slot = -(-old.size // BLOCK), BLOCK * old.dtype.itemsize
    types = jax.ShapeDtypeStruct((blocks, 3), jnp.uint16), jax.ShapeDtypeStruct((blocks, slot), jnp.uint8)
    heads, slots = jax.ffi.ffi_call("jaxcgx_patch_encode", types)(old, new)
    return heads, slots


def _apply_by_kernel(
    old: jax.Array, heads: jax.Array, begins: jax.Array, data: jax.Array
) -> tuple[jax.Array, jax.Array]:
    types = jax.ShapeDtypeStruct(old.shape, old.dtype), jax.ShapeDtypeStruct(begins.shape, jnp.uint8)
    new, fits = jax.ffi.ffi_call("jaxcgx_patch_apply", types, input_output_aliases={0: 0})(old, heads, begins, data)
    return new, fits


def _choose(kernel: Callable[..., Any], otherwise: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that is `kernel` on CUDA's GPUs, if this build has it, and `otherwise` on other devices."""
    if not registration.has_cuda():
        return otherwise
    return lambda *operands: jax.lax.platform_dependent(*operands, cuda=kernel, default=otherwise)


@jax.jit
def _encode(old: jax.Array, new: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    old, new = _words(old), _words(new)
    heads, slots = _choose(_encode_by_kernel, _encode_in_jnp)(old, new)
    return heads, slots, jnp.stack([_digest(old), _digest(new)])


@functools.partial(jax.jit, static_argnums=2)
def _pack(slots: jax.Array, sizes: jax.Array, count: int) -> jax.Array:
    """Returns the used parts of all slots, one after another, in `count` bytes."""
    ends, at = jnp.cumsum(sizes), jnp.arange(count)
    block = jnp.minimum(jnp.searchsorted(ends, at, side="right"), len(sizes) - 1)
    return slots.at[block, at - (ends - sizes)[block]].get(mode="clip")


def _new(
    donated: bool, old: jax.Array, heads: jax.Array, begins: jax.Array, data: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    words = _words(old)
    new, fits = _choose(_apply_by_kernel, _apply_in_jnp)(words, heads, begins, data)
    before = jnp.uint64(0) if donated else _digest(words)
    return _like(new, old), fits.all(), jnp.stack([before, _digest(new)])


_apply = jax.jit(functools.partial(_new, False))
_apply_donated = jax.jit(functools.partial(_new, True), donate_argnums=0)
