"""Text from any files, as bytes or as tokens of a byte-pair encoding."""

import dataclasses
import glob
import pathlib
import pydoc_data.topics
import zlib
from collections.abc import Callable

import numpy as np
from checks import Wrong, check_least

from data import bpe
from data.content import Content
from data.split import Split

CHUNK = 1 << 20  # tokens that are read at a time for a checksum
HELD_OUT = 10  # the text has this many equal parts, and the last one is the test split


@dataclasses.dataclass(frozen=True)
class Windows:
    """Windows of `context` tokens. The label of a token is the next token.

    In training, the start of each window is moved forward by a random number of tokens, less than `context`.
    """

    read: Callable[[np.ndarray, int], np.ndarray]  # from starts and a length to tokens[starts, length]
    places: range  # of the tokens
    context: int

    def __len__(self) -> int:
        return (len(self.places) - 1) // self.context

    def checksum(self) -> int:
        found, end = 0, self.places.stop
        for start in range(self.places.start, end, CHUNK):
            found = zlib.crc32(self.read(np.array([start]), min(CHUNK, end - start)).tobytes(), found)
        return found

    def batch(self, chosen: np.ndarray, random: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
        starts = chosen * self.context
        if random is not None:
            starts = np.minimum(starts + (random[:, 0] * self.context).astype(int), len(self.places) - 1 - self.context)
        found = self.read(self.places.start + starts, self.context + 1).astype(np.int32)
        return found[:, :-1], found[:, 1:]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Text:
    """Text from files, as bytes or as tokens that are learned from the training split.

    Args:
      files: a pattern of paths, as in a shell: "books/**/*.txt". "": the documentation of the Python language, which
        comes with Python.
      context: the number of tokens that a model sees.
      tokens: the number of tokens, from 256 to 4096. 256 tokens are the bytes, the others frequent sequences of bytes.
    """

    files: str
    context: int
    tokens: int

    def __post_init__(self) -> None:
        check_least(1, context=self.context)
        bpe.check(self.tokens)

    @property
    def classes(self) -> int:
        return self.tokens

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.context,)

    def load(self) -> tuple[Split, Split]:
        paths = sorted(glob.glob(self.files or pydoc_data.topics.__file__, recursive=True))
        content = Content([path for path in map(pathlib.Path, paths) if path.is_file()])
        read, (train, test) = content.rows, _parts(len(content))
        if self.tokens > bpe.BYTES and len(content):  # where a token begins depends on all that is before it
            text = np.frombuffer(content.read(0, len(content)), np.uint8)
            pairs = bpe.learn(text[: train.stop], self.tokens)
            tokens = [bpe.encode(text[part.start : part.stop], pairs) for part in (train, test)]
            read, train = _reader(np.concatenate(tokens)), range(len(tokens[0]))
            test = range(train.stop, train.stop + len(tokens[1]))
        if len(test) <= self.context:
            raise Wrong(
                f"config.data.files: {self.files!r} is {len(paths)} files with {len(content):,} bytes; expected more, "
                f"as a {HELD_OUT}th of them is for the test and config.data.context={self.context}"
            )
        return Windows(read, train, self.context), Windows(read, test, self.context)

    def stand_in(self) -> tuple[Split, Split]:
        # The next token is often predictable, so that a model can learn something.
        steps = np.random.default_rng(0).choice([1, 2, 3, 100], 2**20, p=[0.7, 0.1, 0.1, 0.1])
        text = (np.cumsum(steps) % self.tokens).astype(np.uint16)
        train, test = _parts(len(text))
        return Windows(_reader(text), train, self.context), Windows(_reader(text), test, self.context)


def _parts(size: int) -> tuple[range, range]:
    """Returns the places of the training split and of the test split in a text of `size` bytes or tokens."""
    end = size - size // HELD_OUT
    return range(end), range(end, size)


def _reader(text: np.ndarray) -> Callable[[np.ndarray, int], np.ndarray]:
    return lambda starts, size: text[starts[:, None] + np.arange(size)]
