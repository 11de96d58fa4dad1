"""The meeting of processes over TCP: each connects to the processes before it, and accepts the processes after it.

Both ends of a connection prove that they know the job's secret (sockets.py), and compare their settings. Threads do so.
What they find, the caller's thread gets in `step`, so a signal can interrupt it. If a process ends while others wait
for more processes, the meeting fails on all that have met it.
"""

import contextlib
import os
import resource
import select
import socket
import struct
import threading
import time
from collections.abc import Generator
from typing import NamedTuple

from jaxcgx.native.sockets import Listener, Stranger, Wire, read, start_thread

BEATS, DATA = range(2)  # channels, the connections between two processes: heartbeats, and the first channel for data
TERMS = struct.Struct("!qqd")  # channel, links
MAGIC = b"cgt\x03"  # the version of the handshake and of the messages after it (xla_ffi/tcp)
UNKNOWN = "another program, or another version of jaxcgx"
AGAIN = 0.1  # seconds until a process calls again
STEP = 0.5  # the most seconds that `step` waits
SILENCE = 30  # seconds after which a silent process counts as vanished
BEAT = SILENCE / 6


class MeetingError(RuntimeError):
    """The processes can't meet."""


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


class Meeting(contextlib.AbstractContextManager["Meeting"]):
    """A process's part in the meeting of all processes. `with` closes the sockets that were not handed over."""

    # `hosts` are the addresses of this host to listen at. Empty: all addresses. `devices`: the most devices of a
    # process.
    def __init__(
        self, process: int, processes: int, secret: str, hosts: list[str], links: Links = PLAIN, devices: int = 1
    ) -> None:
        self.process: int = process  # the number of this process
        self.processes: int = processes
        self.links: Links = links
        self.channels: range = range(DATA + devices * links.connections)
        self.found: dict[tuple[int, int], socket.socket] = {}  # by process and channel
        self.hosts: list[str] = [""] * processes
        self.hint: str = ""  # why a process may be missing; anyone can call, so it is no reason to end
        self._wire = Wire(MAGIC, secret, UNKNOWN)
        self._news = threading.Event()
        self._why: MeetingError | None = None
        self._closed, self._next_beat = False, time.monotonic() + BEAT
        self._check_descriptors()
        self._listeners = self._listen(hosts or [""])
        self.port: int = self._listeners[0].port
        for listener in self._listeners:
            listener.start()

    def __exit__(self, *_: object) -> None:
        self._closed = True
        for listener in self._listeners:
            listener.close()
        for sock in self.found.copy().values():
            sock.close()

    # Methods for the caller

    def call(self, other: Other) -> None:
        """Begins to connect to a process before this one."""
        start_thread(self._call, other)

    @property
    def missing(self) -> list[int]:
        others = [p for p in range(self.processes) if p != self.process]
        return [p for p in others if any((p, channel) not in self.found for channel in self.channels)]

    def step(self, seconds: float) -> None:
        """Waits for at most `seconds` for the next connection. Raises `MeetingError` if the processes can't meet."""
        self._news.wait(min(seconds, STEP))
        self._news.clear()
        if self._why:
            raise self._why
        beats, poll, processes = time.monotonic() >= self._next_beat, select.poll(), dict[int, int]()
        for (process, channel), sock in self.found.copy().items():
            if beats and channel == BEATS:  # processes that have met all others expect them (xla_ffi/tcp/net.h)
                with contextlib.suppress(OSError):
                    sock.send(b"\0")
            # Not POLLIN, because a process that has met all other processes may already send data.
            poll.register(sock, select.POLLRDHUP)
            processes[sock.fileno()] = process
        if beats:
            self._next_beat = time.monotonic() + BEAT
        for number, _ in poll.poll(0):
            process = processes[number]
            raise MeetingError(f"process {process} at {self.hosts[process]} has ended or left before all had come")

    def hand_over(self) -> list[tuple[str, list[int], int]]:
        """Returns, for each process, (its host, the descriptors for data, the descriptor for heartbeats)."""
        # The caller owns the descriptors from now on. In a forked child, xla_ffi/tcp/process.cc closes them.
        handed: list[tuple[str, list[int], int]] = []
        for process, host in enumerate(self.hosts):
            found = [self.found[process, channel] for channel in self.channels] if process != self.process else []
            beats, *data = [sock.detach() for sock in found] or [-1]
            handed.append((host, data, beats))
        return handed

    # Connections, in threads

    def _listen(self, hosts: list[str], tries: int = 10) -> list[Listener]:
        listeners = list[Listener]()
        try:
            for host in hosts:
                port = listeners[0].port if listeners else 0
                listeners.append(Listener((host, port), self._accept, self._serve))
        except OSError as error:
            if tries > 1:  # a port that is free at one address may be taken at another
                return self._listen(hosts, tries - 1)
            raise MeetingError(f"this process can't listen at {', '.join(hosts)}: {error}") from None
        return listeners

    def _check_descriptors(self) -> None:
        most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        needed, used = len(self.channels) * self.processes, len(os.listdir("/proc/self/fd"))
        if used + needed > most:
            raise MeetingError(
                f"out of file descriptors: this process may open {most}, has opened {used}, and needs {needed} for "
                f"{self.processes} processes; raise the limit (ulimit -n)"
            )

    def _accept(self, sock: socket.socket) -> int:
        def check(process: int) -> None:
            if not self.process < process < self.processes:
                raise Stranger(f"it says that it is process {process}")

        try:
            return self._wire.meet(sock, self.process, check)
        except Stranger as error:
            self.hint = f"; a program has called that isn't one: {error}"
            raise

    def _serve(self, sock: socket.socket, process: int) -> None:
        with self._failing():
            try:
                self._join(sock, process)
            except OSError:
                sock.close()

    def _call(self, other: Other) -> None:
        with self._failing():
            for channel in self.channels:
                while not self._closed and (other.process, channel) not in self.found:
                    self._connect(other, channel)

    def _connect(self, other: Other, channel: int) -> None:
        def check(process: int) -> None:
            if process != other.process:
                raise Stranger(f"it is process {process}")

        try:
            sock = socket.create_connection((other.host, other.port))
        except OSError as error:
            raise MeetingError(f"{other} can't be reached: {error.strerror}") from None
        try:
            self._wire.meet(sock, self.process, check)
            self._join(sock, other.process, channel)
        except OSError:
            sock.close()
            time.sleep(AGAIN)
        except Stranger as error:
            sock.close()
            raise MeetingError(f"{other} is not one of this job: {error}") from None

    def _join(self, sock: socket.socket, process: int, channel: int = -1) -> None:
        """Compares the settings with those of another process, which says the channel if it has called."""
        sock.sendall(TERMS.pack(channel, self.links.connections, self.links.pace or 0.0))
        said, connections, pace = TERMS.unpack(read(sock, TERMS.size))
        if (theirs := Links(connections, pace or None)) != self.links:
            sock.close()
            raise MeetingError(
                f"expected the same Tcp in every process, got {self.links} in process {self.process} and {theirs} in "
                f"process {process}"
            )
        for option, value in (
            (socket.TCP_KEEPIDLE, SILENCE // 3),  # routers between the hosts may drop an idle connection
            (socket.TCP_KEEPINTVL, SILENCE // 6),
            (socket.TCP_KEEPCNT, 4),
        ):
            sock.setsockopt(socket.IPPROTO_TCP, option, value)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setblocking(False)
        self.hosts[process] = sock.getpeername()[0]
        self.found[process, max(channel, said)] = sock
        if self._closed:
            sock.close()
        self._news.set()

    @contextlib.contextmanager
    def _failing(self) -> Generator[None]:
        """Hands an error to the caller's thread."""
        try:
            yield
        except MeetingError as error:
            self._why = error
            self._news.set()
