"""Names of what travels, for profilers, and for `explain`, which finds them in the compiled program.

A name ends in a tag, the hash of what it stands for: a thousand leaves would not fit. What tags stand for is remembered
here
for as long as the process lives, as traces are: a function that is jitted already is not traced again when it is
explained.
"""

import dataclasses
import hashlib
import re

import jax

from jaxcgx.codecs.base import Codec
from jaxcgx.codecs.spelling import spell

_TAG = re.compile(r"jaxcgx\.([\w.+-]*)\.([0-9a-f]{10})(?![\w.+-])")
_meaning = {}


@dataclasses.dataclass(frozen=True)
class Message:
    """Leaves that travel together."""

    function: str
    axes: tuple
    leaves: tuple  # their paths

    @property
    def name(self):
        more = f"+{len(self.leaves) - 1}" if len(self.leaves) > 1 else ""
        return f"{self.function}.{_plain(self.leaves[0])}{more}"


@dataclasses.dataclass(frozen=True)
class Leaf:
    """A leaf that travels as it is."""

    function: str
    axes: tuple
    path: str
    dtype: str
    bytes: int
    reason: str

    @property
    def leaves(self):
        return (self.path,)

    @property
    def name(self):
        return f"{self.function}.raw.{_plain(self.path)}"


@dataclasses.dataclass(frozen=True)
class Exchange:
    """An exchange of a message over some axes: over all of its call's, or one of several."""

    schedule: str
    codec: Codec
    saving: float  # uncompressed bytes for each byte that is sent

    @classmethod
    def of(cls, schedule, layout, part=1.0):
        """`part`: of the uncompressed bytes, what the lax namesake would send."""
        size = sum(n * dtype.itemsize for n, dtype in zip(layout.sizes, layout.dtypes))
        return cls(schedule, layout.codec, part * size / max(layout.chunks * layout.chunk_bytes, 1))

    @property
    def name(self):
        return f"{self.schedule}.{_plain(spell(self.codec))}"


def _plain(text):
    """What of a text neither XLA nor MLIR nor a profiler takes for something else."""
    return re.sub(r"\W+", "_", text, flags=re.ASCII).strip("_")[:32] or "x"


def scope(meaning):
    """A named scope for a Message, a Leaf or an Exchange."""
    tag = hashlib.blake2b(repr(meaning).encode(), digest_size=5).hexdigest()
    _meaning[tag] = meaning
    return jax.named_scope(f"jaxcgx.{meaning.name}.{tag}")


def read(text):
    """[(name, meaning)] of all scopes that a name in a program mentions. None: it was traced in another process."""
    return [(name, _meaning.get(tag)) for name, tag in dict.fromkeys(_TAG.findall(text))]
