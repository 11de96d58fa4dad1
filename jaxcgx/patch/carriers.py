"""What carries files from a publisher to subscribers: a directory, or the publisher's memory and sockets.

Of both, `names` returns {name: bytes}, and `read` the bytes of a range of a file, fewer at its end. A file that isn't
there raises FileNotFoundError. Over sockets, a request is a name and a range, the answer a size and the bytes. An empty
name asks for the names.
"""

import collections
import contextlib
import json
import os
import pathlib
import re
import socket
import struct
import threading
import time
from typing import Any

from jaxcgx.checks import check_type, wrong
from jaxcgx.transports.sockets import PIECE, SILENCE, Listener, Stranger, Wire, as_host, read

PUBLISHER, SUBSCRIBER = b"cgxp", b"cgxs"  # the version of this protocol
UNKNOWN = "the program there is no publisher, or has another version of jaxcgx"
ASK = struct.Struct("!QQB")  # the range of bytes, bytes of the name
SIZE = struct.Struct("!q")  # of the answer; -1: there is no such file
IDLE = 60.0  # seconds without a request after which a connection is closed
MOST = 64 << 20  # the most bytes of the names
BURST = 0.1  # seconds of the pace that are sent at once
UNFINISHED = ".unfinished"  # ends the name of a file in a directory until it is whole


def as_place(op: str, where: Any, secret: Any, pace: Any = None) -> tuple[str, int] | pathlib.Path:
    """Returns the checked argument `where`: a host and a port, or a directory, which has no secret and no pace."""
    expected = "'host:port' or a directory"
    check_type(op, "secret", secret, str, "a string")
    check_type(op, "where", where, str | os.PathLike, expected)
    if re.fullmatch(r"[^/]+:\d+", str(where)):
        return as_host(op, "where", where, expected)
    if "://" in str(where):
        raise wrong(op, "where", expected, repr(where), "pass 'host:port', or mount the bucket as a directory")
    if isinstance(where, str) and "/" not in where:
        raise wrong(op, "where", expected, repr(where), f"pass '{where}:port', or './{where}' for a directory")
    for argument, value in ("secret", secret), ("pace", pace):
        if value:
            raise wrong(op, argument, "none with a directory", "one", "only connections have it")
    return pathlib.Path(where)


class Directory:
    """A directory. A file is written under another name, and renamed when it is whole."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = pathlib.Path(path)

    def names(self) -> dict[str, int]:
        found = dict[str, int]()
        for path in self._path.glob("*"):
            with contextlib.suppress(FileNotFoundError):  # it was removed
                found[path.name] = path.stat().st_size
        return found

    def read(self, name: str, start: int, stop: int) -> bytes:
        with open(self._path / name, "rb") as file:
            file.seek(start)
            return file.read(stop - start)

    def write(self, name: str, parts: list[bytes]) -> None:
        self._path.mkdir(parents=True, exist_ok=True)
        unfinished = self._path / f"{name}{UNFINISHED}"
        try:
            with open(unfinished, "wb") as file:
                file.writelines(parts)
            os.replace(unfinished, self._path / name)
        finally:
            unfinished.unlink(missing_ok=True)

    def remove(self, name: str) -> None:
        (self._path / name).unlink(missing_ok=True)


class Server:
    """Keeps files in memory, and serves them to the programs that know the secret, at most `pace` bytes per second."""

    def __init__(self, address: tuple[str, int], secret: str, pace: float | None) -> None:
        self._files = dict[str, bytes]()
        self._pace = pace
        self._lock, self._free = threading.Lock(), 0.0  # when the pace has room again
        self._closed, self._sockets = False, set[socket.socket]()
        self._listener = Listener(address, Wire(PUBLISHER, secret, UNKNOWN, SUBSCRIBER).meet, self._serve)
        self._listener.start()

    def names(self) -> dict[str, int]:
        return {name: len(file) for name, file in self._files.copy().items()}

    def write(self, name: str, parts: list[bytes]) -> None:
        self._files[name] = b"".join(parts)

    def remove(self, name: str) -> None:
        del self._files[name]

    def close(self) -> None:
        self._listener.close()
        self._closed = True
        _end(self._sockets)

    def _serve(self, sock: socket.socket, _: int) -> None:
        self._sockets.add(sock)
        with contextlib.suppress(OSError, ValueError):
            sock.settimeout(IDLE)
            while not self._closed:
                start, stop, size = ASK.unpack(read(sock, ASK.size))
                name = read(sock, size).decode()
                file = self._files.get(name) if name else json.dumps(self.names()).encode()
                body = memoryview(file or b"")[start:stop]
                self._send(sock, memoryview(SIZE.pack(-1 if file is None else len(body))))
                self._send(sock, body)
        self._sockets.remove(sock)

    def _send(self, sock: socket.socket, view: memoryview) -> None:
        piece = min(PIECE, int(BURST * self._pace)) if self._pace else PIECE
        for at in range(0, len(view), piece):
            if self._pace:
                with self._lock:
                    now = time.monotonic()
                    start = max(self._free, now)
                    self._free = start + min(piece, len(view) - at) / self._pace
                time.sleep(start - now)
            sock.sendall(view[at : at + piece])


class Remote:
    """Reads from a `Server`. Each thread that reads has a connection, which the next one uses again."""

    def __init__(self, address: tuple[str, int], secret: str) -> None:
        self._address, self._wire = address, Wire(SUBSCRIBER, secret, UNKNOWN, PUBLISHER)
        self._idle, self._sockets, self._closed = collections.deque[socket.socket](), set[socket.socket](), False

    def names(self) -> dict[str, int]:
        names = json.loads(self.read("", 0, MOST))
        if not isinstance(names, dict) or not all(isinstance(size, int) for size in names.values()):
            raise ValueError(f"the publisher at {self._address} has sent something else than the names of versions")
        return names

    def read(self, name: str, start: int, stop: int) -> bytearray:
        while True:
            try:
                sock, fresh = self._idle.pop(), False
            except IndexError:
                sock, fresh = socket.create_connection(self._address, timeout=SILENCE), True
                self._sockets.add(sock)
            try:
                if self._closed:  # since then, nobody ends it
                    raise ConnectionAbortedError("the subscriber is closed")
                if fresh:
                    self._wire.meet(sock)
                    sock.settimeout(IDLE)  # others may have the pace before
                sock.sendall(ASK.pack(start, stop, len(name)) + name.encode())
                (size,) = SIZE.unpack(read(sock, SIZE.size))
                if size > stop - start:
                    raise Stranger("it has sent more than it was asked for")
                body = read(sock, max(size, 0))
            except (OSError, Stranger) as error:
                self._sockets.remove(sock)
                sock.close()
                if fresh or self._closed or isinstance(error, Stranger):
                    raise
                continue  # the publisher closes idle connections, and may be another one now
            self._idle.append(sock)
            if self._closed:  # perhaps since `close` has looked for idle connections
                self._close_idle()
            if size < 0:
                raise FileNotFoundError(f"there is no {name}")
            return body

    def close(self) -> None:
        """Ends all connections, also those that threads use."""
        self._closed = True
        _end(self._sockets)
        self._close_idle()

    def _close_idle(self) -> None:
        with contextlib.suppress(IndexError):
            while True:
                self._idle.pop().close()


def _end(sockets: set[socket.socket]) -> None:
    for sock in sockets.copy():
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)
