"""The connections of a decoupled center to the other centers: handshakes, frames, heartbeats and reconnects.

A center listens at its address. It calls the centers with lower places, and calls them again whenever a connection
fails or ends. Both ends of a connection prove that they know the secret, by an HMAC of both hellos. Then they exchange
their terms: the options and leaves that must be the same in all centers. After that they send frames, each with a
header and a body. The size of a body is checked before it is read. Nothing is unpickled. All of this runs in separate
threads.
"""

import contextlib
import enum
import json
import queue
import socket
import struct
import threading
import time
from collections.abc import Callable, Container, Mapping
from typing import Any, NamedTuple

from jaxcgx.transports.sockets import AGAIN, PIECE, SILENCE, Listener, Stranger, Wire, read, start_thread, unreached

HEADER = struct.Struct("!4sB3xQQQQ")  # magic, kind, round, merged, digest, bytes of the body
MAGIC = b"cgx\x03"  # the version of this protocol
MOST = 64 << 20  # the most bytes of terms
LOOK = 1.0  # the most seconds of a look at the addresses of missing centers
WAITING = 16  # the most frames in the queue to a center


class Version(NamedTuple):
    """The version of a center's outer parameters."""

    round: int = 0  # the number of rounds that they have been through
    merged: int = 0  # the number of contributions in these rounds
    digest: int = 0  # of the bits of the parameters and of the outer optimizer's state


class FrameKind(enum.IntEnum):
    """The kinds of frames. The comments say what their bodies have."""

    BEAT = 0  # nothing: the sender is alive
    CONTRIBUTION = 1  # a weight and the bytes of an outer gradient
    DECISION = 2  # places and checksums
    FETCH = 3  # nothing: the sender asks for a STATE
    STATE = 4  # the last outer gradient of each center in it, outer parameters and the outer optimizer's state
    PATCHES = 5  # the same as patches of the state that the center which has asked has


class Frame(NamedTuple):
    """A message from one center to another."""

    kind: FrameKind
    version: Version  # of the sender's state, or of the state that the body belongs to
    body: Any = b""


class Terms(NamedTuple):
    """The options and leaves that must be the same in all centers."""

    options: dict[str, str]
    leaves: dict[str, str]  # by name

    def difference(self, theirs: "Terms") -> tuple[str, str, str, str] | None:
        """Returns the first difference, (argument, leaf or "", own value, other value), or None."""
        for where, mine, other in ("leaves", self.leaves, theirs.leaves), ("", self.options, theirs.options):
            for name in {**mine, **other}:
                if (one := mine.get(name, "none")) != (two := other.get(name, "none")):
                    return ("params", name, one, two) if where else (name, "", one, two)
        return None


class Events(NamedTuple):
    """The callbacks of `Peers`, which it calls in its threads. The first argument is the place of a center."""

    beat: Callable[[], Frame]  # returns a BEAT frame; without an argument
    came: Callable[[int], None]  # after a center has connected
    got: Callable[[int, Frame], None]  # after a center has sent a frame
    left: Callable[[int], None]  # after a center has gone
    differs: Callable[[int, tuple[str, str, str, str]], None]  # after a center has shown other terms


class Peers:
    """The connections to other centers."""

    # `place` is the index of this center in `addresses`, the (host, port) of all centers. `sizes` are the sizes that
    # the body of each kind of frame may have.
    def __init__(
        self,
        place: int,
        addresses: list[tuple[str, int]],
        secret: str,
        *,
        terms: Terms,
        sizes: Mapping[FrameKind, Container[int]],
        events: Events,
    ) -> None:
        self._place, self._addresses, self._terms = place, addresses, terms
        self._wire = Wire(MAGIC, secret, "the program there is no center, or has another version of jaxcgx")
        self._sizes, self._events = sizes, events
        self._links: dict[int, _Link] = {}
        self._why: dict[int, str] = {}  # by place: why the last try to connect failed
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._listener = Listener(addresses[place], lambda sock: self._meet(sock, None), self._serve)

    def start(self) -> None:
        """Starts the threads that listen for and call other centers."""
        self._listener.start()
        for place in range(self._place):
            start_thread(self._call, place)

    def why_missing(self, places: list[int]) -> dict[int, str]:
        """Returns for each of these places of centers that aren't connected the reason."""
        # Centers with higher places call this one, so it has not looked at their addresses yet.
        unknown = [place for place in places if place > self._place and place not in self._why]
        looks, end = [start_thread(self._look, place) for place in unknown], time.monotonic() + LOOK
        for look in looks:
            look.join(max(end - time.monotonic(), 0))
        return {place: self._why.get(place, "not reached") for place in places}

    def send(self, place: int, frame: Frame) -> None:
        with self._lock:
            link = self._links.get(place)
        if link:
            link.put(frame)

    def send_all(self, frame: Frame) -> None:
        for place in range(len(self._addresses)):
            self.send(place, frame)

    def close(self) -> None:
        """Ends all connections after the queued frames have been sent."""
        self._closed.set()
        self._listener.close()
        with self._lock:
            links = list(self._links.values())
        for link in links:
            link.finish()

    def _call(self, place: int) -> None:
        while not self._closed.is_set():
            try:
                sock = socket.create_connection(self._addresses[place], timeout=SILENCE)
                if self._meet(sock, place) is not None:
                    self._serve(sock, place)
            except OSError as error:
                self._why[place] = unreached(error)
            self._closed.wait(AGAIN)

    def _look(self, place: int) -> None:
        """Finds out which center is at the address of a center that has not called."""
        try:
            with socket.create_connection(self._addresses[place], timeout=LOOK) as sock:
                _, found = self._wire.greeting(sock, time.monotonic() + LOOK)
            self._why[place] = _other_place(found) if found != place else "there, but it has not called this center"
        except (OSError, Stranger) as error:
            self._why[place] = unreached(error)

    def _meet(self, sock: socket.socket, expected: int | None) -> int | None:
        """Returns the place of the center at the other end, or None if the handshake fails."""
        # `expected` is the place of the center that was called; None: the connection was accepted.
        known = expected

        def check(place: int) -> None:
            nonlocal known
            if not (place == expected if expected is not None else self._place < place < len(self._addresses)):
                raise Stranger(_other_place(place))
            known = place

        try:
            place = self._wire.meet(sock, self._place, check)
            if difference := self._terms.difference(self._tell(sock, first=expected is not None)):
                self._events.differs(place, difference)
                raise Stranger("it has other terms")
        except (OSError, Stranger, ValueError, TypeError, AttributeError) as error:
            sock.close()
            if known is not None:
                self._why[known] = unreached(error)
            return None
        return place

    def _tell(self, sock: socket.socket, first: bool) -> Terms:
        # `first` says which end sends first: if both sent at once, large terms could fill the buffers and block both.
        text = json.dumps(self._terms).encode()
        mine = struct.pack("!I", len(text)) + text
        if first:
            sock.sendall(mine)
        (size,) = struct.unpack("!I", read(sock, 4))
        if size > MOST:
            raise Stranger("its terms are too long")
        options, leaves = json.loads(read(sock, size))
        if not first:
            sock.sendall(mine)
        return Terms(options, leaves)

    def _serve(self, sock: socket.socket, place: int) -> None:
        link = _Link(sock, self._events.beat)
        with self._lock:
            old, self._links[place] = self._links.get(place), link
        if old:
            old.close()  # the center has connected again
        self._events.came(place)
        try:
            while not self._closed.is_set():
                self._events.got(place, self._read_frame(sock))
        except (OSError, Stranger):
            pass
        finally:
            link.close()
            sock.close()
            with self._lock:
                gone = self._links.get(place) is link
                if gone:
                    del self._links[place]
            if gone:
                self._events.left(place)

    def _read_frame(self, sock: socket.socket) -> Frame:
        magic, kind, *version, size = HEADER.unpack(read(sock, HEADER.size))
        if magic != MAGIC or kind not in self._sizes or size not in self._sizes[kind]:
            raise Stranger("it has sent something else than a frame")
        return Frame(FrameKind(kind), Version(*version), read(sock, size))


class _Link:
    """The sending half of a connection: a queue of frames, and a thread that sends them."""

    def __init__(self, sock: socket.socket, beat: Callable[[], Frame]) -> None:
        self._socket, self._beat = sock, beat
        self._queue = queue.Queue[Frame | None](WAITING)
        self._thread = start_thread(self._write)

    def put(self, frame: Frame | None) -> None:
        try:
            self._queue.put_nowait(frame)
        except queue.Full:  # the center is too slow; it will connect again and fetch the state
            self.close()

    def finish(self) -> None:
        """Closes the connection after all queued frames have been sent."""
        self.put(None)
        self._thread.join(SILENCE)
        self.close()

    def _write(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                try:
                    frame = self._queue.get(timeout=SILENCE / 4)
                except queue.Empty:
                    frame = self._beat()
                if frame is None:
                    return
                view = memoryview(frame.body)
                self._socket.sendall(HEADER.pack(MAGIC, frame.kind, *frame.version, len(view)))
                for at in range(0, len(view), PIECE):
                    self._socket.sendall(view[at : at + PIECE])
        self.close()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        with contextlib.suppress(queue.Full):
            self._queue.put_nowait(None)


def _other_place(place: int) -> str:
    return f"the center there has place={place}"
