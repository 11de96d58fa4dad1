"""Subscriber: follows the versions of a Publisher."""

import collections
import concurrent.futures
import contextlib
import itertools
import threading
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxcgx.checks import check_integer, check_number, check_positive, spell_array, unexpected, warn, wrong
from jaxcgx.patch.carriers import Directory, Remote, as_place
from jaxcgx.patch.trees import Patch, apply, place, sharding_of
from jaxcgx.patch.versions import Array, File, Index, Refused, needed, shortest
from jaxcgx.patch.words import home_of, joined, zeros
from jaxcgx.transports.axes import MOST_CONNECTIONS
from jaxcgx.transports.sockets import Stranger, start_thread, unreached
from jaxcgx.typing import PyTree

OP = "Subscriber"
LATEST = "Subscriber.latest"
SPAN = 4 << 20  # bytes of pieces that are read together
FIRST = 64 << 10  # bytes of the first read of a file: its index in most cases, or all of it
TRIES = 2  # of a file that is corrupted, in two looks
HOLE = "a patch on the way is missing"
TICK = 0.05  # seconds between two looks of `latest` while it waits


class NeededPiece(NamedTuple):
    number: int  # in a file
    leaf: int
    start: int  # its first element in the leaf, in row-major order
    elements: Array


class Snapshot(NamedTuple):
    """A version that is complete. Its arrays never change."""

    run: str = ""  # of the publisher
    version: int = 0  # 0: none yet
    total: int = 0  # pieces of the tree
    pieces: tuple[NeededPiece, ...] = ()  # those that this process needs


class Subscriber(contextlib.AbstractContextManager["Subscriber"]):
    """Follows the versions of a `Publisher`, and fetches them in the background.

        subscriber = cgx.patch.Subscriber("trainer.example:7500", like=params, secret=secret)
        for prompts in batches:
            params = subscriber.latest()
            samples = generate(params, prompts)

    It may start late, be away and come back: it takes the shortest way from its version, or from an anchor, to the
    newest one. A version is complete before `latest` returns it, and has the publisher's bits. Memory has the weights
    twice while a patch is applied, and three times on a way of several patches: only its end is shown. This is host
    memory, or that of a GPU for the leaves of `like` whose sharding has one GPU alone.

    If the arrays of `like` are spread over several processes of jax.distributed, each has a Subscriber, and they call
    `latest` together. They get the same version.

    Args:
      where: the publisher's "host:port" or directory.
      like: a tree of arrays or of jax.ShapeDtypeStructs with the structure, shapes and dtypes of the published tree, in
        any sharding. A process fetches the pieces that its devices need. Leaves of NumPy become arrays of NumPy.
      secret: the publisher's secret.
      connections: the number of parts of a version that are fetched at a time.
      every: seconds between two looks for a new version. None: `latest` looks and fetches itself, without a thread.
      timeout: the longest time that `latest` waits, in seconds.

    Attributes:
      version: the version that `latest` has returned; 0: none yet.
    """

    def __init__(
        self,
        where: Any,
        like: PyTree,
        *,
        secret: str = "",
        connections: int = 4,
        every: float | None = 0.5,
        timeout: float = 600.0,
    ) -> None:
        leaves, self._structure = jax.tree.flatten_with_path(like)
        for path, x in leaves:
            if not (hasattr(x, "shape") and hasattr(x, "dtype")):
                expected = "arrays or jax.ShapeDtypeStructs"
                raise wrong(OP, "like", expected, repr(x), path=path, kind=TypeError)
            numbers = isinstance(x.dtype, np.dtype) and not isinstance(x, np.ndarray | np.generic)
            if numbers and jax.dtypes.canonicalize_dtype(x.dtype) != x.dtype:
                expected, remedy = "a dtype that JAX keeps here", "set jax_enable_x64, or pass arrays of NumPy"
                raise wrong(OP, "like", expected, spell_array(x), remedy, path=path)
        self._leaves = [[jax.tree_util.keystr(path), spell_array(x)] for path, x in leaves]
        self._numpy = [isinstance(x, np.ndarray | np.generic) for _, x in leaves]
        self._like = [
            jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=None if numpy else sharding_of(x))
            for (_, x), numpy in zip(leaves, self._numpy)
        ]
        self._timeout = check_number(OP, "timeout", timeout, lambda x: x >= 0, "seconds, at least 0")
        count = check_integer(OP, "connections", connections, 1, MOST_CONNECTIONS)
        self._where, found = where, as_place(OP, where, secret)
        self._source = Remote(found, secret) if isinstance(found, tuple) else Directory(found)
        self._readers = concurrent.futures.ThreadPoolExecutor(count, "jaxcgx-read")
        self._failures = collections.Counter[File]()
        self._why = HOLE  # why the newest version can't be made
        self._newest: tuple[int, str] = (0, "")  # version and run
        processes = {device.process_index for x in self._like if x.sharding for device in x.sharding.device_set}
        alone = all(x.sharding is None or x.sharding.is_fully_addressable for x in self._like)
        self._agreed: tuple[int, str] | None = None if alone else self._newest  # what all processes make; None: newest
        if not alone and len(processes) < jax.process_count():  # they wait for each other
            expected, remedy = "arrays over all processes of jax.distributed", "pass arrays of NumPy in each process"
            raise wrong(OP, "like", expected, f"those of {sorted(processes)}", remedy)
        self._changed = threading.Condition()
        self._state, self._anchor_every = Snapshot(), 0  # 0: not known yet
        self._reason, self._warned = "", ""  # why there is nothing newer
        self._problem: Exception | None = None  # if waiting doesn't help
        self.version: int = 0
        self._run, self._tree = "", None
        self._closed = threading.Event()
        self._thread = start_thread(self._follow, check_positive(OP, "every", every)) if every is not None else None

    def latest(self, version: int = 1) -> PyTree:
        """Returns the newest version that is complete: the same arrays as before if there is no newer one.

        It waits for the first version. After that it returns at once, also if the publisher is gone: then it warns.

        Args:
          version: the least version, for which it waits.
        """
        check_integer(LATEST, "version", version, 1)
        end = time.monotonic() + self._timeout
        while True:
            if not self._thread:
                self._look()
            with self._changed:
                state, reason, problem = self._state, self._reason, self._problem
            asks = self._agreed == (0, "") and self._newest[0] > 0  # only now, so that nothing is made yet
            late = time.monotonic() >= end and not asks
            if self._agreed:
                state, late, problem = self._agree(state, reason, late, problem)
            if problem:
                raise problem
            if state.version >= version and (state.version, state.run) != (self.version, self._run):
                self._tree, self.version, self._run = self._made(state), state.version, state.run
            if self.version >= version and state.run in ("", self._run):  # another run may count from 1 again
                break
            if late:
                got = f"{state.version or 'none'}: {reason}" if reason else state.version or "none"
                raise TimeoutError(f"{LATEST}: expected version {version} within {self._timeout} s, got {got}")
            with self._changed:
                self._changed.wait(TICK)
        if reason and reason != self._warned:
            warn(f"{LATEST}: this is version {self.version}: {reason}")
        self._warned = reason
        return self._tree

    def close(self) -> None:
        """Ends the thread and all connections."""
        self._closed.set()
        if isinstance(self._source, Remote):
            self._source.close()
        if self._thread:
            self._thread.join()
        self._readers.shutdown(cancel_futures=True)

    def __exit__(self, *_: object) -> None:
        self.close()

    def _made(self, state: Snapshot) -> PyTree:
        parts = {leaf: list(pieces) for leaf, pieces in itertools.groupby(state.pieces, lambda piece: piece.leaf)}
        leaves = [_leaf(x, numpy, parts.get(i, [])) for i, (x, numpy) in enumerate(zip(self._like, self._numpy))]
        return self._structure.unflatten(leaves)

    def _agree(
        self, state: Snapshot, reason: str, late: bool, problem: Exception | None
    ) -> tuple[Snapshot, bool, Exception | None]:
        """Returns these values as all processes use them: with a version that all have, or without one."""
        version, run = self._newest
        there = (state.version, state.run) == self._agreed
        row = [late, problem is not None, bool(reason), there, version, *divmod(int(run or "0", 16), 2**32)]
        rows = np.asarray(multihost_utils.process_allgather(np.array(row, np.uint32)))
        if rows[:, 1].any() and not problem:
            problem = RuntimeError(f"{LATEST}: another process can't go on; its error says why")
        if rows[:, 3].all() or rows[:, 2].any():
            version, *halves = map(int, rows[0, 4:])
            self._agreed = version, "".join(f"{half:08x}" for half in halves) if version else ""
        return state if rows[:, 3].all() else Snapshot(), bool(rows[:, 0].any()), problem

    # The thread

    def _follow(self, every: float) -> None:
        while not self._closed.is_set():
            self._look()
            self._closed.wait(min(TICK, every) if self._agreed else every)

    def _look(self) -> None:
        """Makes the newest version that can be made, and says why there is nothing newer."""
        reason, problem, failed = "", None, set[File]()
        try:
            while True:
                found = File.of(self._source.names())
                self._newest = max(((file.version, file.run) for file in found), default=(0, ""))
                version, run = self._agreed or self._newest
                failed.update(x for x in found if self._failures[x] == TRIES)
                usable = {x: size for x, size in found.items() if x.version <= version and x not in failed}
                way = shortest(usable, run, self._state.version if self._state.run == run else 0)
                if not way:
                    break
                self._take(way, failed)
                if (version, run) == (self._state.version, self._state.run):
                    break
            if not found:
                reason = f"there is no version at {self._where} yet"
            elif (version, run) != (self._state.version, self._state.run):
                every = self._anchor_every
                remedy = f"ask for version {(version // every + 1) * every}," if every else "wait for"
                reason = f"version {version} can't be made: {self._why}; {remedy} the next anchor"
            else:
                self._why = HOLE
        except OSError as error:
            reason = f"the publisher at {self._where} was {unreached(error)}"
        except Stranger as error:
            expected, remedy = f"a publisher with this secret at {self._where}", "pass its address and secret"
            problem = unexpected(LATEST, expected, f"another program: {error}", remedy, kind=RuntimeError)
        except Exception as error:  # another model, a newer format, or no memory
            problem = error
        with self._changed:
            self._reason, self._problem = reason, problem
            self._changed.notify_all()

    def _take(self, files: list[File], failed: set[File]) -> None:
        """Makes the version to which these files lead, or the last one before one that it adds to `failed`."""
        snapshot = self._state
        try:
            for file in files:
                try:
                    snapshot = self._next(snapshot, file)
                except Refused:
                    raise
                except (ValueError, FileNotFoundError) as error:
                    failed.add(file)
                    self._failures[file] += isinstance(error, ValueError)  # another look may find a file
                    self._why = f"the {'anchor' if file.anchor else 'patch'} of version {file.version}: {error}"
                    break
        finally:
            with self._changed:
                self._state, self._reason = snapshot, ""
                self._changed.notify_all()

    def _next(self, snapshot: Snapshot, file: File) -> Snapshot:
        """Returns the version that a file makes of the one before."""
        head = self._source.read(str(file), 0, FIRST)

        def read(start: int, stop: int) -> bytes | bytearray:
            if self._closed.is_set():
                raise ConnectionAbortedError("closed")
            return head[start:stop] if stop <= len(head) else self._source.read(str(file), start, stop)

        index, begin = Index.read(read, file)
        self._anchor_every = index.anchor_every
        total, pieces = self._zeros(index, file.version) if file.anchor else (snapshot.total, snapshot.pieces)
        if total != len(index.sizes):
            raise ValueError("it has other pieces than its anchor")
        ends = list(itertools.accumulate(index.sizes, initial=begin))

        def patched(group: list[NeededPiece]) -> list[NeededPiece]:
            first = ends[group[0].number]
            data = memoryview(read(first, ends[group[-1].number + 1]))
            part = lambda number: Patch.frombytes(data[ends[number] - first : ends[number + 1] - first])
            try:
                return [piece._replace(elements=apply(piece.elements, part(piece.number))) for piece in group]
            except ValueError as error:  # it speaks to callers of `apply`
                raise ValueError("a piece is corrupted") from error

        groups = _spans(pieces, ends)
        new = (self._readers.map if len(groups) > 1 else map)(patched, groups)
        return Snapshot(file.run, file.version, total, tuple(itertools.chain.from_iterable(new)))

    def _zeros(self, index: Index, version: int) -> tuple[int, Sequence[NeededPiece]]:
        """Returns (the number of pieces of a new anchor, those that this process needs, before their patches)."""
        for (path, array), (own, got) in itertools.zip_longest(index.leaves, self._leaves, fillvalue=("", "no leaf")):
            if (path, array) != (own, got):
                leaf, expected = f"{LATEST}: argument 'like', leaf {own or path}", f"{array} of leaf {path}"
                raise unexpected(leaf, f"{expected}, as version {version} has", got, "pass its model", kind=Refused)
        number, pieces, most = 0, list[NeededPiece](), index.elements
        for leaf, x in enumerate(self._like):
            for at, mine in enumerate(needed(x.shape, x.sharding, most)):
                if mine:
                    elements = zeros(min(most, x.size - at * most), x.dtype, home_of(x))
                    pieces.append(NeededPiece(number, leaf, at * most, elements))
                number += 1
        return number, pieces


def _leaf(like: jax.ShapeDtypeStruct, numpy: bool, pieces: Sequence[NeededPiece]) -> Any:
    """Returns a leaf of pieces, in memory of its own."""
    if home_of(like):
        return jax.device_put(joined([piece.elements for piece in pieces], like.shape), like.sharding)
    whole = np.empty(like.shape, like.dtype)  # pages without a needed piece take no memory
    for piece in pieces:
        whole.reshape(-1)[piece.start :][: piece.elements.size] = piece.elements
    whole.flags.writeable = not numpy  # the next call may return it again
    return whole if numpy else place(whole, like.sharding)


def _spans(pieces: Sequence[NeededPiece], ends: list[int]) -> list[list[NeededPiece]]:
    """Returns the pieces in groups that are adjacent in a file, of at most SPAN bytes or single."""
    found = list[list[NeededPiece]]()
    for piece in pieces:
        number = piece.number
        if found and number == found[-1][-1].number + 1 and ends[number + 1] - ends[found[-1][0].number] <= SPAN:
            found[-1].append(piece)
        else:
            found.append([piece])
    return found
