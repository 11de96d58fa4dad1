"""The bytes of files. A process reads only those that it asks for."""

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
        found = b""
        for i in range(int(np.searchsorted(self.ends, start, "right")) - 1, len(self.parts)):
            first, part = start + len(found) - self.ends[i], self.parts[i]
            wanted = min(size - len(found), self.ends[i + 1] - self.ends[i] - first)
            if isinstance(part, bytes):
                found += part[first : first + wanted]
                continue
            with part.open("rb") as file:
                file.seek(first)
                found += (got := file.read(wanted))
            if len(got) < wanted:
                raise Wrong(f"{part} became shorter during the training")
            if len(found) == size:
                break
        return found

    def rows(self, starts: np.ndarray, size: int) -> np.ndarray:
        """Returns the `size` bytes from each of `starts`, uint8[starts, size]."""
        return np.stack([np.frombuffer(self.read(int(start), size), np.uint8) for start in starts])
