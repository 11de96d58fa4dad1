"""The TCP connections among the processes of jax.distributed. Each process makes them once."""

import contextlib
import ipaddress
import os
import secrets
import signal
import socket
import struct
import threading
import time
from typing import NamedTuple

import jax

from jaxcgx import _compat
from jaxcgx.checks import unexpected, warn
from jaxcgx.native.meeting import PLAIN, SILENCE, Links, Meeting, MeetingError, Other
from jaxcgx.native.registration import at_exit, module

LOOK = 1.0  # seconds between two looks for new processes
_ACKED, _BUSY = 120, 168  # offsets of tcpi_bytes_acked and tcpi_busy_time, which tcpi_rwnd_limited follows
_LENGTH = 184  # of struct tcp_info up to there
_ONE = threading.Lock()
_data: list[list[int]] = []  # for each process, the descriptors of the connections for data, which the engine owns
_why: str | None = None  # why the processes are not connected: "" if they are, None before the first try
_links: Links | None = None
_wakeup: list[socket.socket] = []  # open as long as the process


def connect(devices: int, timeout: float, links: Links = PLAIN) -> None:
    """Connects the processes of jax.distributed, unless they are connected. It waits for at most `timeout` seconds."""
    # There is no second try, because other processes may have given up. Later calls must pass the same links. `devices`
    # is the most devices of a process.
    global _why, _links
    if _compat.rendezvous()[0] is None:
        remedy = "call jax.distributed.initialize first"
        raise unexpected("Tcp", "processes that know each other", "one alone", remedy, kind=RuntimeError)
    if _compat.storing_crashes():
        warn("JAX 0.10 crashes when it stores a CPU program over Tcp: set JAX_ENABLE_COMPILATION_CACHE=false")
    with _ONE:
        if _why is None:
            _links = links
            _why = "the wait for the other processes was interrupted"
            try:
                _connect(devices, timeout, links)
                _why = ""
            except (OSError, RuntimeError) as error:
                _why = str(error)
        if _why:
            raise RuntimeError(f"Tcp: {_why}; start the processes again")
        if links != _links:
            expected = f"{_links}, with which this process has connected"
            raise unexpected("Tcp", expected, links, "give every Tcp of a process the same")


def _connect(devices: int, timeout: float, links: Links) -> None:
    """Connects the processes. Each writes its listening address into the store. A common secret keeps strangers out."""
    store, process, processes, coordinator = _compat.rendezvous()
    assert coordinator, "jax.distributed has a store, but no coordinator"
    address = coordinator.rpartition(":")[0].strip("[]")
    with contextlib.suppress(jax.errors.JaxRuntimeError):  # another process has set it
        store.key_value_set("jaxcgx/tcp/secret", secrets.token_hex(32))
    secret = bytes.fromhex(dict(store.key_value_dir_get("jaxcgx/tcp/"))["jaxcgx/tcp/secret"])
    # The coordinator runs in process 0, so every process reaches that host at the coordinator's address.
    host = _host(coordinator) if process else ""
    hosts = [host] if host else _own(address)
    with Meeting(process, processes, secret, hosts, links=links, devices=devices) as meeting:
        store.key_value_set(f"jaxcgx/tcp/{process}", f"{meeting.port} {host}")
        unknown, look, deadline = set(range(process)), 0.0, time.monotonic() + timeout
        while meeting.missing:
            now = time.monotonic()
            if now >= deadline:
                late = ", ".join(map(str, meeting.missing))
                raise MeetingError(f"process {late} has not come within {timeout:g} s{meeting.hint}")
            if unknown and now >= look:
                found, look = dict(store.key_value_dir_get("jaxcgx/tcp/")), now + LOOK
                for other in [other for other in unknown if f"jaxcgx/tcp/{other}" in found]:
                    port, its_host = found[f"jaxcgx/tcp/{other}"].split(" ")
                    meeting.call(Other(other, its_host or address, int(port)))
                    unknown.remove(other)
            meeting.step(min(deadline, look if unknown else deadline) - now)
        connections = meeting.hand_over()
        module().tcp_start(process, connections, devices, SILENCE, links.pace or 0.0)
    _data[:] = [data for _, data, _ in connections]
    at_exit(module().tcp_leave)
    _end_at_ctrl_c()


def _end_at_ctrl_c() -> None:
    """Lets Ctrl-C end the exchanges under way, if Ctrl-C raises KeyboardInterrupt."""
    # Python calls its handlers between two operations of the main thread, which may wait in XLA for an exchange as long
    # as another rank is late. Python's handler in C writes the signal's number to the wakeup descriptor at once.
    if threading.current_thread() is not threading.main_thread():
        return  # only the main thread may set the descriptor
    receiver, sender = socket.socketpair()
    sender.setblocking(False)
    before = signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)
    if before != -1:  # an event loop's, which needs it
        signal.set_wakeup_fd(before)
        return

    def watch() -> None:
        while numbers := receiver.recv(4096):
            if signal.SIGINT in numbers and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
                module().tcp_interrupt()

    _wakeup.append(sender)
    threading.Thread(target=watch, name="jaxcgx-ctrl-c", daemon=True).start()
    # In the child of a fork, signals would reach this process.
    os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))


def _host(coordinator: str) -> str:
    host, _, port = coordinator.rpartition(":")
    family, _, _, _, address = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:  # no bytes are sent
        probe.connect(address)
        return probe.getsockname()[0]


def _own(coordinator: str) -> list[str]:
    """Returns the addresses of this host that belong to the coordinator's name or address."""
    # The list is empty if other hosts reach this host through address translation, or if the name means loopback on the
    # host itself (as in Debian's /etc/hosts).
    found = list(dict.fromkeys(str(info[4][0]) for info in socket.getaddrinfo(coordinator, 0, type=socket.SOCK_STREAM)))
    loopback = [ipaddress.ip_address(address.partition("%")[0]).is_loopback for address in found]
    if any(loopback) and coordinator != "localhost" and coordinator not in found:
        return []
    return [address for address in found if _binds(address)]


def _binds(address: str) -> bool:
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
        return True


# The kernel's counts of bytes and time on connections: Linux's TCP_INFO (struct tcp_info in linux/tcp.h)


class Traffic(NamedTuple):
    """The traffic to a process since it was connected."""

    bytes: float = 0.0  # the bytes that the process has acknowledged
    seconds: float = 0.0  # the seconds in which bytes were under way and the process had room for more bytes


def sent() -> list[Traffic]:
    return [_traffic(data) for data in _data]


def _traffic(descriptors: list[int]) -> Traffic:
    """Returns the traffic of connections that carry the same messages together: the sum of bytes, the longest time."""
    total = Traffic()
    for descriptor in descriptors:
        connection = socket.socket(fileno=descriptor)
        try:
            info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _LENGTH)
        finally:
            connection.detach()  # the engine owns the descriptor
        if len(info) < _LENGTH:
            raise RuntimeError("Topology: expected a kernel that counts traffic (Linux 4.10 or later)")
        (acked,), (busy, full) = struct.unpack_from("=Q", info, _ACKED), struct.unpack_from("=QQ", info, _BUSY)
        total = Traffic(total.bytes + acked, max(total.seconds, (busy - full) / 1e6))
    return total
