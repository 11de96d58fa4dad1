"""Names of messages and exchanges, for profilers, and for `explain`, which finds them in the compiled program.

A name ends in a tag, a hash of its meaning, because a thousand leaves don't fit into a name. This module keeps the
meanings of tags until the process ends. JAX keeps its traces as long, and to explain what jax.jit made, it doesn't
trace the function again.
"""

import dataclasses
import hashlib
import re
from contextlib import AbstractContextManager
from typing import Any

import jax

from jaxcgx.codecs.base import Codec, spell
from jaxcgx.native.layout import Layout


@dataclasses.dataclass(frozen=True)
class MessageScope:
    """Leaves that travel together.

    Attributes:
      function: the function of jaxcgx that got the leaves.
      axes: the axes of the exchange.
      leaves: the paths of the leaves.
      bytes: the bytes of the uncompressed leaves.
    """

    function: str
    axes: tuple[Any, ...]
    leaves: tuple[str, ...]
    bytes: int = 0

    @property
    def name(self) -> str:
        first, *others = self.leaves
        more = f"+{len(others)}" if others else ""
        return f"{self.function}.{_plain(first)}{more}"


@dataclasses.dataclass(frozen=True)
class LeafScope(MessageScope):
    """A leaf that travels uncompressed, or not at all, as the only one of `leaves`.

    Attributes:
      dtype: the name of its dtype.
      reason: the reason, as text.
    """

    _: dataclasses.KW_ONLY
    dtype: str
    reason: str

    @property
    def path(self) -> str:
        """The path of the leaf."""
        return self.leaves[0]

    @property
    def name(self) -> str:
        """The name of the scope in the traced program."""
        return f"{self.function}.raw.{_plain(self.path)}"


@dataclasses.dataclass(frozen=True)
class ExchangeScope:
    """An exchange of a message over all axes of a call, or over one stage of them."""

    schedule: str
    codec: Codec
    saving: float  # uncompressed bytes per byte that is sent

    @classmethod
    def of(cls, schedule: object, layout: Layout, part: float = 1.0, sent: int | None = None) -> "ExchangeScope":
        """Returns the scope of an exchange of a layout's message.

        `part` is the fraction of the uncompressed bytes that the collective of lax with the same name would send.
        `sent` are the bytes of all chunks, or None if shorter chunks are padded.
        """
        size = sum(n * dtype.itemsize for n, dtype in zip(layout.sizes, layout.dtypes))
        name = schedule if isinstance(schedule, str) else "overlay"
        sent = layout.chunks * layout.chunk_bytes if sent is None else sent
        return cls(name, layout.codec, part * size / max(sent, 1))

    @property
    def name(self) -> str:
        return f"{self.schedule}.{_plain(spell(self.codec))}"


# The named scope of a raw leaf's exchanges over inner axes. Its exchange over the outermost axis is not in the scope.
INNER = "jaxcgx.inner"
# Names (jax.ad_checkpoint.checkpoint_name) of a leaf's sum, if the plan skips the leaf or the sum shared a collective.
SKIPPED, JOINED = "jaxcgx.skipped", "jaxcgx.joined"
Meaning = MessageScope | LeafScope | ExchangeScope
_TAG = re.compile(r"jaxcgx\.([\w.+-]*)\.([0-9a-f]{10})(?![\w.+-])")
_meaning: dict[str, Meaning] = {}  # by tag


def _plain(text: str) -> str:
    """Returns a text with underscores in place of what may have a meaning in XLA, MLIR or a profiler."""
    return re.sub(r"\W+", "_", text, flags=re.ASCII).strip("_")[:32] or "x"


def scope(meaning: Meaning) -> AbstractContextManager[Any]:
    """Returns a named scope, and keeps its meaning."""
    tag = hashlib.blake2b(repr(meaning).encode(), digest_size=5).hexdigest()
    _meaning[tag] = meaning
    return jax.named_scope(f"jaxcgx.{meaning.name}.{tag}")


def read(text: str) -> list[tuple[str, Meaning | None]]:
    """Returns [(name, meaning)] of all scopes in a text. The meaning is None if another process traced the program."""
    return [(name, _meaning.get(tag)) for name, tag in dict.fromkeys(_TAG.findall(text))]
