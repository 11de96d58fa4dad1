"""The files of versions: their names, what is in them, and the shortest way to the newest one.

An anchor has a whole tree. A patch leads from one version to the next. Leaves are cut into pieces of a fixed number of
elements, and each piece has a patch of its own, so that a reader can fetch the pieces that it needs. The pieces of an
anchor are patches of zeros. A file begins with an index, which has the sizes of all pieces.
"""

import json
import math
import re
import struct
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple, Self, TypeAlias

import jax
import numpy as np

from jaxcgx.checks import unexpected

CHECK = struct.Struct("!I")  # CRC-32 of what follows, up to the end of the index
HEAD = struct.Struct("!4sBxxxI")  # magic, format, bytes of the index
MAGIC, FORMAT = b"cgxv", 1
NAME = re.compile(r"(\d{12})-([0-9a-f]{16})\.(anchor|patch)")

Array: TypeAlias = np.ndarray[Any, Any] | jax.Array


class Refused(ValueError):
    """Raised for files that a subscriber can't use, now or later."""


class File(NamedTuple):
    """What the name of a file says."""

    version: int
    run: str  # of the publisher, 16 hex digits: another one after each start
    anchor: bool

    @classmethod
    def of(cls, names: dict[str, int]) -> dict[Self, int]:
        """Returns {file: bytes} of {name: bytes}. Names that aren't those of versions don't count."""
        found = [(NAME.fullmatch(name), size) for name, size in names.items()]
        return {cls(int(name[1]), name[2], name[3] == "anchor"): size for name, size in found if name}

    def __str__(self) -> str:
        return f"{self.version:012}-{self.run}.{'anchor' if self.anchor else 'patch'}"


def shortest(sizes: dict[File, int], run: str, at: int) -> list[File]:
    """Returns the files of a run that lead from version `at` to the newest possible one, with the fewest bytes."""
    # `at` is 0 for a reader without a version.
    ways: dict[int, tuple[int, list[File]]] = {at: (0, [])}  # by version
    for version in sorted({file.version for file in sizes if file.run == run and file.version > at}):
        anchor, patch = File(version, run, True), File(version, run, False)
        options = [(sizes[anchor], [anchor])] if anchor in sizes else []
        if patch in sizes and version - 1 in ways:
            size, files = ways[version - 1]
            options.append((size + sizes[patch], [*files, patch]))
        if options:
            ways[version] = min(options)
    return ways[max(ways)][1]


class Index(NamedTuple):
    name: str  # of the file
    leaves: list[list[str]]  # path, dtype and shape of each leaf; only in anchors
    elements: int  # of a piece
    anchor_every: int
    sizes: list[int]  # bytes of each piece

    def pack(self) -> bytes:
        text = json.dumps(self).encode()
        text = HEAD.pack(MAGIC, FORMAT, len(text)) + text
        return CHECK.pack(zlib.crc32(text)) + text

    @classmethod
    def read(cls, read: Callable[[int, int], bytes | bytearray], file: File) -> tuple[Self, int]:
        """Returns (the index of a file, where its pieces begin). `read(start, stop)` reads the file."""
        begin = CHECK.size + HEAD.size
        data = read(0, begin)
        if len(data) < begin or data[CHECK.size :][: len(MAGIC)] != MAGIC:
            raise ValueError("it doesn't begin as a version")
        _, version, size = HEAD.unpack_from(data, CHECK.size)
        start = begin + size
        data = read(0, start)
        if CHECK.pack(zlib.crc32(data[CHECK.size :])) != data[: CHECK.size]:
            raise ValueError("its index is corrupted")
        if version != FORMAT:
            expected = f"version {file.version} in format {FORMAT}"
            remedy = "install the publisher's version of jaxcgx"
            raise unexpected("Subscriber.latest", expected, f"format {version}", remedy, kind=Refused)
        try:
            index = cls(*json.loads(data[begin:]))
            if min(index.elements - 1, index.anchor_every - 1, *index.sizes) < 0:
                raise ValueError
        except (TypeError, ValueError):
            raise ValueError("its index is malformed") from None
        if index.name != str(file):
            raise ValueError("it is that of another version")
        return index, start


def needed(shape: tuple[int, ...], sharding: jax.sharding.Sharding | None, elements: int) -> np.ndarray[Any, Any]:
    """Returns bool[pieces of a leaf]: whether a device of this process has elements of the piece."""
    pieces = -(-math.prod(shape) // elements)
    if sharding is None or not shape:
        return np.ones(pieces, bool)
    marks = np.zeros(pieces + 1, np.int64)  # +1 where a row of needed pieces begins, -1 behind its end
    indices = sharding.addressable_devices_indices_map(shape).values()
    for parts in {tuple(range(*each.indices(size)) for each, size in zip(at or (), shape)) for at in indices}:
        last = len(shape) - 1  # the last axis of which the device has not all
        while last and len(parts[last]) == shape[last]:
            last -= 1
        rows = [part if axis < last else part[:1] for axis, part in enumerate(parts)]
        starts = np.ravel_multi_index(np.ix_(*rows), shape).reshape(-1)
        ends = starts + math.prod(map(len, parts[last:])) - 1
        np.add.at(marks, starts // elements, 1)
        np.add.at(marks, ends // elements + 1, -1)
    return np.cumsum(marks[:-1]) > 0
