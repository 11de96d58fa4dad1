"""Publisher: gives the versions of a tree to subscribers, as patches."""

import contextlib
import secrets
import threading
from typing import Any

import jax
import numpy as np

from jaxcgx.checks import check_integer, spell_array, unexpected, wrong
from jaxcgx.patch.carriers import UNFINISHED, Directory, Server, as_place
from jaxcgx.patch.trees import encode, leaves_of
from jaxcgx.patch.versions import Array, File, Index
from jaxcgx.patch.words import device_of, home_of, pieces_of, zeros
from jaxcgx.transports.axes import as_pace
from jaxcgx.typing import PyTree

OP = "Publisher"
PIECE = 1 << 22  # the elements of a leaf that are encoded together


class Publisher(contextlib.AbstractContextManager["Publisher"]):
    """Publishes versions of a tree, such as parameters after a training step, bit for bit.

        publisher = cgx.patch.Publisher("0.0.0.0:7500", secret=secret)
        for batch in batches:
            state, metrics = train.step(state, batch)
            publisher.publish(state.params)

    A version is a patch of the version before it. Every `anchor_every` versions there is also an anchor, the whole
    tree, for subscribers that start or come late. The publisher doesn't wait for subscribers, and they may come and go.
    It keeps the last version: on its device a leaf that one GPU has whole, other leaves in host memory.

    Args:
      where: "host:port", the address at which it listens; or a directory, such as the mount of a bucket. At an address,
        versions are kept in host memory.
      anchor_every: the number of versions from one anchor to the next.
      keep: a subscriber that is at most this many versions late finds all patches. A later one starts from an anchor.
      secret: a secret that subscribers must know, at an address. Nothing is encrypted.
      pace: the most bytes per second to all subscribers together, or a rate such as "100mbit", at an address.

    Attributes:
      version: the number of the last version. The first is 1. In a directory, the count goes on after a restart.
    """

    def __init__(
        self, where: Any, *, anchor_every: int = 100, keep: int = 100, secret: str = "", pace: float | str | None = None
    ) -> None:
        self._every = check_integer(OP, "anchor_every", anchor_every, 1)
        self._keep = check_integer(OP, "keep", keep, 1)
        place, self._server = as_place(OP, where, secret, pace), None
        if isinstance(place, tuple):
            try:
                self._server = Server(place, secret, as_pace(OP, "pace", pace))
            except OSError as error:
                expected, remedy = "an address of this machine, with a free port", "end the program that has the port"
                raise wrong(OP, "where", expected, f"{where!r}: {error}", remedy, kind=OSError) from None
        self._store = self._server or Directory(where)
        self._lock, self._closed = threading.Lock(), False
        self._run = secrets.token_hex(8)
        self._leaves: list[list[str]] = []  # of the last version
        self._old: list[Array] = []  # the pieces of the last version; none: the next is an anchor
        self.version: int = max((file.version for file in File.of(self._store.names())), default=0)

    def publish(self, tree: PyTree) -> int:
        """Publishes the next version of a tree. Returns its number, when subscribers can fetch it.

        Args:
          tree: a tree of arrays of JAX or NumPy. All versions have the same structure, shapes and dtypes.
        """
        op = f"{OP}.publish"
        found = leaves_of(op, "tree", tree)
        leaves = [[jax.tree_util.keystr(tuple(path)), spell_array(x)] for path, x in found]
        with self._lock:
            if self._closed:
                raise unexpected(op, "a publisher that is open", "one after 'close'", kind=RuntimeError)
            if self._old and leaves != self._leaves:
                expected, got = (", ".join(map(" ".join, each)) for each in (self._leaves, leaves))
                raise wrong(op, "tree", f"that of version {self.version}, {expected}", got, "make another Publisher")
            if newer := [file.version for file in File.of(self._store.names()) if file.version > self.version]:
                got, remedy = f"version {max(newer)} of another one", "give each Publisher its own"
                raise unexpected(op, "one publisher in this directory", got, remedy, kind=RuntimeError)
            self.version += 1
            self._leaves = leaves
            try:
                self._write([piece for _, x in found for piece in _pieces(x)])
            except BaseException:  # a part may have been seen, so that no patch may lead on from it
                self._run, self._old = secrets.token_hex(8), []
                raise
            finally:
                with contextlib.suppress(OSError):  # the next call tries it again
                    self._prune()
            return self.version

    def close(self) -> None:
        """Ends all connections and frees the address. Files in a directory stay."""
        self._closed = True
        if self._server:
            self._server.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _write(self, new: list[Array]) -> None:
        due = not self._old or self.version % self._every == 0
        # The patch comes first, so that nobody who could follow fetches the anchor.
        for anchor in [False] * bool(self._old) + [True] * due:
            name = str(File(self.version, self._run, anchor))
            olds = (zeros(x.size, x.dtype, device_of(x)) for x in new) if anchor else self._old
            bodies = [encode(old, x).tobytes() for old, x in zip(olds, new)]
            index = Index(name, self._leaves if anchor else [], PIECE, self._every, sizes=[*map(len, bodies)])
            self._store.write(name, [index.pack(), *bodies])
        self._old = new

    def _prune(self) -> None:
        """Removes the versions before the last anchor that is at least `keep` versions old."""
        names = self._store.names()
        last = self.version - self._keep
        oldest = max((x.version for x in File.of(names) if x.anchor and x.version <= last), default=0)
        for name, size in names.items():
            for file in File.of({name.removesuffix(UNFINISHED): size}):
                if file.version < oldest:
                    self._store.remove(name)


def _pieces(x: Any) -> list[Array]:
    """Returns copies of a leaf's pieces, because steps may donate it and programs may change it."""
    x = x.addressable_data(0) if isinstance(x, jax.Array) and x.is_fully_replicated else x
    if home_of(x):
        return pieces_of(x, PIECE)
    whole = np.array(x, order="C").reshape(-1)
    return [whole[at : at + PIECE] for at in range(0, whole.size, PIECE)]
