"""Reads the kernel's counters of the links of a network.

The counters are those of the token buckets (`tc -s qdisc`). They count the packets that leave the buckets, each with
the Ethernet, IP and TCP headers that it has on the wire. If the kernel passes on many packets as one large packet, they
still count the headers of each. The counters of the devices (`ip -s link`) count the headers of a large packet once.
"""

import concurrent.futures
import ctypes
import dataclasses
import os
import socket
import struct
import time
from collections.abc import Iterator, Sequence

from jaxcgx.lab.network import Lab

ETHERNET, IP, TCP = 14, 20, 32  # bytes of a packet's headers; TCP's include the timestamps that Linux sends
CLONE_NEWNET = 0x40000000
GET_QDISC, NEW_QDISC, DONE = 38, 36, 3  # linux/rtnetlink.h
REQUEST_DUMP = 0x301  # NLM_F_REQUEST | NLM_F_DUMP
KIND, STATS2, BASIC, QUEUE = 1, 7, 1, 3  # attributes of linux/rtnetlink.h and linux/gen_stats.h


@dataclasses.dataclass(frozen=True, slots=True)
class LinkTraffic:
    """The traffic in one direction of a link."""

    bytes: int = 0  # including the headers of Ethernet, IP and TCP
    packets: int = 0
    dropped: int = 0  # packets that found the queue full

    @property
    def payload(self) -> int:
        """The bytes of TCP's payload: all bytes without the headers of all packets, also of acknowledgements."""
        return self.bytes - (ETHERNET + IP + TCP) * self.packets

    def __sub__(self, other: "LinkTraffic") -> "LinkTraffic":
        return LinkTraffic(*(a - b for a, b in zip(dataclasses.astuple(self), dataclasses.astuple(other))))


History = list[tuple[float, list[tuple[LinkTraffic, LinkTraffic]]]]  # (seconds, (sent, received) of each host)


def _attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    while len(data) >= 4:
        size, kind = struct.unpack_from("HH", data)
        yield kind & 0x3FFF, data[4:size]
        data = data[(size + 3) & ~3 :]


def _parse(message: bytes) -> tuple[int, LinkTraffic] | None:
    """Returns (device, traffic) of a message about a token bucket; None for other messages."""
    found = dict(_attributes(message[20:]))
    if found.get(KIND) != b"tbf\0":
        return None
    stats = dict(_attributes(found[STATS2]))
    drops = struct.unpack_from("III", stats[QUEUE])[2]
    return struct.unpack_from("i", message, 4)[0], LinkTraffic(*struct.unpack_from("QI", stats[BASIC]), drops)


def _enter(name: str, devices: Sequence[str]) -> tuple[socket.socket, list[int]]:
    with open(f"/run/netns/{name}") as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"setns: {os.strerror(ctypes.get_errno())}")
    made = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)  # 0: NETLINK_ROUTE
    return made, [socket.if_nametoindex(device) for device in devices]


class _Namespace:
    """A netlink socket in a namespace, and the indices of devices there."""

    def __init__(self, name: str, devices: Sequence[str]) -> None:
        with concurrent.futures.ThreadPoolExecutor(1) as thread:  # because setns changes the namespace of its thread
            entered = thread.submit(_enter, name, devices).result()
        self.socket: socket.socket = entered[0]
        self.devices: list[int] = entered[1]

    def read(self) -> list[LinkTraffic]:
        self.socket.send(struct.pack("IHH28x", 36, GET_QDISC, REQUEST_DUMP))
        found: dict[int, LinkTraffic] = {}
        while True:
            data = self.socket.recv(1 << 20)
            while data:
                size, kind = struct.unpack_from("IH", data)
                if kind == DONE:
                    return [found.get(device, LinkTraffic()) for device in self.devices]
                if kind == NEW_QDISC and (parsed := _parse(data[16:size])):
                    found[parsed[0]] = parsed[1]
                data = data[(size + 3) & ~3 :]


class Counters:
    """The counters of a lab's links. A `with` statement opens and closes them."""

    def __init__(self, lab: Lab) -> None:
        self.lab: Lab = lab

    def __enter__(self) -> "Counters":
        hosts = range(self.lab.hosts)
        self.ups: list[_Namespace] = [_Namespace(self.lab.namespace(i), ["eth0"]) for i in hosts]
        self.downs: _Namespace = _Namespace(self.lab.namespace("switch"), [f"port{i}" for i in hosts])
        self.start: float = time.monotonic()
        self.history: History = [(0.0, self.read())]
        return self

    def __exit__(self, *_: object) -> None:
        for namespace in [*self.ups, self.downs]:
            namespace.socket.close()

    def read(self) -> list[tuple[LinkTraffic, LinkTraffic]]:
        """Returns (sent, received) of each host since the lab began."""
        return list(zip((up.read()[0] for up in self.ups), self.downs.read()))

    def note(self) -> None:
        self.history.append((time.monotonic() - self.start, self.read()))


def busiest(times: Sequence[float], counts: Sequence[int]) -> float:
    """Returns the most bytes in any second, from the bytes until then that were counted at these times."""
    best, first = 0.0, 0
    for last in range(1, len(times)):
        while first + 1 < last and times[last] - times[first + 1] >= 1:
            first += 1
        if times[last] - times[first] >= 1 or last == len(times) - 1:
            best = max(best, (counts[last] - counts[first]) / max(times[last] - times[first], 1))
    return best
