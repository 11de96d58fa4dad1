"""Patches of trees: a header and a table of leaves, before the blocks of the leaves' words."""

import collections
import ctypes
import dataclasses
import functools
import struct
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jaxcgx.checks import check_type, spell_array, wrong
from jaxcgx.native import registration
from jaxcgx.patch import words
from jaxcgx.patch.words import BLOCK, HEAD, MASK, Part, Words, block_sizes, device_of, has_words, mix, refused, shape_of
from jaxcgx.typing import KeyPath, PyTree

_MAGIC, _FORMAT = b"cgxpatch", 1
# Magic, digest of all bytes after it, format, number of leaves, length, checksums of the old and of the new tree.
_HEADER = struct.Struct("<8sQIIQQQ")
_DIGESTED = 16  # where the bytes begin that the digest is of
_LEAF = np.dtype([("words", "<u8"), ("bytes", "<u8")])
_TAIL = bytes(8)

engine: Any = getattr(registration.MODULE, "patch", words)  # encodes arrays on the host


@dataclasses.dataclass(frozen=True, repr=False)
class Patch:
    """What changed from one version of a tree to the next. `encode` makes it, `apply` takes it.

    Args:
      data: the bytes.
      old: the checksum of the tree that the patch was made from.
      new: the checksum of the tree that `apply` returns.
    """

    data: bytes
    old: int
    new: int

    @property
    def nbytes(self) -> int:
        """The number of bytes."""
        return len(self.data)

    def tobytes(self) -> bytes:
        """Returns the bytes, which `frombytes` takes."""
        return self.data

    @classmethod
    def frombytes(cls, data: bytes | bytearray | memoryview) -> "Patch":
        """Returns the patch with the bytes `data`. Raises ValueError if they are cut, altered or of a newer format."""
        data = bytes(data)
        expected = lambda what, got, remedy="": wrong("Patch.frombytes", "data", what, got, remedy)
        again = "take these bytes once more from where they came"
        if len(data) < _HEADER.size:
            raise expected(f"at least {_HEADER.size} bytes", len(data), again)
        magic, digest, version, _, length, old, new = _HEADER.unpack_from(data)
        if magic != _MAGIC:
            raise expected("the bytes of a patch", f"bytes that begin with {data[:8]!r}")
        if version != _FORMAT:
            remedy = "install the version of jaxcgx here that made the patch"
            raise expected(f"a patch of format {_FORMAT}", f"one of format {version}", remedy)
        if length != len(data):
            raise expected(f"{length} bytes, as their header says", len(data), again)
        if (found := engine.digest_of(np.frombuffer(data, np.uint8)[_DIGESTED:])) != digest:
            raise expected(f"bytes with the digest {digest:016x}", f"bytes with {found:016x}", again)
        return cls(data, old, new)

    def __repr__(self) -> str:
        return f"Patch(from {self.old:016x} to {self.new:016x}, {self.nbytes} bytes)"


def checksum(tree: PyTree) -> int:
    """Returns 64 bits that tell trees apart by the dtypes, shapes and bits of their leaves.

    The leaves of `tree` are arrays of JAX or NumPy. Their names and shardings don't count.
    """
    leaves = leaves_of("patch.checksum", "tree", tree)
    return _checksum(leaves, _digests(leaves))


def encode(old: PyTree, new: PyTree) -> Patch:
    """Returns the patch that makes `new` of `old`.

    It is short if few elements have changed, or if they have changed by few units in the last place, as by a training
    step with a small learning rate in bfloat16. It is at most 0.02 % longer than the leaves of `new`, plus 22 bytes for
    each leaf and 56 bytes.

    Args:
      old: a tree of arrays of JAX or NumPy, of any dtype.
      new: a tree with the same structure, shapes and dtypes.
    """
    before, after = leaves_of("patch.encode", "old", old), leaves_of("patch.encode", "new", new)
    here, there = jax.tree.structure(old), jax.tree.structure(new)
    if here != there:
        raise wrong("patch.encode", "new", f"the structure of 'old', {here}", there)
    for (path, x), (_, y) in zip(before, after):
        if (x.dtype, x.shape) != (y.dtype, y.shape):
            raise wrong("patch.encode", "new", f"{spell_array(x)}, as in 'old'", spell_array(y), path=path)
    parts = _encode([(x, y) for (_, x), (_, y) in zip(before, after)])
    sums = _checksum(before, [part.old for part in parts]), _checksum(after, [part.new for part in parts])
    table = np.array([shape_of(x) for _, x in after], _LEAF).tobytes()
    body = [table, *(part.heads for part in parts), *(part.blocks for part in parts), _TAIL]
    length = _HEADER.size + sum(map(len, body))
    header = _HEADER.pack(*(_MAGIC, 0, _FORMAT, len(parts), length, *sums))
    return Patch(engine.seal([header, *body], _DIGESTED), *sums)


def apply(old: PyTree, patch: Patch, *, donate: bool = False) -> PyTree:
    """Returns the tree that `patch` was made for, with the same bits.

    Its leaves are like those of `old`: NumPy arrays, or JAX arrays with the same shardings.

    Args:
      old: the tree that the patch was made from. Another one is a ValueError.
      patch: a patch.
      donate: give the memory of `old` to the new tree where that is possible, after a look whether it is the right one.
        NumPy arrays are overwritten, JAX arrays are deleted.
    """
    check_type("patch.apply", "patch", patch, Patch, "what jaxcgx.patch.encode or jaxcgx.patch.Patch.frombytes returns")
    leaves = leaves_of("patch.apply", "old", old)
    heads, blocks = _parts(patch.data, leaves)
    if donate:
        _check_old(patch, leaves, _digests(leaves))
    uses = collections.Counter(_memory(x) for _, x in leaves)  # tied leaves share their memory
    made = _apply([x for _, x in leaves], heads, blocks, [donate and uses[_memory(x)] == 1 for _, x in leaves])
    if not donate:
        _check_old(patch, leaves, [digest for _, digest, _ in made])
    if (found := _checksum(leaves, [digest for *_, digest in made])) != patch.new:
        raise wrong("patch.apply", "patch", f"one that leads to the checksum {patch.new:016x}", f"{found:016x}")
    for _, x in leaves if donate else ():
        if isinstance(x, jax.Array):
            x.delete()  # also if JAX has copied it
    return jax.tree.unflatten(jax.tree.structure(old), [new for new, *_ in made])


def _digests(leaves: Sequence[tuple[KeyPath, Any]]) -> list[int]:
    at = [(x, device_of(x)) for _, x in leaves]
    return [words.digest_on(there, x) if there else engine.digest_of(_words(x)) for x, there in at]


def _encode(pairs: list[tuple[Any, Any]]) -> list[Part]:
    """Returns what a patch has of each leaf, of which `pairs` have the old and the new array."""
    at = [device_of(x, y) for x, y in pairs]
    here = [pair for pair, there in zip(pairs, at) if not there]
    found = iter(engine.encode([_words(x) for x, _ in here], [_words(y) for _, y in here]))
    return [words.encode_on(there, x, y) if there else Part(*next(found)) for (x, y), there in zip(pairs, at)]


def _apply(
    leaves: list[Any], heads: list[memoryview], blocks: list[memoryview], donate: list[bool]
) -> list[tuple[Any, int, int]]:
    """Returns (the new leaf, the digest of the old one, that of the new one) of each leaf."""
    at = [device_of(x) for x in leaves]
    here = [i for i, there in enumerate(at) if not there]
    spaces = [_space(leaves[i], donate[i]) for i in here]
    olds, news = [old for old, _, _ in spaces], [new for _, new, _ in spaces]
    digests = engine.apply([heads[i] for i in here], [blocks[i] for i in here], olds, news)
    made = [_like(leaves[i], new) if whole is None else whole for i, (_, new, whole) in zip(here, spaces)]
    found = dict(zip(here, zip(made, *digests)))
    for i, there in enumerate(at):
        if there:
            found[i] = words.apply_on(there, leaves[i], heads[i], blocks[i], donate=donate[i])
    return [found[i] for i in range(len(leaves))]


_donated: Any = jax.jit(lambda x: x, donate_argnums=0)  # the same bits, in the same memory if JAX can


def _space(x: Any, donate: bool) -> tuple[Words, Words, jax.Array | None]:
    """Returns a leaf's words, where the new words go, and the array that has these, if there is one already."""
    if donate and has_words(x) and len(x.devices()) == 1:
        whole = jax.block_until_ready(_donated(x))  # no view of x may be left, or JAX keeps its memory
        memory = (ctypes.c_uint8 * whole.nbytes).from_address(whole.unsafe_buffer_pointer())
        words = np.frombuffer(memory, f"u{shape_of(x)[1]}")
        return words, words, whole
    old = _words(x)
    return old, old if donate and old.flags.writeable else np.empty_like(old), None


def _memory(x: Any) -> int:
    """Returns where a leaf begins: arrays over several devices tell no place, but aren't overwritten."""
    if not isinstance(x, jax.Array):
        return np.asarray(x).ctypes.data
    return x.unsafe_buffer_pointer() if len(x.devices()) == 1 else id(x)


def _check_old(patch: Patch, leaves: Sequence[tuple[KeyPath, Any]], digests: list[int]) -> None:
    if (found := _checksum(leaves, digests)) != patch.old:
        remedy = "apply all patches in the order in which they were made"
        raise wrong("patch.apply", "old", f"a tree with the checksum {patch.old:016x}", f"{found:016x}", remedy)


def _parts(data: bytes, leaves: Sequence[tuple[KeyPath, Any]]) -> tuple[list[memoryview], list[memoryview]]:
    """Returns the heads of each leaf, and the blocks. Checks the leaves' sizes."""
    _, _, _, count, *_ = _HEADER.unpack_from(data)
    if count != len(leaves):
        raise wrong("patch.apply", "old", f"the {count} leaves that the patch is for", len(leaves))
    table = np.frombuffer(data, _LEAF, count, _HEADER.size).tolist()
    for (path, x), (size, width) in zip(leaves, table):
        if shape_of(x) != (size, width):
            expected = f"{size} words of {width} bytes, as the patch has for this leaf"
            raise wrong("patch.apply", "old", expected, spell_array(x), path=path)
    view, at = memoryview(data), _HEADER.size + count * _LEAF.itemsize
    heads, blocks = list[memoryview](), list[memoryview]()
    for size, _ in table:
        heads.append(view[at : (at := at + HEAD.itemsize * -(-size // BLOCK))])
    for head, (size, width) in zip(heads, table):
        used = int(block_sizes(np.frombuffer(head, HEAD), size, width).sum())
        blocks.append(view[at : (at := at + used)])
    if at + len(_TAIL) != len(data):
        raise refused()
    return heads, blocks


def leaves_of(function: str, argument: str, tree: PyTree) -> Sequence[tuple[KeyPath, Any]]:
    """Returns the paths and leaves of a tree, and checks that their bits can be read here."""
    leaves = jax.tree.flatten_with_path(tree)[0]
    for path, x in leaves:
        expected, remedy = _wanted(x)
        if expected:
            raise wrong(function, argument, expected, spell_array(x), remedy, path=path, kind=TypeError)
    return leaves


def _wanted(x: Any) -> tuple[str, str]:
    """Returns (what a leaf should be instead, the remedy), both empty if its bits can be read here."""
    if isinstance(x, Tracer):
        return "an array with values", "call it outside of jax.jit: the length of a patch depends on values"
    if not isinstance(x, jax.Array | np.ndarray | np.generic):
        return "an array of JAX or NumPy", ""
    if not isinstance(x.dtype, np.dtype):
        return "an array of numbers", "pass jax.random.key_data of a key"
    kind = x.dtype.kind in "biufcV" and not x.dtype.names and x.dtype.isnative
    if not kind or shape_of(x)[1] not in (1, 2, 4, 8):
        return "numbers of 1, 2, 4 or 8 bytes, in this machine's order, or complex numbers of two of these", ""
    if isinstance(x, jax.Array) and not (x.is_fully_addressable or x.is_fully_replicated):
        remedy = "gather it with jax.experimental.multihost_utils.process_allgather(..., tiled=True)"
        return "an array that this process has whole", remedy
    return "", ""


def _words(x: Any) -> Words:
    flat = np.ascontiguousarray(x).reshape(-1)
    return np.require(flat.view(f"u{shape_of(flat)[1]}"), requirements="A")  # aligned


def _like(leaf: Any, new: Words) -> Any:
    new = new.view(leaf.dtype).reshape(leaf.shape)
    return place(new, sharding_of(leaf)) if isinstance(leaf, jax.Array) else new


def sharding_of(x: PyTree) -> jax.sharding.Sharding | None:
    """Returns the sharding that an array was given; None: JAX chose it."""
    return x.sharding if isinstance(x, jax.ShapeDtypeStruct) or x.committed else None


def place(value: np.ndarray[Any, Any], sharding: jax.sharding.Sharding | None) -> jax.Array:
    """Returns an array of NumPy as one of JAX, of which each process needs only its part."""
    if sharding is None:
        return jnp.asarray(value)
    return jax.make_array_from_callback(value.shape, sharding, lambda at: value[at])


_name = functools.cache(str)  # of a dtype: NumPy makes it anew in every call


def _checksum(leaves: Sequence[tuple[KeyPath, Any]], digests: list[int]) -> int:
    names = "".join(f"{_name(x.dtype)}{list(x.shape)}\n" for _, x in leaves)
    state = engine.digest_of(np.frombuffer(names.encode(), np.uint8))
    for digest in digests:
        state = mix(state + digest & MASK)
    return state
