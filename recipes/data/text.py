"""Text from any files, as bytes or as tokens of a byte-pair encoding."""

import dataclasses
import glob
import pathlib
import pydoc_data.topics

import numpy as np
from checks import Wrong

from data import bpe
from data.split import Split

HELD_OUT = 10  # the text has this many equal parts, and the last one is the test split


@dataclasses.dataclass(frozen=True)
class Windows:
    """Windows of `context` tokens. The label of a token is the next token.

    In training, the start of each window is moved forward by a random number of tokens, less than `context`.
    """

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
        if not bpe.BYTES <= self.tokens <= bpe.MOST:
            raise ValueError(f"expected from {bpe.BYTES} to {bpe.MOST} tokens, got {self.tokens}")

    @property
    def classes(self) -> int:
        return self.tokens

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.context,)

    def load(self) -> tuple[Split, Split]:
        paths = sorted(glob.glob(self.files or pydoc_data.topics.__file__, recursive=True))
        content = b"".join(path.read_bytes() for path in map(pathlib.Path, paths) if path.is_file())
        train, test = _parts(np.frombuffer(content, np.uint8))
        if len(content):
            pairs = bpe.learn(train, self.tokens)
            train, test = bpe.encode(train, pairs), bpe.encode(test, pairs)
        if len(test) <= self.context:
            raise Wrong(
                f"config.data.files: {self.files!r} is {len(paths)} files with {len(content):,} bytes; expected more, "
                f"as a {HELD_OUT}th of them is for the test and config.data.context={self.context}"
            )
        return Windows(train, self.context), Windows(test, self.context)

    def stand_in(self) -> tuple[Split, Split]:
        # The next token is often predictable, so that a model can learn something.
        steps = np.random.default_rng(0).choice([1, 2, 3, 100], 2**20, p=[0.7, 0.1, 0.1, 0.1])
        train, test = _parts((np.cumsum(steps) % self.tokens).astype(np.uint16))
        return Windows(train, self.context), Windows(test, self.context)


def _parts(text: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    end = len(text) - len(text) // HELD_OUT
    return text[:end], text[end:]
