"""Questions whose answers are parts of a text: SQuAD, or words that sentences of Python's documentation lack."""

import dataclasses
import itertools
import json
import pathlib
import pydoc_data.topics
import re
import zlib

import numpy as np
from checks import Wrong, check_least

from data import bpe
from data.split import Split

QUESTION, TEXT, PADDING = range(3)  # the kinds of tokens
FILES = "train-v1.1.json", "dev-v1.1.json"
NEAR = 2  # words of a question on each side of the missing one

Asked = tuple[bytes, bytes, int, int]  # a question, a text, and the places in the text where the answer begins and ends


@dataclasses.dataclass(frozen=True)
class Questions:
    """Examples. A label has the places of the first and of the last token of an answer."""

    inputs: np.ndarray  # uint16[examples, length, 2]: tokens and their kinds
    ends: np.ndarray  # int32[examples, 2]

    def __len__(self) -> int:
        return len(self.ends)

    def checksum(self) -> int:
        return zlib.crc32(self.ends.tobytes(), zlib.crc32(self.inputs.tobytes()))

    def batch(self, chosen: np.ndarray, random: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
        return self.inputs[chosen].astype(np.int32), self.ends[chosen]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Squad:
    """Questions and texts, as tokens that are learned from the training texts.

    Args:
      folder: a folder with SQuAD 1.1's two files. "": questions from the documentation of the Python language, which
        comes with Python: the words around a missing one, which is to be found in the paragraph.
      length: the tokens of a question and its text together. Longer texts are cut off at the end, and questions whose
        answers are cut off are left out.
      tokens: the number of tokens, from 256 to 4096. 256 tokens are the bytes, the others frequent sequences of bytes.
    """

    folder: str
    length: int
    tokens: int

    def __post_init__(self) -> None:
        check_least(8, length=self.length)
        bpe.check(self.tokens)

    @property
    def classes(self) -> int:
        return self.tokens

    @property
    def shape(self) -> tuple[int, ...]:
        return self.length, 2

    def load(self) -> tuple[Split, Split]:
        if self.folder:
            train, test = (read(pathlib.Path(self.folder) / name) for name in FILES)
        else:
            train, test = missing_words(2 * self.length)
        texts = list(dict.fromkeys(text for _, text, _, _ in train))
        pairs = bpe.learn(np.frombuffer(b"".join(texts), np.uint8), self.tokens)
        return self._questions(train, pairs), self._questions(test, pairs)

    def stand_in(self) -> tuple[Split, Split]:
        # The answer is the token behind the one that is asked for, so that a model can learn something.
        rng = np.random.default_rng(0)
        inputs = np.zeros((2**11, self.length, 2), np.uint16)
        inputs[..., 0] = rng.integers(2, self.tokens, inputs.shape[:2])
        inputs[:, 1:, 1] = TEXT
        places = rng.integers(2, self.length - 1, len(inputs))
        inputs[:, 0, 0] = inputs[np.arange(len(inputs)), places - 1, 0] = 1
        ends = np.stack([places, places], 1).astype(np.int32)
        return Questions(inputs[256:], ends[256:]), Questions(inputs[:256], ends[:256])

    def _questions(self, asked: list[Asked], pairs: list[tuple[int, int]]) -> Questions:
        # All texts are encoded at once. The byte between them is in no pair, as no text has it.
        texts = dict.fromkeys(text for question, text, _, _ in asked for text in (question, text))
        tokens = bpe.encode(np.frombuffer(b"\0".join(texts), np.uint8), pairs)
        parts = dict(zip(texts, np.split(tokens, np.flatnonzero(tokens == 0))))
        parts = {text: part[part > 0] for text, part in parts.items()}
        sizes = [1] * bpe.BYTES  # of the tokens, in bytes
        for first, second in pairs:
            sizes.append(sizes[first] + sizes[second])
        inputs, ends = [], []
        for question, text, begin, end in asked:
            head, body = parts[question], parts[text]
            behind = np.cumsum(np.take(sizes, body))
            first, last = np.searchsorted(behind, [begin, end - 1], "right") + len(head)
            if last < self.length:
                row = np.full((self.length, 2), (0, PADDING), np.uint16)
                whole = np.concatenate([head, body])[: self.length]
                row[: len(whole), 0], row[: len(head), 1], row[len(head) : len(whole), 1] = whole, QUESTION, TEXT
                inputs.append(row)
                ends.append((first, last))
        return Questions(np.array(inputs), np.array(ends, np.int32))


def read(path: pathlib.Path) -> list[Asked]:
    """Returns the questions in a file of SQuAD 1.1, each with its first answer."""
    if not path.is_file():
        raise Wrong(
            f"config.data.folder: there is no {path}: curl --create-dirs -o {path} "
            f"https://rajpurkar.github.io/SQuAD-explorer/dataset/{path.name}"
        )
    found = []
    for paragraph in itertools.chain.from_iterable(each["paragraphs"] for each in json.loads(path.read_text())["data"]):
        text = paragraph["context"]
        for each in paragraph["qas"]:
            answer = each["answers"][0]
            begin = len(text[: answer["answer_start"]].encode())
            end = begin + len(answer["text"].encode())
            found.append((each["question"].encode(), text.encode(), begin, end))
    return found


def missing_words(paragraph_bytes: int) -> tuple[list[Asked], list[Asked]]:
    """Returns questions for training and for the test: the words around "?", which is in place of a word.

    The texts are paragraphs of at least so many bytes.
    """
    found: list[list[Asked]] = []  # of each topic
    for _, topic in sorted(pydoc_data.topics.topics.items()):
        found.append([])
        paragraph = b""
        for part in topic.split("\n\n"):
            paragraph += b" " * bool(paragraph) + " ".join(part.split()).encode()
            if len(paragraph) < paragraph_bytes:
                continue
            for sentence in re.finditer(rb"[^.]{40,200}\.", paragraph):
                for word in re.finditer(rb"[A-Za-z_]{3,}", sentence[0]):
                    before, behind = sentence[0][: word.start()].split(), sentence[0][word.end() :].split()
                    question = b" ".join([*before[-NEAR:], b"?", *behind[:NEAR]])
                    begin, end = (sentence.start() + place for place in word.span())
                    found[-1].append((question, paragraph, begin, end))
            paragraph = b""
    held_out = found[::10]
    return [asked for i, each in enumerate(found) if i % 10 for asked in each], list(itertools.chain(*held_out))
