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
from jax import lax

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


def _from_one(first: int, count: int) -> Words:
    return np.arange(first + 1, first + count + 1, dtype=np.uint64) * np.uint64(GOLDEN)


FACTORS = mix(_from_one(0, GROUP)) | 1


def digest_of(words: Words) -> int:
    """Returns the digest of the bytes of words, 64 bits, in NumPy."""
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


def block_sizes(heads: Words, size: int, width: int) -> Words:
    """Returns the bytes of each block of `size` words of `width` bytes, by its heads."""
    row_bytes = lambda bits: -(-bits // 8)
    changed, small, raw = heads.astype(np.int64).T
    n = np.minimum(size - BLOCK * np.arange(len(heads)), BLOCK)
    low = np.maximum(np.frexp(n // np.maximum(changed, 1))[1] - 1, 0)
    split = row_bytes((n >> low) + changed) + row_bytes(changed * low)
    listed = np.where((changed == 0) | (changed == n), 0, np.minimum(split, row_bytes(n)))
    coded = listed + row_bytes(2 * changed) + small * max(1, width // 2) + raw * width
    return np.where(changed == WHOLE, n * width, coded)


def refused() -> Exception:
    """Returns the error for a patch whose checksum is right, but whose blocks aren't."""
    return wrong("patch.apply", "patch", "blocks as jaxcgx.patch.encode writes them", "others")


# Arrays on a device


def has_words(x: Any) -> bool:
    """Returns whether x is an array of JAX with elements of whole bytes. NumPy has a byte for 4 bits, JAX may not."""
    if not isinstance(x, jax.Array) or x.size == 0:
        return False
    info = jnp.iinfo if jnp.issubdtype(x.dtype, jnp.integer) else jnp.finfo
    return x.dtype == bool or info(x.dtype).bits >= 8


def device_of(*leaves: Any) -> Any:
    """Returns the device on which these arrays are encoded, or None: the host."""
    # An array over several devices is gathered on one of them.
    if not all(map(has_words, leaves)):
        return None
    device = min(leaves[0].devices(), key=lambda device: device.id)
    return None if device.platform == HOST else device


def encode(old: jax.Array, new: jax.Array, device: Any) -> Part:
    with _numbers():
        heads, slots, digests = _encode(_gathered(old, device), _gathered(new, device))
        heads, digests = jax.device_get((heads, digests))
        sizes = block_sizes(heads, *shape_of(old))
        used = int(sizes.sum())
        blocks = np.asarray(_pack(slots, sizes, _padded(used)))[:used]
    return Part(heads.tobytes(), blocks.tobytes(), *map(int, digests))


def apply(old: jax.Array, heads: Buffer, blocks: Buffer, device: Any, *, donate: bool) -> tuple[jax.Array, int, int]:
    """Returns (the new array, the digest of the old one, the digest of the new one).

    The digest of an old one that is donated is 0.
    """
    table = np.frombuffer(heads, HEAD)
    sizes = block_sizes(table, *shape_of(old))
    if sizes.sum() != len(blocks):
        raise refused()
    data = np.zeros(_padded(len(blocks)), np.uint8)
    data[: len(blocks)] = np.frombuffer(blocks, np.uint8)
    with _numbers():
        run = _apply_donated if donate else _apply
        new, fits, digests = run(_gathered(old, device), table, np.cumsum(sizes) - sizes, data)
        fits, digests = jax.device_get((fits, digests))
    if not fits:
        raise refused()
    before, after = map(int, digests)
    return new if old.sharding == new.sharding else jax.device_put(new, old.sharding), before, after


def digest_on(device: Any, x: jax.Array) -> int:
    with _numbers():
        return int(_digest_of(_gathered(x, device)))


def encode_words(olds: Sequence[Words], news: Sequence[Words]) -> list[Part]:
    """Returns what a patch has of each leaf, as `encode` of the native module."""
    with _numbers():
        pairs = [(jnp.asarray(old), jnp.asarray(new)) for old, new in zip(olds, news)]
        return [encode(old, new, _cpu()) if old.size else Part(b"", b"", 0, 0) for old, new in pairs]


def apply_words(
    heads: Sequence[Buffer], blocks: Sequence[Buffer], olds: Sequence[Words], news: Sequence[Words]
) -> tuple[list[int], list[int]]:
    """Writes the new words to `news`, which may be `olds`. Returns the digests of the old and of the new ones."""
    digests = [[0, 0] for _ in olds]
    with _numbers():
        for i, (head, block, old, new) in enumerate(zip(heads, blocks, olds, news, strict=True)):
            if old.size:
                new[:], *digests[i] = apply(jnp.asarray(old), head, block, _cpu(), donate=False)
    return [old for old, _ in digests], [new for _, new in digests]


def _cpu() -> Any:
    with contextlib.suppress(RuntimeError):  # JAX_PLATFORMS may leave CPUs out
        return jax.local_devices(backend="cpu")[0]
    return jax.local_devices()[0]


def _gathered(x: jax.Array, device: Any) -> jax.Array:
    return x if x.devices() == {device} else jax.device_put(x, device)


@contextlib.contextmanager
def _numbers() -> Generator[None]:
    """Makes programs use 64 bits, and the promotion of this file, whatever the user has chosen for others."""
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        yield


def _padded(size: int) -> int:
    """Returns one of few lengths that arrays have, because a program is compiled for each."""
    return 1 << max(12, (size - 1).bit_length())


# Bits


def _words(x: jax.Array) -> jax.Array:
    if x.dtype.kind == "c":
        x = jnp.stack([x.real, x.imag], -1)
    if x.dtype == bool:
        x = x.astype(jnp.uint8)
    return lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}").reshape(-1)


def _like(words: jax.Array, x: jax.Array) -> jax.Array:
    if x.dtype == bool:
        return words.astype(bool).reshape(x.shape)
    if x.dtype.kind != "c":
        return lax.bitcast_convert_type(words, x.dtype).reshape(x.shape)
    parts = lax.bitcast_convert_type(words, jnp.finfo(x.dtype).dtype).reshape(*x.shape, 2)
    return lax.complex(parts[..., 0], parts[..., 1])


# Digests


def _digest(words: jax.Array) -> jax.Array:
    width = words.dtype.itemsize
    groups = jnp.pad(words, (0, -words.size % (8 * GROUP // width))).reshape(-1, GROUP, 8 // width)
    long = groups[..., 0] if width == 8 else lax.bitcast_convert_type(groups, jnp.uint64)
    sums = ((long ^ long >> 32) * FACTORS).sum(1)
    return mix(sums + (jnp.arange(len(sums), dtype=jnp.uint64) + 1) * np.uint64(GOLDEN), np.uint64).sum()


@jax.jit
def _digest_of(x: jax.Array) -> jax.Array:
    return _digest(_words(x))


# Blocks


class _Places(NamedTuple):
    """Where the parts of a block are."""

    low: jax.Array  # the low bits of an index; 0 if the list isn't split
    split: jax.Array
    row: jax.Array  # bits of the list's first row
    codes: jax.Array  # the byte where the codes begin, as the next ones
    small: jax.Array
    raw: jax.Array
    end: jax.Array


def _places(n: int, width: int, head: Sequence[jax.Array]) -> _Places:
    changed, small, raw = head
    row_bytes = lambda bits: (bits + 7) // 8
    low = 31 - lax.clz(n // jnp.maximum(changed, 1))
    listed = (changed > 0) & (changed < n)
    split = listed & (row_bytes((n >> low) + changed) + row_bytes(changed * low) < row_bytes(n))
    low = jnp.where(split, low, 0)
    row = jnp.where(listed, jnp.where(split, (n >> low) + changed, n), 0)
    codes = row_bytes(row) + row_bytes(changed * low)
    smalls = codes + row_bytes(2 * changed)
    raws = smalls + small * max(1, width // 2)
    end = raws + raw * width
    return _Places(low=low, split=split, row=row, codes=codes, small=smalls, raw=raws, end=end)


def _count(marks: jax.Array) -> jax.Array:
    """Returns how many marks are before each one."""
    return jnp.cumsum(marks, dtype=jnp.int32) - marks


def _encode_block(old: jax.Array, new: jax.Array) -> tuple[jax.Array, jax.Array]:
    (n,), width, bits = old.shape, old.dtype.itemsize, 8 * old.dtype.itemsize
    half = max(1, width // 2)
    step, changed = new - old, old != new
    number = step << 1 ^ 0 - (step >> bits - 1)  # the rank + 1; 0: the same
    raw = number > min(2 + 2 ** (8 * half), 2**bits - 1)
    small = (number > 2) & ~raw
    code = jnp.where(raw, 3, jnp.minimum(number, 3).astype(jnp.int32) - 1)
    head = jnp.sum(changed, dtype=jnp.int32), jnp.sum(small, dtype=jnp.int32), jnp.sum(raw, dtype=jnp.int32)
    at = _places(n, width, head)
    i, j = jnp.arange(n, dtype=jnp.int32), _count(changed)
    one, lows = jnp.where(at.split, (i >> at.low) + j, i), (i & (1 << at.low) - 1) << (j * at.low & 7)
    byte = lambda numbers, b: (numbers >> 8 * b).astype(jnp.uint8)
    parts = [  # which words have a byte, its place, the byte
        (changed & (at.row > 0), one >> 3, (1 << (one & 7)).astype(jnp.uint8)),
        *((changed & at.split, (at.row + 7) // 8 + (j * at.low >> 3) + b, byte(lows, b)) for b in range(3)),
        (changed, at.codes + (j >> 2), (code << 2 * (j & 3)).astype(jnp.uint8)),
        *((small, at.small + _count(small) * half + b, byte(number - 3, b)) for b in range(half)),
        *((raw, at.raw + _count(raw) * width + b, byte(new, b)) for b in range(width)),
    ]
    to = jnp.concatenate([jnp.where(has, place, n * width) for has, place, _ in parts])
    slot = jnp.zeros(n * width, jnp.uint8).at[to].add(jnp.concatenate([value for _, _, value in parts]), mode="drop")
    whole = at.end >= n * width
    head = jnp.where(whole, jnp.array([WHOLE, 0, 0]), jnp.stack(head)).astype(jnp.uint16)
    return head, jnp.where(whole, lax.bitcast_convert_type(new, jnp.uint8).reshape(-1), slot)


def _apply_block(old: jax.Array, head: jax.Array, begin: jax.Array, data: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the new words of a block, and whether its bytes are as `_encode_block` writes them."""
    (n,), width, half = old.shape, old.dtype.itemsize, max(1, old.dtype.itemsize // 2)
    slot = data[jnp.minimum(begin + jnp.arange(n * width + 8), len(data) - 1)]
    head = head.astype(jnp.int32)
    changed, smalls, raws = head
    whole = changed == WHOLE
    at = _places(n, width, (jnp.minimum(changed, n), smalls, raws))

    def number(place: jax.Array, size: int) -> jax.Array:
        parts = [slot[jnp.minimum(place + b, len(slot) - 1)].astype(jnp.uint64) << 8 * b for b in range(size)]
        return functools.reduce(jnp.bitwise_or, parts)

    i = jnp.arange(n, dtype=jnp.int32)
    ones = (slot[i >> 3] >> (i & 7).astype(jnp.uint8) & 1).astype(bool) & (i < at.row)
    j = _count(ones)
    lows = number((at.row + 7) // 8 + (j * at.low >> 3), 3) >> (j * at.low & 7).astype(jnp.uint64)
    index = jnp.where(ones, (i - j << at.low) | lows.astype(jnp.int32) & (1 << at.low) - 1, n)
    listed = jnp.full(n, n, jnp.int32).at[jnp.where(ones, j, n)].set(index, mode="drop")
    ascends = jnp.all((listed[1:] > listed[:-1]) | (i[1:] >= changed)) & (jnp.max(jnp.where(ones, index, 0)) < n)
    found = jnp.zeros(n, bool).at[index].set(True, mode="drop")
    marks = jnp.where(at.split, found, jnp.where(at.row == 0, changed == n, ones))
    fits = (jnp.where(at.row == 0, marks, ones).sum() == changed) & (ascends | ~at.split)

    j = _count(marks)
    code = slot[jnp.minimum(at.codes + (j >> 2), len(slot) - 1)] >> 2 * (j & 3).astype(jnp.uint8) & 3
    small, raw = marks & (code == 2), marks & (code == 3)
    rank = code + jnp.where(small, number(at.small + _count(small) * half, half), jnp.uint64(0)) + 1
    step = (rank >> 1 ^ 0 - (rank & 1)).astype(old.dtype)
    new = jnp.where(raw, number(at.raw + _count(raw) * width, width).astype(old.dtype), old + step)
    fits &= (small.sum() == smalls) & (raw.sum() == raws)
    words = slot[: n * width].reshape(n, width)
    words = words[:, 0] if width == 1 else lax.bitcast_convert_type(words, old.dtype)
    return jnp.where(whole, words, jnp.where(marks, new, old)), jnp.where(whole, (smalls == 0) & (raws == 0), fits)


def _encode_in_jnp(old: jax.Array, new: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the heads and the slots of all blocks of words."""
    whole, width = old.size // BLOCK, old.dtype.itemsize
    cut = lambda x: x[: whole * BLOCK].reshape(whole, BLOCK)
    heads, slots = lax.map(lambda pair: _encode_block(*pair), (cut(old), cut(new)), batch_size=_AT_ONCE)
    if old.size > whole * BLOCK:
        head, slot = _encode_block(old[whole * BLOCK :], new[whole * BLOCK :])
        heads = jnp.concatenate([heads, head[None]])
        slots = jnp.concatenate([slots, jnp.pad(slot, (0, BLOCK * width - slot.size))[None]])
    return heads, slots


def _apply_in_jnp(old: jax.Array, heads: jax.Array, begins: jax.Array, data: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the new words, and whether the bytes of each block fit."""
    whole = old.size // BLOCK
    rows = old[: whole * BLOCK].reshape(whole, BLOCK), heads[:whole], begins[:whole]
    new, fits = lax.map(lambda block: _apply_block(block[0], block[1], block[2], data), rows, batch_size=_AT_ONCE)
    new = new.reshape(-1)
    if old.size > whole * BLOCK:
        words, fit = _apply_block(old[whole * BLOCK :], heads[whole], begins[whole], data)
        new, fits = jnp.concatenate([new, words]), jnp.concatenate([fits, fit[None]])
    return new, fits.astype(jnp.uint8)


def _encode_by_kernel(old: jax.Array, new: jax.Array) -> tuple[jax.Array, jax.Array]:
    blocks = -(-old.size // BLOCK)
    results = (blocks, 3, jnp.uint16), (blocks, BLOCK * old.dtype.itemsize, jnp.uint8)
    types = [jax.ShapeDtypeStruct(shape, dtype) for *shape, dtype in results]
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
    return lambda *operands: lax.platform_dependent(*operands, cuda=kernel, default=otherwise)


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
