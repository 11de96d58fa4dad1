"""Golden patches, and a decoder of patches: slow, simple, and without code of the package.

`python tests/golden/patches.py` writes patch-v1.json. Run it only when the format of patches changes.
"""

import base64
import json
import math
import pathlib
import struct
import tempfile
import zlib
from unittest import mock

import ml_dtypes  # noqa: F401  (gives NumPy bfloat16)
import numpy as np

FILE = pathlib.Path(__file__).with_name("patch-v1.json")
GOLDEN = 0x9E3779B97F4A7C15
# dtype, shape, bytes of a word, share of the words that change, and of these, shares with steps of 1 and small ones
LEAVES = [
    ("bfloat16", [50, 60], 2, 0.02, 0.8, 0.1),
    ("float32", [1000], 4, 0.3, 0.5, 0.4),
    ("uint8", [3, 11000], 1, 0.004, 0.5, 0.4),
    ("complex64", [70], 4, 0.1, 0.3, 0.3),
    ("float64", [9], 8, 1, 0, 0),
    ("float64", [40], 8, 0.2, 0.3, 0.5),
    ("int16", [], 2, 1, 1, 0),
    ("float16", [0], 2, 1, 1, 0),
    ("int8", [128], 1, 0, 1, 0),
    ("bfloat16", [600], 2, 1, 1, 0),
]


def mix(x):
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
    return x ^ x >> 31


def trees():
    """Returns the old and the new leaves."""
    olds, news = [], []
    for number, (dtype, shape, width, share, ones, small) in enumerate(LEAVES):
        random = lambda what, i: mix((number * 4 + what) << 32 | i)
        old = [random(0, i) % 2 ** (8 * width) for i in range(math.prod(shape) * (1 + (dtype == "complex64")))]
        new = list(old)
        for i, word in enumerate(old):
            kind, step = random(2, i) / 2**64, random(3, i)
            size = 1 if kind < ones else 2 + step // 2 % 90 if kind < ones + small else step // 2
            if random(1, i) < share * 2**64:
                new[i] = (word + (size if step % 2 else -size)) % 2 ** (8 * width)
        for words, leaves in ((old, olds), (new, news)):
            leaves.append(np.array(words, f"u{width}").view(dtype).reshape(shape))
    return olds, news


def change(rng, old, share, kind):
    """Returns words of which a share has changed: by steps of 1, by small steps, to any words, or by all of these."""
    at = np.flatnonzero(rng.random(old.size) < share)
    new, any_words = old.copy(), rng.integers(0, 256, (at.size, old.itemsize), np.uint8).view(old.dtype).ravel()
    step = rng.integers(-1, 1, at.size) if kind == "ones" else rng.integers(-150, 150, at.size)
    new[at] = any_words if kind == "any" else old[at] + (2 * step + 1).astype(old.dtype)
    if kind == "mixed":
        new[at] = np.where(rng.random(at.size) < 0.3, any_words, new[at])
    return new


def digest(data):
    total = 0
    for group, at in enumerate(range(0, len(data), 4096)):
        words = struct.unpack("<512Q", data[at : at + 4096].ljust(4096, b"\0"))
        found = sum((x ^ x >> 32) * (mix((j + 1) * GOLDEN % 2**64) | 1) for j, x in enumerate(words))
        total += mix((found + (group + 1) * GOLDEN) % 2**64)
    return total % 2**64


def checksum(leaves):
    state = digest("".join(f"{x.dtype}{list(x.shape)}\n" for x in leaves).encode())
    for x in leaves:
        state = mix((state + digest(x.tobytes())) % 2**64)
    return state


def decode(data, olds):
    """Returns the bytes of the new leaves."""
    magic, found, version, leaves, length, before, _ = struct.unpack_from("<8sQIIQQQ", data)
    assert (magic, version, leaves, length) == (b"cgxpatch", 1, len(olds), len(data)) and found == digest(data[16:])
    assert before == checksum(olds)
    table = list(struct.iter_unpack("<2Q", data[48 : 48 + 16 * leaves]))
    at, news = 48 + 16 * leaves + 6 * sum(-(-size // 2**15) for size, _ in table), []
    heads = struct.iter_unpack("<3H", data[48 + 16 * leaves : at])

    def row(count, width):
        nonlocal at
        size = -(-count * width // 8)
        bits, at = int.from_bytes(data[at : at + size], "little"), at + size
        return [bits >> width * i & 2**width - 1 for i in range(count)]

    ones = lambda count: [i for i, bit in enumerate(row(count, 1)) if bit]
    for old, (size, width) in zip(olds, table, strict=True):
        words = old.reshape(-1).view(f"u{width}").tolist()
        for first in range(0, size, 2**15):
            n, (k, s, r) = min(2**15, size - first), next(heads)
            if k == 65535:
                words[first : first + n] = row(n, 8 * width)
                continue
            b = (n // k).bit_length() - 1 if k else 0
            if k in (0, n):
                index = range(k)
            elif -(-((n >> b) + k) // 8) + -(-k * b // 8) < -(-n // 8):
                high = ones((n >> b) + k)
                index = [(one - j << b) + low for j, (one, low) in enumerate(zip(high, row(k, b), strict=True))]
            else:
                index = ones(n)
            codes, small, raw = row(k, 2), iter(row(s, 8 * max(1, width // 2))), iter(row(r, 8 * width))
            for i, code in zip(index, codes, strict=True):
                rank = 2 + next(small) if code == 2 else code
                step = rank // 2 + 1 if rank % 2 else -(rank // 2 + 1)
                words[first + i] = next(raw) if code == 3 else (words[first + i] + step) % 2 ** (8 * width)
            assert next(small, None) is None and next(raw, None) is None
        news.append(np.array(words, f"u{width}").tobytes())
    assert data[at:] == bytes(8)
    return news


RUN, ELEMENTS, SOME = "0123456789abcdef", 1000, (0, 3, 6, 7)  # of files of versions; the leaves in them


def files(olds, news, folder):
    """Returns {name: bytes} of the versions that a publisher makes."""
    import jaxcgx as cgx
    from jaxcgx.patch import publisher as module

    with mock.patch.object(module, "PIECE", ELEMENTS), cgx.patch.Publisher(folder, anchor_every=5) as publisher:
        publisher._run = RUN
        for leaves in (olds, news):
            publisher.publish([leaves[i] for i in SOME])
    return {path.name: path.read_bytes() for path in pathlib.Path(folder).glob("*")}


def decode_version(name, data, olds):
    """Returns the bytes of the leaves of a version, from its file and the leaves of the version before."""
    check, magic, version, size = struct.unpack_from("!I4sBxxxI", data)
    assert (magic, version) == (b"cgxv", 1) and check == zlib.crc32(data[4 : 16 + size])
    found, leaves, elements, every, sizes = json.loads(data[16 : 16 + size])
    assert (found, elements, every) == (name, ELEMENTS, 5)
    if name.endswith("anchor"):
        assert leaves == [[f"[{i}]", f"{x.dtype}{list(x.shape)}"] for i, x in enumerate(olds)]
        olds = [np.zeros_like(x) for x in olds]
    at, sizes, news = 16 + size, iter(sizes), []
    for x in olds:
        flat, new = x.reshape(-1), b""
        for first in range(0, x.size, elements):
            length = next(sizes)
            new += decode(data[at : at + length], [flat[first : first + elements]])[0]
            at += length
        news.append(new)
    assert at == len(data) and next(sizes, None) is None
    return news


if __name__ == "__main__":
    import jaxcgx as cgx

    olds, news = trees()
    patches = dict(there=cgx.patch.encode(olds, news), back=cgx.patch.encode(news, olds))
    spelled = lambda data: base64.b64encode(data).decode()
    encoded = {name: spelled(patch.tobytes()) for name, patch in patches.items()}
    with tempfile.TemporaryDirectory() as folder:
        versions = {name: spelled(data) for name, data in files(olds, news, folder).items()}
    FILE.write_text(json.dumps({"format": 1} | encoded | {"versions": versions}, indent=1) + "\n")
