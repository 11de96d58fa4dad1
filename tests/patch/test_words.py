"""Tests patches of words: golden vectors, random words of every width, blocks of every form, and altered bytes.

The kernels and jnp make the same bytes, refuse the same ones, and make the same words of the others.
"""

import base64
import json

import numpy as np
import pytest
from golden import patches

import jaxcgx as cgx
from jaxcgx.native import registration
from jaxcgx.patch import trees, words
from jaxcgx.patch.words import BLOCK

GOLDEN = json.loads(patches.FILE.read_text())
KERNELS = ["portable", "avx2", "avx512"] if registration.MODULE else []
LONG = 2 * BLOCK + 13


@pytest.fixture(params=["jnp", *KERNELS])
def engine(request, monkeypatch):
    native = registration.MODULE
    if request.param == "jnp":
        monkeypatch.setattr(trees, "engine", words)
        yield words
        return
    best = native.build_info()["kernels"]
    try:
        native.select_kernels(request.param)
    except ValueError:
        pytest.skip(f"this processor does not run {request.param} kernels")
    yield native.patch
    native.select_kernels(best)


@pytest.mark.parametrize("name", ["there", "back"])
def test_golden(engine, name):
    before, after = patches.trees() if name == "there" else patches.trees()[::-1]
    data = base64.b64decode(GOLDEN[name])
    patch = cgx.patch.Patch.frombytes(data)
    assert cgx.patch.encode(before, after).tobytes() == data
    assert patches.decode(data, before) == [x.tobytes() for x in after] and patch.new == patches.checksum(after)
    for got, expected in zip(cgx.patch.apply(before, patch), after, strict=True):
        assert got.dtype == expected.dtype and got.shape == expected.shape and got.tobytes() == expected.tobytes()


@pytest.mark.parametrize("kind", ["ones", "small", "any", "mixed"])
@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_any_words(engine, width, kind):
    rng = np.random.default_rng(width)
    for share in (0, 0.0003, 0.01, 0.2, 0.45, 0.9, 1):
        # jnp compiles a program for each length, and takes long for long ones.
        in_jnp = (0, 300, LONG) if kind == "mixed" and share in (0.01, 0.9) else (0, 300)
        lengths = in_jnp if engine is words else (0, 1, 2, 7, 300, BLOCK, LONG)
        olds = [rng.integers(0, 256, n * width, np.uint8).view(f"u{width}") for n in lengths]
        news = [patches.change(rng, old, share, kind) for old in olds]
        parts = [words.Part(*part) for part in engine.encode(olds, news)]
        compared = [i for i, n in enumerate(lengths) if n in in_jnp and engine is not words]
        reference = words.encode([olds[i] for i in compared], [news[i] for i in compared])
        assert [parts[i] for i in compared] == reference
        digests = [words.digest_of(x) for x in olds], [words.digest_of(x) for x in news]
        assert digests == ([part.old for part in parts], [part.new for part in parts])
        for part, new in zip(parts, news):
            assert len(part.blocks) <= new.nbytes and len(part.heads) == 6 * -(-new.size // BLOCK)
            sizes = words.block_sizes(np.frombuffer(part.heads, words.HEAD), new.size, width)
            assert sizes.sum() == len(part.blocks)
        made = [x.copy() for x in olds]
        heads, blocks = [part.heads for part in parts], [part.blocks for part in parts]
        assert engine.apply(heads, blocks, made, made) == ([0] * len(olds), digests[1])  # in place
        for got, expected in zip(made, news):
            np.testing.assert_array_equal(got, expected)


def applied(engine, parts, olds):
    """Returns the new words, or None if the bytes are refused."""
    news = [np.empty_like(x) for x in olds]
    try:
        engine.apply(parts[::2], parts[1::2], olds, news)
    except ValueError as error:
        assert "blocks as jaxcgx.patch.encode writes them" in str(error)
        return None
    return [x.tobytes() for x in news]


def test_bytes_that_no_encoder_wrote(engine):
    """They are refused, or give some words: nothing else happens."""
    rng, refused = np.random.default_rng(0), 0
    olds = [rng.integers(0, 256, n * w, np.uint8).view(f"u{w}") for n, w in [(300, 2), (9, 1), (70, 4), (40, 8)]]
    whole = [words.Part(*x) for x in engine.encode(olds, [patches.change(rng, x, 0.2, "mixed") for x in olds])]
    for number in range(400):
        parts = [bytearray(x) for part in whole for x in (part.heads, part.blocks)]
        if number % 2:
            parts[1::2] = [bytearray(rng.bytes(len(x))) for x in parts[1::2]]
        else:
            data = parts[rng.integers(len(parts))]
            data[rng.integers(len(data))] ^= 1 << rng.integers(8)
        made = applied(engine, parts, olds)
        refused += made is None
        if engine is not words and number < 100:
            assert made == applied(words, parts, olds)
    assert refused > 200
