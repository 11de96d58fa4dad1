"""A stand-in for the patches of trees: the words of all leaves."""

import dataclasses
import struct
import zlib

import jax
import numpy as np

HEAD = struct.Struct("!IQQ")


def _words(tree):
    return b"".join(np.asarray(x).tobytes() for x in jax.tree_util.tree_leaves(tree))


def checksum(tree):
    return zlib.crc32(_words(tree))


@dataclasses.dataclass
class Patch:
    old: int
    new: int
    words: bytes

    def tobytes(self):
        return HEAD.pack(zlib.crc32(self.words), self.old, self.new) + self.words

    @classmethod
    def frombytes(cls, data):
        if len(data) < HEAD.size or zlib.crc32(words := data[HEAD.size :]) != HEAD.unpack_from(data)[0]:
            raise ValueError("Patch.frombytes: corrupted")
        return cls(*HEAD.unpack_from(data)[1:], words)


def encode(old, new):
    return Patch(checksum(old), checksum(new), _words(new))


def apply(old, patch):
    if checksum(old) != patch.old or len(patch.words) != old.nbytes:
        raise ValueError("apply: another old tree")
    return np.frombuffer(patch.words, old.dtype).reshape(old.shape)
