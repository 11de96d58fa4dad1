"""What the kernel has counted on connections: TCP_INFO of Linux (struct tcp_info in linux/tcp.h)."""

import socket
import struct
from collections.abc import Iterable
from typing import NamedTuple

_ACKED, _BUSY = 120, 168  # places: tcpi_bytes_acked; tcpi_busy_time and tcpi_rwnd_limited behind it
_LENGTH = 184


class Traffic(NamedTuple):
    """What has been sent to a process, since it was connected."""

    bytes: float = 0.0  # that it has acknowledged
    seconds: float = 0.0  # in which bytes were under way and it had room for more


def traffic(descriptors: Iterable[int]) -> Traffic:
    """What has been sent on connections that carry the same messages together."""
    total = Traffic()
    for descriptor in descriptors:
        connection = socket.socket(fileno=descriptor)
        try:
            info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _LENGTH)
        finally:
            connection.detach()  # it stays the engine's
        if len(info) < _LENGTH:
            raise RuntimeError("Topology: expected a kernel that counts traffic (Linux 4.10 or later)")
        (acked,), (busy, full) = struct.unpack_from("=Q", info, _ACKED), struct.unpack_from("=QQ", info, _BUSY)
        total = Traffic(total.bytes + acked, max(total.seconds, (busy - full) / 1e6))
    return total
