"""Connections between programs that find each other by address, and prove to each other that they share a secret.

Both ends of a new connection send a hello, with their place among the programs and a nonce. Then each proves that it
knows the secret, by an HMAC of both hellos. After that nothing is encrypted or authenticated. Every read has a size
that is checked before, and ends after `SILENCE` seconds without a byte. A handshake may take `SILENCE` seconds in all.
"""

import contextlib
import hmac
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from jaxcgx.checks import wrong

HELLO = struct.Struct("!4sI32s")  # magic, place, nonce
PROOF = 32  # bytes of an HMAC-SHA256
PIECE = 256 << 10  # the most bytes of one call of sendall
SILENCE = 10.0  # seconds after which a silent program counts as gone
AGAIN = 0.5  # seconds until a program is called again
STRANGERS = 16  # the most accepted connections in the handshake at a time


class Stranger(Exception):
    """Raised if the other end of a connection isn't the expected program. Its text says why."""


class Wire(NamedTuple):
    """How programs greet each other."""

    # No two programs may greet with the same magic and place: otherwise a stranger could send back what it gets as its
    # own proof.
    magic: bytes
    secret: str
    unknown: str  # what a program is that greets with other magic bytes than expected
    theirs: bytes = b""  # the magic bytes of the other end; none: the same

    def meet(self, sock: socket.socket, place: int = 0, check: Callable[[int], None] | None = None) -> int:
        """Does the handshake. Returns the place of the other end, which `check` may refuse."""
        end = time.monotonic() + SILENCE
        sock.settimeout(SILENCE)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        mine = HELLO.pack(self.magic, place, secrets.token_bytes(32))
        sock.sendall(mine)
        theirs, found = self.greeting(sock, end)
        if check:
            check(found)
        sock.sendall(self._prove(mine, theirs))
        if not hmac.compare_digest(read(sock, PROOF, end), self._prove(theirs, mine)):
            raise Stranger("it has another secret")
        sock.settimeout(SILENCE)
        return found

    def greeting(self, sock: socket.socket, end: float) -> tuple[bytearray, int]:
        """Reads the hello of the other end, until `end`. Returns (the hello, the place in it)."""
        hello = read(sock, HELLO.size, end)
        magic, place, _ = HELLO.unpack(hello)
        if magic != (self.theirs or self.magic):
            raise Stranger(self.unknown)
        return hello, place

    def _prove(self, first: bytes | bytearray, second: bytes | bytearray) -> bytes:
        return hmac.digest(self.secret.encode(), first + second, "sha256")


class Listener:
    """Accepts connections at an address, each in a thread of its own."""

    # `meet` does the handshake, and returns the place of the other end, or None. `serve` gets the place, and runs until
    # the connection ends. Only `STRANGERS` connections are in `meet` at a time.
    def __init__(
        self,
        address: tuple[str, int],
        meet: Callable[[socket.socket], int | None],
        serve: Callable[[socket.socket, int], None],
    ) -> None:
        self._meet, self._serve = meet, serve
        self._closed = threading.Event()
        self._strangers = threading.BoundedSemaphore(STRANGERS)
        self._socket = socket.create_server(address, family=socket.AF_INET6 if ":" in address[0] else socket.AF_INET)
        self._socket.settimeout(AGAIN)

    def start(self) -> None:
        self._thread = start_thread(self._accept)

    def close(self) -> None:
        """Ends the thread that accepts. After this, the address is free again."""
        self._closed.set()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join()

    def _accept(self) -> None:
        with self._socket:
            while not self._closed.is_set():
                try:
                    sock, _ = self._socket.accept()
                except TimeoutError:
                    continue
                except OSError:  # such as too many open files: a try at once would fail, too
                    self._closed.wait(AGAIN)
                    continue
                if not self._strangers.acquire(timeout=SILENCE):
                    sock.close()
                    continue
                try:
                    start_thread(self._welcome, sock)
                except RuntimeError:  # there are too many threads
                    self._strangers.release()
                    sock.close()

    def _welcome(self, sock: socket.socket) -> None:
        with sock:
            try:
                place = self._meet(sock)
            except (OSError, Stranger):
                place = None
            finally:
                self._strangers.release()
            if place is not None:
                self._serve(sock, place)


def as_host(function: str, argument: str, address: Any, expected: str) -> tuple[str, int]:
    """Returns the host and the port of an address "host:port". `expected` describes right values in errors."""
    if not isinstance(address, str):
        raise wrong(function, argument, expected, repr(address), kind=TypeError)
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise wrong(function, argument, expected, repr(address))
    return host.strip("[]"), int(port)


def unreached(error: Exception) -> str:
    """Returns the reason why a program isn't connected, from the error of a try."""
    return str(error) if isinstance(error, Stranger) else f"not reached: {error}"


def start_thread(run: Callable[..., None], *args: Any) -> threading.Thread:
    thread = threading.Thread(target=run, args=args, name=f"jaxcgx-{run.__name__}", daemon=True)
    thread.start()
    return thread


def read(sock: socket.socket, size: int, end: float | None = None) -> bytearray:
    """Reads exactly `size` bytes, until `end` of time.monotonic(). Raises an OSError if they don't come."""
    found = bytearray(size)
    view = memoryview(found)
    while view:
        if end is not None:
            sock.settimeout(max(end - time.monotonic(), 1e-3))
        if not (count := sock.recv_into(view)):
            raise ConnectionResetError("the connection was closed")
        view = view[count:]
    return found
