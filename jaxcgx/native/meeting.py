"""The meeting of processes over TCP: each connects to the processes before it, and accepts the processes after it.

Both ends of a connection prove that they know the job's secret, by an HMAC of the bytes that both have sent. A
connection without this proof is from a stranger. Only a few such connections are kept: the oldest is closed to make
room for the next. So a process calls again if its connection is closed before it gets an answer.

All of this runs in one loop in the caller's thread, so a signal can interrupt it. If a process ends while others wait
for more processes, the meeting fails on all that have met it.
"""

import contextlib
import errno
import hmac
import os
import secrets
import select
import socket
import struct
import time
import weakref
from collections.abc import Callable, Generator
from typing import Any, NamedTuple

BEATS, DATA = range(2)  # channels, the connections between two processes: heartbeats, and the first channel for data
HELLO = struct.Struct("=8s32sqqqd")  # magic, nonce, process, channel, links; both ends must have the same byte order
MAGIC = b"jaxcgx\x27\x02"  # the version of the handshake and of the messages after it (xla_ffi/tcp)
PROOF = 32  # bytes of an HMAC-SHA256
REFUSED = bytes(PROOF)
STRANGERS = 64  # the most connections without a proof
MOST = 1024  # the most connections that wait to be accepted
AGAIN = 0.1  # seconds until a process calls again
STEP = 0.5  # the most seconds that `step` waits
SILENCE = 30  # seconds after which a silent process counts as vanished
BEAT = SILENCE / 6

Talk = Generator[int, bytes, None]  # yields the number of bytes that it needs, and gets them


class MeetingError(RuntimeError):
    """The processes can't meet."""


class _Refused(Exception):
    """The other end is a stranger."""


class Links(NamedTuple):
    """The settings of the connections between processes, the same in all processes."""

    connections: int = 1  # for data, between a device and another process
    pace: float | None = None  # the most bytes per second that a process sends

    def __str__(self) -> str:
        return f"connections={self.connections}, pace={self.pace}"


PLAIN = Links()


class Other(NamedTuple):
    """The address where another process listens."""

    process: int
    host: str
    port: int

    def __str__(self) -> str:
        return f"process {self.process} at {self.host}, port {self.port}"


class _Connection:
    """A connection during its handshake, and the bytes that have arrived for it."""

    def __init__(self, sock: socket.socket, talk: Talk) -> None:
        self.socket, self.talk, self.got = sock, talk, b""
        self.need = next(talk)

    def read(self) -> None:
        """Reads the bytes that have arrived. Raises OSError if the other end closed the connection."""
        with contextlib.suppress(BlockingIOError, InterruptedError):
            some = self.socket.recv(self.need - len(self.got))
            if not some:
                raise ConnectionResetError(errno.ECONNRESET, "closed")
            self.got += some
        if len(self.got) == self.need:
            got, self.got = self.got, b""
            with contextlib.suppress(StopIteration):
                self.need = self.talk.send(got)


class Meeting(contextlib.AbstractContextManager["Meeting"]):
    """A process's part in the meeting of all processes. `with` closes the sockets that were not handed over."""

    # `hosts` are the addresses of this host to listen at. Empty: all addresses. `devices`: the most devices of a
    # process.
    def __init__(
        self, process: int, processes: int, secret: bytes, hosts: list[str], links: Links = PLAIN, devices: int = 1
    ) -> None:
        self.process: int = process  # the number of this process
        self.processes: int = processes
        self.secret: bytes = secret  # the job's
        self.links: Links = links
        self.channels: range = range(DATA + devices * links.connections)
        self.found: dict[tuple[int, int], socket.socket] = {}  # by process and channel
        self.hosts: list[str] = [""] * processes
        self.hint: str = ""  # why a process may be missing; anyone can call, so it is no reason to end
        self._handlers: dict[int, Callable[[], None]] = {}  # by descriptor
        self._poll = select.poll()
        self._strangers: list[socket.socket] = []  # the oldest first
        self._calls: list[tuple[float, Other, int]] = []  # (time, process to call, channel)
        self._sockets: set[socket.socket] = set()
        self._next_beat = 0.0
        alive = weakref.ref(self)

        def forget() -> None:
            if meeting := alive():
                meeting.__exit__()

        # A forked child closes its copies of the sockets. Otherwise they would keep the connections open after this
        # process is killed. After the hand-over, xla_ffi/tcp/process.cc closes them in a child.
        os.register_at_fork(after_in_child=forget)
        self._listeners = self._listen(hosts)
        self.port: int = self._listeners[0].getsockname()[1]

    def __exit__(self, *_: object) -> None:
        for sock in self._sockets:
            sock.close()

    # Methods for the caller

    def call(self, other: Other) -> None:
        """Begins to connect to a process before this one. `step` continues."""
        self.hosts[other.process] = other.host
        self._calls += [(0.0, other, channel) for channel in self.channels]

    @property
    def missing(self) -> list[int]:
        others = [p for p in range(self.processes) if p != self.process]
        return [p for p in others if any((p, channel) not in self.found for channel in self.channels)]

    def step(self, seconds: float) -> None:
        """Continues for at most `seconds`. Raises `MeetingError` if the processes can't meet."""
        now = time.monotonic()
        due = [call for call in self._calls if call[0] <= now]
        self._calls = [call for call in self._calls if call[0] > now]
        for _, other, channel in due:
            self._dial(_addresses(other), other, channel)
        if now >= self._next_beat:
            self._beat()
            self._next_beat = now + BEAT
        wait = min([seconds, STEP, *(at - now for at, *_ in self._calls)])
        ready = [(number, self._handlers[number]) for number, _ in self._poll.poll(max(0.0, wait) * 1000)]
        for number, handler in ready:
            if self._handlers.get(number) is handler:  # an earlier handler may have closed the socket
                handler()

    def hand_over(self) -> list[tuple[str, list[int], int]]:
        """Returns, for each process, (its host, the descriptors for data, the descriptor for heartbeats)."""
        # The caller owns the descriptors from now on.
        handed: list[tuple[str, list[int], int]] = []
        for process, host in enumerate(self.hosts):
            found = [self.found[process, channel] for channel in self.channels] if process != self.process else []
            for sock in found:
                self._forget(sock)
            beats, *data = [sock.detach() for sock in found] or [-1]
            handed.append((host, data, beats))
        return handed

    # Sockets

    def _listen(self, hosts: list[str]) -> list[socket.socket]:
        for _ in range(10):  # a port that is free at one address may be taken at another
            listeners, why = list[socket.socket](), "no address"
            for host in hosts or ["::", "0.0.0.0"]:
                try:
                    listeners.append(self._listener(host, listeners[0].getsockname()[1] if listeners else 0))
                except OSError as error:
                    if error.errno == errno.EADDRINUSE:
                        for sock in listeners:
                            self._close(sock)
                        break
                    why = f"{host}: {error.strerror}"  # a host may have only one kind of address
            else:
                if not listeners:
                    raise MeetingError(f"this process can't listen at {why}")
                return listeners
        raise MeetingError("this process finds no port that is free at all of its addresses")

    def _listener(self, host: str, port: int) -> socket.socket:
        sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        self._watch(sock, lambda: self._accept(sock))
        try:
            if sock.family == socket.AF_INET6:
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            sock.bind((host, port))
            sock.listen(MOST)
        except OSError:
            self._close(sock)
            raise
        return sock

    def _watch(self, sock: socket.socket, handler: Callable[[], None], events: int = select.POLLIN) -> socket.socket:
        sock.setblocking(False)
        self._sockets.add(sock)
        self._handlers[sock.fileno()] = handler
        self._poll.register(sock, events)
        return sock

    def _forget(self, sock: socket.socket) -> None:
        self._sockets.discard(sock)
        if self._handlers.pop(sock.fileno(), None):
            self._poll.unregister(sock)

    def _close(self, sock: socket.socket) -> None:
        self._forget(sock)
        sock.close()

    def _keep(self, sock: socket.socket, other: int, channel: int) -> None:
        """Keeps a connection to a process that has proved the secret. If the connection ends, the meeting fails."""
        self._forget(sock)
        for option, value in (
            (socket.TCP_NODELAY, 1),
            (socket.TCP_KEEPIDLE, SILENCE // 3),  # routers between the hosts may drop an idle connection
            (socket.TCP_KEEPINTVL, SILENCE // 6),
            (socket.TCP_KEEPCNT, 4),
        ):
            sock.setsockopt(socket.IPPROTO_TCP, option, value)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self.found[other, channel] = sock

        def ended() -> None:
            raise MeetingError(f"process {other} at {self.hosts[other]} has ended or left before all had come")

        # Not POLLIN, because a process that has met all other processes may already send data.
        self._watch(sock, ended, select.POLLRDHUP)

    def _beat(self) -> None:
        """Sends heartbeats, because processes that have met all other processes expect them (xla_ffi/tcp/net.h)."""
        for (_, channel), sock in self.found.items():
            if channel == BEATS:
                with contextlib.suppress(OSError):
                    sock.send(b"\0")

    # The handshake

    def _hello(self, channel: int) -> bytes:
        numbers = self.process, channel, self.links.connections, self.links.pace or 0.0
        return HELLO.pack(MAGIC, secrets.token_bytes(32), *numbers)

    def _proof(self, role: bytes, called: bytes, answered: bytes) -> bytes:
        return hmac.digest(self.secret, role + called + answered, "sha256")

    def _compare(self, other: int, connections: int, pace: float) -> None:
        theirs = Links(connections, pace or None)
        if theirs != self.links:
            raise MeetingError(
                f"expected the same Tcp in every process, got {self.links} in process {self.process} and {theirs} in "
                f"process {other}"
            )

    def _answer(self, sock: socket.socket, mine: bytes) -> Talk:
        hello = yield HELLO.size
        magic, _, other, channel, *links = HELLO.unpack(hello)
        if magic != MAGIC:
            self.hint = f"; one has called with {_versions(magic)}" if magic.startswith(b"jaxcgx") else self.hint
            raise _Refused
        proof = yield PROOF
        known = hmac.compare_digest(proof, self._proof(b"calls", hello, mine))
        if not known or not self.process < other < self.processes or channel < 0:
            sock.send(REFUSED)  # the socket always has room for this few bytes
            raise _Refused
        self._compare(other, *links)
        if channel not in self.channels or (other, channel) in self.found:
            raise _Refused
        sock.send(self._proof(b"answers", hello, mine))
        self.hosts[other] = sock.getpeername()[0]  # an OSError if the connection has ended meanwhile
        self._strangers.remove(sock)
        self._keep(sock, other, channel)

    def _ask(self, sock: socket.socket, other: Other, channel: int) -> Talk:
        mine = self._hello(channel)
        with contextlib.suppress(OSError):  # the next read has the same error
            sock.send(mine)
        answer = yield HELLO.size
        magic, _, process, _, *links = HELLO.unpack(answer)
        if magic != MAGIC and magic.startswith(b"jaxcgx"):
            raise MeetingError(f"{other} has {_versions(magic)}")
        if magic != MAGIC or process != other.process:
            raise MeetingError(f"{other} is not that process: another one, or another version of jaxcgx, listens there")
        sock.send(self._proof(b"calls", mine, answer))
        self._compare(process, *links)
        proof = yield PROOF
        if proof == REFUSED:
            raise MeetingError(f"{other} turned this process away: it belongs to another job")
        if not hmac.compare_digest(proof, self._proof(b"answers", mine, answer)):
            raise MeetingError(f"{other} is not that process: it does not know the job's secret")
        self._keep(sock, other.process, channel)

    # Connections from other processes

    def _accept(self, listener: socket.socket) -> None:
        try:
            sock = listener.accept()[0]
        except (BlockingIOError, InterruptedError, ConnectionError):
            return
        except OSError as error:
            self._make_room(error)
            return
        hello = self._hello(DATA)
        connection = _Connection(sock, self._answer(sock, hello))
        self._watch(sock, lambda: self._listen_to(connection))
        self._strangers.append(sock)
        if len(self._strangers) > STRANGERS:
            self._close(self._strangers.pop(0))
        with contextlib.suppress(OSError):  # as in _ask
            sock.send(hello)

    def _listen_to(self, connection: _Connection) -> None:
        try:
            connection.read()
        except (OSError, _Refused):
            self._strangers.remove(connection.socket)
            self._close(connection.socket)

    def _make_room(self, error: OSError) -> None:
        """Closes the oldest connection of a stranger if `error` is a lack of descriptors."""
        if error.errno not in (errno.EMFILE, errno.ENFILE):
            raise error
        if not self._strangers:
            raise MeetingError(
                f"out of file descriptors: this process may open {os.sysconf('SC_OPEN_MAX')}, and needs "
                f"{len(self.channels) * self.processes} for {self.processes} processes, besides its own; raise the "
                "limit (ulimit -n)"
            )
        self._close(self._strangers.pop(0))

    # Connections to other processes

    def _dial(self, addresses: list[Any], other: Other, channel: int) -> None:
        """Connects to the first address that answers."""
        (family, *_, address), *others = addresses
        try:
            sock = socket.socket(family)
        except OSError as error:
            self._make_room(error)
            self._again(other, channel)
            return

        def connected(error: int) -> None:
            self._forget(sock)
            if not error:
                self._talk_to(sock, other, channel)
                return
            sock.close()
            if not others:
                raise MeetingError(f"{other} can't be reached: {os.strerror(error)}")
            self._dial(others, other, channel)

        self._watch(sock, lambda: connected(sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)), select.POLLOUT)
        if (error := sock.connect_ex(address)) not in (0, errno.EINPROGRESS):
            connected(error)

    def _talk_to(self, sock: socket.socket, other: Other, channel: int) -> None:
        connection = _Connection(sock, self._ask(sock, other, channel))

        def heard() -> None:
            try:
                connection.read()
            except OSError:
                self._close(sock)
                self._again(other, channel)

        self._watch(sock, heard)

    def _again(self, other: Other, channel: int) -> None:
        self._calls.append((time.monotonic() + AGAIN, other, channel))


def _versions(magic: bytes) -> str:
    return f"version {magic[6:].hex()} of jaxcgx's protocol, this process has version {MAGIC[6:].hex()}"


def _addresses(other: Other) -> list[Any]:
    try:
        return socket.getaddrinfo(other.host, other.port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise MeetingError(f"{other}: {error.strerror}") from None
