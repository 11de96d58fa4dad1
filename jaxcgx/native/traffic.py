"""The kernel's counts of bytes and time on connections: Linux's TCP_INFO (struct tcp_info in linux/tcp.h)."""

import socket
import struct
from collections.abc import Iterable
from typing import NamedTuple

_ACKED, _BUSY = 120, 168  # offsets of tcpi_bytes_acked and tcpi_busy_time, which tcpi_rwnd_limited follows
_LENGTH = 184


class Traffic(NamedTuple):
    """The traffic to a process since it was connected."""

    bytes: float = 0.0  # the bytes that the process has acknowledged
    seconds: float = 0.0  # the seconds in which bytes were under way and the process had room for more bytes


def traffic(descriptors: Iterable[int]) -> Traffic:
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
