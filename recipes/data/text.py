"""Text from any files, as bytes."""

import dataclasses
import glob
import pathlib
import pydoc_data.topics
from typing import ClassVar

import numpy as np
from checks import Wrong

from data.split import Split

HELD_OUT = 10  # one byte of so many is for the test


@dataclasses.dataclass(frozen=True)
class Windows:
    """Windows of `context` bytes, each with the bytes that follow. Training windows begin anywhere in theirs."""

    text: np.ndarray
    context: int

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.context

    def batch(self, chosen: np.ndarray, random: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
        starts = chosen * self.context
        if random is not None:
            starts = np.minimum(starts + (random[:, 0] * self.context).astype(int), len(self.text) - 1 - self.context)
        found = self.text[starts[:, None] + np.arange(self.context + 1)].astype(np.int32)
        return found[:, :-1], found[:, 1:]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Text:
    """The bytes of files.

    Args:
      files: a pattern of paths, as in a shell: "books/**/*.txt". "": the documentation that Python has of its language.
      context: the number of bytes that a model sees.
    """

    files: str
    context: int

    classes: ClassVar[int] = 256

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.context,)

    def load(self) -> tuple[Split, Split]:
        paths = sorted(glob.glob(self.files or pydoc_data.topics.__file__, recursive=True))
        content = b"".join(path.read_bytes() for path in map(pathlib.Path, paths) if path.is_file())
        if len(content) <= HELD_OUT * (self.context + 1):
            raise Wrong(
                f"config.data.files: {self.files!r} is {len(paths)} files with {len(content):,} bytes; expected more "
                f"than {HELD_OUT} times config.data.context={self.context}"
            )
        return self._splits(np.frombuffer(content, np.uint8))

    def stand_in(self) -> tuple[Split, Split]:
        # Bytes that often follow one another, so that there is something to learn.
        steps = np.random.default_rng(0).choice([1, 2, 3, 100], 2**20, p=[0.7, 0.1, 0.1, 0.1])
        return self._splits(np.cumsum(steps).astype(np.uint8))

    def _splits(self, text: np.ndarray) -> tuple[Split, Split]:
        end = len(text) - len(text) // HELD_OUT
        return Windows(text[:end], self.context), Windows(text[end:], self.context)
