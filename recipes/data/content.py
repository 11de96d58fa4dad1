"""The bytes of files. A process reads only those that it asks for."""

import bisect
import hashlib
import pathlib
from collections.abc import Sequence

import numpy as np
from checks import Wrong


class Content:
    """The bytes of files, one after another. Parts that were unpacked are in memory."""

    def __init__(self, parts: Sequence[pathlib.Path | bytes]) -> None:
        self.parts = parts
        sizes = [len(part) if isinstance(part, bytes) else part.stat().st_size for part in parts]
        self.ends = [0, *np.cumsum(sizes).tolist()]  # the end of each part, after the beginning of the first one

    def __len__(self) -> int:
        return self.ends[-1]

    def read(self, start: int, size: int) -> bytes:
        """Returns the bytes from `start` to `start + size` - 1."""
        found, i = b"", bisect.bisect(self.ends, start) - 1
        while len(found) < size:
            part, first = self.parts[i], start + len(found) - self.ends[i]
            wanted = min(size - len(found), self.ends[i + 1] - self.ends[i] - first)
            if isinstance(part, bytes):
                got = part[first : first + wanted]
            else:
                with part.open("rb") as file:
                    file.seek(first)
                    got = file.read(wanted)
            if len(got) < wanted:
                raise Wrong(f"{part} became shorter during the training")
            found += got
            i += 1
        return found

    def checked(self, place: str, kind: str, expected: str) -> bytes:
        """Returns all bytes, if they have the expected sum.

        Args:
          place: the name of the file in an error.
          kind: the kind of the sum, "md5" or "sha1".
          expected: the sum.
        """
        whole = self.read(0, len(self))
        if (found := hashlib.new(kind, whole, usedforsecurity=False).hexdigest()) != expected:
            raise Wrong(
                f"config.data.folder: {place} is damaged: expected the {kind.upper()} sum {expected} of its content, "
                f"got {found}"
            )
        return whole

    def rows(self, starts: np.ndarray, size: int) -> np.ndarray:
        """Returns the `size` bytes from each of `starts`, uint8[starts, size]."""
        return np.stack([np.frombuffer(self.read(int(start), size), np.uint8) for start in starts])
