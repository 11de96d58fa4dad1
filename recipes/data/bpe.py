"""A small byte-pair encoding: the tokens are bytes and frequent pairs of tokens."""

import numpy as np

BYTES = 256
MOST = 4096  # tokens: learning needs memory for a count of each pair of tokens
LEARNED = 2**22  # pairs are learned from this many bytes


def check(tokens: int) -> None:
    """Raises a ValueError if there can't be so many tokens."""
    if not BYTES <= tokens <= MOST:
        raise ValueError(f"expected from {BYTES} to {MOST} tokens, got {tokens}")


def learn(text: np.ndarray, tokens: int) -> list[tuple[int, int]]:
    """Returns the pairs that become tokens 256, 257 and so on.

    Args:
      text: uint8[n]. Only its first 4 MiB are used.
      tokens: the number of tokens, with the 256 bytes. There are fewer tokens if no pair is left that occurs twice.
    """
    text, pairs = text[:LEARNED].astype(np.int32), []
    for token in range(BYTES, tokens):
        counts = np.bincount(text[:-1] * token + text[1:])
        first = int(counts.argmax())
        if counts[first] < 2:
            break
        pairs.append(divmod(first, token))
        text = _merge(text, pairs[-1], token)
    return pairs


def encode(text: np.ndarray, pairs: list[tuple[int, int]]) -> np.ndarray:
    """Returns the tokens, uint16[m], of a text, uint8[n]."""
    text = text.astype(np.uint16)
    for i, pair in enumerate(pairs):
        text = _merge(text, pair, BYTES + i)
    return text


def _merge(text: np.ndarray, pair: tuple[int, int], token: int) -> np.ndarray:
    """Returns the text with a token in place of each occurrence of a pair, from left to right."""
    found = (text[:-1] == pair[0]) & (text[1:] == pair[1])
    places = np.flatnonzero(found)
    if pair[0] == pair[1] and len(places):  # "aaa" has the pair "aa" only once: keep every other place of a run
        begins = np.maximum.accumulate(np.where(np.diff(places, prepend=-2) > 1, np.arange(len(places)), 0))
        places = places[(np.arange(len(places)) - begins) % 2 == 0]
    text = text.copy()
    text[places] = token
    return np.delete(text, places + 1)
