"""A stand-in for the codec of patches: the words of changed leaves."""

import json
import zlib

import jax
import numpy as np


def checksum(tree):
    found = 0
    for x in jax.tree_util.tree_leaves(tree):
        found = zlib.crc32(np.ascontiguousarray(x).tobytes(), found)
    return found


class Patch:
    def __init__(self, old, new, words):
        self.old, self.new, self.words = old, new, words

    def tobytes(self):
        head = json.dumps([self.old, self.new, [None if w is None else len(w) for w in self.words]]).encode()
        body = len(head).to_bytes(4, "big") + head + b"".join(w or b"" for w in self.words)
        return zlib.crc32(body).to_bytes(4, "big") + body

    @classmethod
    def frombytes(cls, data):
        data = bytes(data)
        if len(data) < 8 or zlib.crc32(data[4:]) != int.from_bytes(data[:4], "big"):
            raise ValueError("Patch.frombytes: corrupted")
        at = 8 + int.from_bytes(data[4:8], "big")
        old, new, sizes = json.loads(data[8:at])
        ends = np.cumsum([at, *(size or 0 for size in sizes)])
        return cls(old, new, [None if size is None else data[end : end + size] for size, end in zip(sizes, ends)])


def encode(old, new):
    pairs = zip(*map(jax.tree_util.tree_leaves, (old, new)))
    words = [None if np.asarray(x).tobytes() == np.asarray(y).tobytes() else np.asarray(y).tobytes() for x, y in pairs]
    return Patch(checksum(old), checksum(new), words)


def apply(old, patch):
    if checksum(old) != patch.old:
        raise ValueError("apply: another old tree")
    leaves, structure = jax.tree_util.tree_flatten(old)
    new = [x if w is None else np.frombuffer(w, x.dtype).reshape(x.shape) for x, w in zip(leaves, patch.words)]
    return structure.unflatten(new)
