"""The link between this host and another one: its rates and its delay. They are measured once and kept in a file.

Both hosts send at the same time, as the ranks of an exchange do. There are two connections: one for words, such as the
results, and one for the bytes that are counted.
"""

import concurrent.futures
import dataclasses
import platform
import socket
import statistics
import struct
import time
from typing import NoReturn

from jaxcgx.checks import wrong
from jaxcgx.report import machine
from jaxcgx.text import spell_rate

PORT = 5799
WARM_UP, SECONDS = 1.0, 3.0  # bytes are counted after the warm-up: a link may pass its first bytes faster
TRIPS = 21
SILENCE = 20.0  # seconds after which the other host counts as lost
_HELLO = b"jaxcgx link 1\n"
_CHUNK = bytes(2**16)
_NUMBERS = struct.Struct("!dd")
_OP = "link"


@dataclasses.dataclass(frozen=True)
class Measured:
    """What programs get from the link between this host and another one.

    Attributes:
      up: bytes per second that this host sends while it receives.
      down: bytes per second that it receives while it sends.
      delay: the seconds from one host to the other, which are half of a round trip.
    """

    up: float
    down: float
    delay: float

    def __str__(self) -> str:
        up, down = (spell_rate(float(f"{8 * rate:.3g}")) for rate in (self.up, self.down))
        return f"{up} up and {down} down of payload at the same time, delay {self.delay * 1e3:.3g}ms"


def known() -> dict[str, Measured]:
    """Returns {other host: measurement} of all links of this host that were measured."""
    return machine.known("links", platform.node(), Measured)


def slowest() -> Measured | None:
    """Returns the lowest rates and the longest delay of all measured links of this host. None: there are none."""
    links = known().values()
    if not links:
        return None
    return Measured(min(x.up for x in links), min(x.down for x in links), max(x.delay for x in links))


def serve(server: socket.socket) -> tuple[str, Measured]:
    """Waits for another host to call `measure`. Returns the other host's address and the measurement."""
    words, (peer, *_) = server.accept()
    with words:
        _begin(words)
        if _receive(words, len(_HELLO)) != _HELLO:
            _refuse(peer, "another program's words")
        words.sendall(_HELLO)
        for _ in range(TRIPS):
            words.sendall(_receive(words, 1))
        server.settimeout(SILENCE)
        data, _ = server.accept()
        with data:
            received = _both(data)
        other, delay = _NUMBERS.unpack(_receive(words, _NUMBERS.size))
        words.sendall(_NUMBERS.pack(received, delay))
    return peer, _keep(peer, Measured(up=other, down=received, delay=delay))


def measure(host: str, port: int = PORT) -> Measured:
    """Measures the link to a host on which `serve` waits, and keeps the result in the file."""
    try:
        words = socket.create_connection((host, port), SILENCE)
    except OSError as error:
        _refuse(host, str(error))
    with words:
        _begin(words)
        words.sendall(_HELLO)
        if _receive(words, len(_HELLO)) != _HELLO:
            _refuse(host, "another program's words")
        delay = statistics.median(_trip(words) for _ in range(TRIPS)) / 2
        with socket.create_connection((host, port), SILENCE) as data:
            received = _both(data)
        words.sendall(_NUMBERS.pack(received, delay))
        other, _ = _NUMBERS.unpack(_receive(words, _NUMBERS.size))
    return _keep(host, Measured(up=other, down=received, delay=delay))


def _refuse(host: str, got: str) -> NoReturn:
    expected = "a host that waits for this one"
    raise wrong(_OP, "host", expected, f"{host!r}: {got}", "run `python -m jaxcgx link` there, of the same version")


def _keep(peer: str, found: Measured) -> Measured:
    machine.save("links", platform.node(), peer, dataclasses.asdict(found))
    return found


def _begin(connection: socket.socket) -> None:
    connection.settimeout(SILENCE)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _receive(connection: socket.socket, size: int) -> bytes:
    found = b""
    while len(found) < size:
        part = connection.recv(size - len(found))
        if not part:
            raise ConnectionError(f"{_OP}: the other host ended the connection")
        found += part
    return found


def _trip(words: socket.socket) -> float:
    start = time.perf_counter()
    words.sendall(b".")
    _receive(words, 1)
    return time.perf_counter() - start


def _both(data: socket.socket) -> float:
    """Sends to the other host and receives from it. Returns the bytes per second that were received."""
    data.settimeout(SILENCE)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        sender = pool.submit(_send, data)
        received = _count(data)
        sender.result()
    return received


def _send(data: socket.socket) -> None:
    end = time.perf_counter() + WARM_UP + SECONDS
    while time.perf_counter() < end:
        data.sendall(_CHUNK)
    data.shutdown(socket.SHUT_WR)


def _count(data: socket.socket) -> float:
    """Receives until the other host has sent everything. Returns the rate in the time that is measured."""
    buffer = bytearray(len(_CHUNK))
    start = time.perf_counter() + WARM_UP
    size = 0
    last = start
    while count := data.recv_into(buffer):
        now = time.perf_counter()
        if start < now < start + SECONDS:
            size, last = size + count, now
    if last <= start:
        raise ConnectionError(f"{_OP}: the other host sent nothing for {SECONDS:g} s")
    return size / (last - start)
