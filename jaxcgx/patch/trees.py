"""Patches of trees: a header and a table of leaves, before what words.py makes of the leaves' words."""

import collections
import dataclasses
import functools
import struct
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import Sharding

from jaxcgx.checks import check_type, spell_array, wrong
from jaxcgx.native import registration
from jaxcgx.patch import words
from jaxcgx.patch.words import MASK, Words, mix
from jaxcgx.typing import KeyPath, PyTree

_MAGIC, _FORMAT = b"cgxpatch", 1
# Magic, digest of all bytes after it, format, number of leaves, length, checksums of the old and of the new tree.
_HEADER = struct.Struct("<8sQIIQQQ")
_DIGESTED = 16  # where the bytes begin that the digest is of
_LEAF = np.dtype([("words", "<u8"), ("bytes", "<u8")])

# The native module has the functions of words.py, too.
engine: Any = getattr(registration.MODULE, "patch", words)


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
        if (found := _digest(data)) != digest:
            raise expected(f"bytes with the digest {digest:016x}", f"bytes with {found:016x}", again)
        return cls(data, old, new)

    def __repr__(self) -> str:
        return f"Patch(from {self.old:016x} to {self.new:016x}, {self.nbytes} bytes)"


def checksum(tree: PyTree) -> int:
    """Returns 64 bits that tell trees apart by the dtypes, shapes and bits of their leaves.

    The leaves of `tree` are arrays of JAX or NumPy. Their names and shardings don't count.
    """
    leaves = _leaves("patch.checksum", "tree", tree)
    return _checksum(leaves, [engine.digest_of(_words(x)) for _, x in leaves])


def encode(old: PyTree, new: PyTree) -> Patch:
    """Returns the patch that makes `new` of `old`.

    It is short if few elements have changed, or if they have changed by few units in the last place, as by a training
    step with a small learning rate in bfloat16. It is at most 0.02 % longer than the leaves of `new`, plus 22 bytes for
    each leaf and 56 bytes.

    Args:
      old: a tree of arrays of JAX or NumPy, of any dtype.
      new: a tree with the same structure, shapes and dtypes.
    """
    before, after = _leaves("patch.encode", "old", old), _leaves("patch.encode", "new", new)
    here, there = jax.tree_util.tree_structure(old), jax.tree_util.tree_structure(new)
    if here != there:
        raise wrong("patch.encode", "new", f"the structure of 'old', {here}", there)
    for (path, x), (_, y) in zip(before, after):
        if (x.dtype, x.shape) != (y.dtype, y.shape):
            raise wrong("patch.encode", "new", f"{spell_array(x)}, as in 'old'", spell_array(y), path=path)
    olds, news = [_words(x) for _, x in before], [_words(x) for _, x in after]
    body, old_digests, new_digests = engine.encode(olds, news)
    table = np.array([(x.size, x.itemsize) for x in news], _LEAF).tobytes()
    sums = _checksum(before, old_digests), _checksum(after, new_digests)
    rest = len(news), _HEADER.size + len(table) + len(body), *sums
    header = lambda digest: _HEADER.pack(*(_MAGIC, digest, _FORMAT, *rest))
    data = b"".join([header(0), table, body])
    return Patch(header(_digest(data)) + data[_HEADER.size :], *sums)


def apply(old: PyTree, patch: Patch, *, donate: bool = False) -> PyTree:
    """Returns the tree that `patch` was made for, with the same bits.

    Its leaves are like those of `old`: NumPy arrays, or JAX arrays with the same shardings.

    Args:
      old: the tree that the patch was made from. Another one is a ValueError.
      patch: a patch.
      donate: overwrite the NumPy arrays of `old` where that is possible, after a look whether it is the right tree.
    """
    check_type("patch.apply", "patch", patch, Patch, "what jaxcgx.patch.encode or jaxcgx.patch.Patch.frombytes returns")
    leaves = _leaves("patch.apply", "old", old)
    olds = [_words(x) for _, x in leaves]
    _check_table(patch.data, leaves, olds)
    if donate:
        _check_old(patch, leaves, [engine.digest_of(x) for x in olds])
    uses = collections.Counter(x.ctypes.data for x in olds)  # tied leaves share their memory
    news = [x if donate and x.flags.writeable and uses[x.ctypes.data] == 1 else np.empty_like(x) for x in olds]
    begin = _HEADER.size + len(olds) * _LEAF.itemsize
    old_digests, new_digests = engine.apply(patch.data[begin:], olds, news)
    _check_old(patch, leaves, old_digests)
    if (found := _checksum(leaves, new_digests)) != patch.new:
        raise wrong("patch.apply", "patch", f"one that leads to the checksum {patch.new:016x}", f"{found:016x}")
    return jax.tree_util.tree_unflatten(
        jax.tree_util.tree_structure(old), [_like(x, new) for (_, x), new in zip(leaves, news)]
    )


def _check_old(patch: Patch, leaves: Sequence[tuple[KeyPath, Any]], digests: list[int]) -> None:
    if (found := _checksum(leaves, digests)) != patch.old:
        remedy = "apply all patches in the order in which they were made"
        raise wrong("patch.apply", "old", f"a tree with the checksum {patch.old:016x}", f"{found:016x}", remedy)


def _check_table(data: bytes, leaves: Sequence[tuple[KeyPath, Any]], olds: list[Words]) -> None:
    _, _, _, count, *_ = _HEADER.unpack_from(data)
    if count != len(olds):
        raise wrong("patch.apply", "old", f"the {count} leaves that the patch is for", len(olds))
    table = np.frombuffer(data, _LEAF, count, _HEADER.size)
    for (path, x), own, (size, width) in zip(leaves, olds, table.tolist()):
        if (own.size, own.itemsize) != (size, width):
            expected = f"{size} words of {width} bytes, as the patch has for this leaf"
            raise wrong("patch.apply", "old", expected, spell_array(x), path=path)


def _leaves(function: str, argument: str, tree: PyTree) -> Sequence[tuple[KeyPath, Any]]:
    """Returns the paths and leaves of a tree, and checks that their bits can be read here."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    for path, x in leaves:
        expected, remedy = wanted(x)
        if expected:
            raise wrong(function, argument, expected, spell_array(x), remedy, path=path, kind=TypeError)
    return leaves


def wanted(x: Any) -> tuple[str, str]:
    """Returns (what a leaf should be instead, the remedy), both empty if its bits can be read here."""
    if isinstance(x, Tracer):
        return "an array with values", "call it outside of jax.jit: the length of a patch depends on values"
    if not isinstance(x, jax.Array | np.ndarray | np.generic):
        return "an array of JAX or NumPy", ""
    if not isinstance(x.dtype, np.dtype):
        return "an array of numbers", "pass jax.random.key_data of a key"
    kind = x.dtype.kind in "biufcV" and not x.dtype.names and x.dtype.isnative
    if not kind or _width(x.dtype) not in (1, 2, 4, 8):
        return "numbers of 1, 2, 4 or 8 bytes, in this machine's order, or complex numbers of two of these", ""
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        return "an array whose shards are all in this process", "gather it, or pass the shards of this process"
    return "", ""


def _width(dtype: np.dtype[Any]) -> int:
    """Returns the bytes of a word: a complex number is two words."""
    return dtype.itemsize // 2 if dtype.kind == "c" else dtype.itemsize


def _words(x: Any) -> Words:
    flat = np.ascontiguousarray(x).reshape(-1)
    return np.require(flat.view(f"u{_width(flat.dtype)}"), requirements="A")  # aligned


def _like(leaf: Any, new: Words) -> Any:
    """Returns words as an array like a leaf."""
    new = new.view(leaf.dtype).reshape(leaf.shape)
    return place(new, sharding_of(leaf)) if isinstance(leaf, jax.Array) else new


def sharding_of(x: PyTree) -> Sharding | None:
    """Returns the sharding that an array was given; None: JAX chose it."""
    return x.sharding if isinstance(x, jax.ShapeDtypeStruct) or x.committed else None


def place(value: np.ndarray[Any, Any], sharding: Sharding | None) -> jax.Array:
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


def _digest(data: bytes) -> int:
    return engine.digest_of(np.frombuffer(data, np.uint8)[_DIGESTED:])
