"""Tests patches of words: golden vectors, random words of every width, blocks of every form, and altered bytes."""

import base64
import json

import numpy as np
import pytest
from golden import patches

import jaxcgx as cgx
from jaxcgx.native import registration
from jaxcgx.patch import words
from jaxcgx.patch.words import BLOCK

GOLDEN = json.loads(patches.FILE.read_text())
ENGINES = {"NumPy": words} | ({"native": registration.MODULE.patch} if registration.MODULE else {})


@pytest.fixture(params=ENGINES)
def engine(request, monkeypatch):
    monkeypatch.setattr("jaxcgx.patch.trees.engine", ENGINES[request.param])
    return ENGINES[request.param]


@pytest.mark.parametrize("name", ["there", "back"])
def test_golden(engine, name):
    before, after = patches.trees() if name == "there" else patches.trees()[::-1]
    data = base64.b64decode(GOLDEN[name])
    patch = cgx.patch.Patch.frombytes(data)
    assert cgx.patch.encode(before, after).tobytes() == data
    assert patches.decode(data, before) == [x.tobytes() for x in after] and patch.new == patches.checksum(after)
    for got, expected in zip(cgx.patch.apply(before, patch), after, strict=True):
        assert got.dtype == expected.dtype and got.shape == expected.shape and got.tobytes() == expected.tobytes()


def change(rng, old, share, kind):
    """Returns words of which a share has changed: by steps of 1, by small steps, to any words, or by all of these."""
    at = np.flatnonzero(rng.random(old.size) < share)
    new, any_words = old.copy(), rng.integers(0, 256, (at.size, old.itemsize), np.uint8).view(old.dtype).ravel()
    step = rng.integers(-1, 1, at.size) if kind == "ones" else rng.integers(-150, 150, at.size)
    new[at] = any_words if kind == "any" else old[at] + (2 * step + 1).astype(old.dtype)
    if kind == "mixed":
        new[at] = np.where(rng.random(at.size) < 0.3, any_words, new[at])
    return new


@pytest.mark.parametrize("kind", ["ones", "small", "any", "mixed"])
@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_any_words(engine, width, kind):
    rng = np.random.default_rng(width)
    sizes = [0, 1, 2, 7, 300, BLOCK, 2 * BLOCK + 13]
    for share in (0, 0.0003, 0.01, 0.2, 0.45, 0.9, 1):
        olds = [rng.integers(0, 256, n * width, np.uint8).view(f"u{width}") for n in sizes]
        news = [change(rng, old, share, kind) for old in olds]
        body, before, after = engine.encode(olds, news)
        assert body == words.encode(olds, news)[0]
        assert before == [words.digest_of(x) for x in olds] and after == [words.digest_of(x) for x in news]
        assert len(body) <= sum(x.nbytes for x in news) + 6 * sum(-(-n // BLOCK) for n in sizes) + 8
        made = [x.copy() for x in olds]
        assert engine.apply(body, made, made) == (before, after)  # in place
        for got, expected in zip(made, news):
            np.testing.assert_array_equal(got, expected)


def test_bytes_that_no_encoder_wrote(engine):
    """They are refused, or give some words: nothing else happens."""
    rng, refused = np.random.default_rng(0), 0
    olds = [rng.integers(0, 256, n * w, np.uint8).view(f"u{w}") for n, w in [(300, 2), (9, 1), (70, 4), (40, 8)]]
    whole = engine.encode(olds, [change(rng, x, 0.2, "mixed") for x in olds])[0]
    for number in range(400):
        data = bytearray(whole)
        if number % 2:
            data[24:-8] = rng.bytes(len(data) - 32)
        else:
            data[rng.integers(len(data))] ^= 1 << rng.integers(8)
        try:
            engine.apply(bytes(data), olds, [np.empty_like(x) for x in olds])
        except ValueError as error:
            assert "blocks as jaxcgx.patch.encode writes them" in str(error)
            refused += 1
    assert refused > 200
