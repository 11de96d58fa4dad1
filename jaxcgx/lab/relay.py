"""A program that delays and loses the frames that hosts send, for kernels without netem.

    python relay.py SECONDS JITTER LOSS INNER OUTER [SECONDS JITTER LOSS INNER OUTER ...]

It carries frames between two network devices: from INNER to OUTER after SECONDS and at most JITTER more, in order and
without a share of LOSS; from OUTER to INNER at once. Programs on both sides see a single cable. The kernel passes large
TCP segments whole, with a header that says how they are cut into packets (PACKET_VNET_HDR). So the relay keeps up with
fast links. It imports only Python's standard library, to start quickly.
"""

import collections
import contextlib
import random
import select
import socket
import sys
import time

ALL = 3  # ETH_P_ALL: frames of every protocol
SOL_PACKET, VNET_HDR, IGNORE_OUTGOING = 263, 15, 23  # linux/if_packet.h
SNDBUFFORCE, RCVBUFFORCE = 32, 33  # asm/socket.h: buffer sizes above the limits of the system
MEMORY = 1 << 28  # bytes of each of a socket's buffers
LARGEST = 1 << 18  # bytes, more than any frame has
TURN = 64  # the most frames that are read from a device before it is another device's turn


def open_device(name: str) -> socket.socket:
    """Opens a socket that sends and receives the frames of a device."""
    device = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    for level, option, value in (
        (SOL_PACKET, VNET_HDR, 1),
        (SOL_PACKET, IGNORE_OUTGOING, 1),
        (socket.SOL_SOCKET, SNDBUFFORCE, MEMORY),
        (socket.SOL_SOCKET, RCVBUFFORCE, MEMORY),
    ):
        device.setsockopt(level, option, value)
    device.setblocking(False)
    device.bind((name, ALL))
    return device


def main() -> None:
    """Opens the devices, prints "ready", and carries frames until the process is ended."""
    # From a device: (to this device, after these seconds, and at most these more, a share that is lost).
    ways: dict[socket.socket, tuple[socket.socket, float, float, float]] = {}
    held: dict[socket.socket, collections.deque[tuple[float, bytes]]] = {}  # from a device: (due time, frame), in order
    for seconds, jitter, loss, *names in zip(*[iter(sys.argv[1:])] * 5):
        inner, outer = map(open_device, names)
        ways |= {inner: (outer, float(seconds), float(jitter), float(loss)), outer: (inner, 0.0, 0.0, 0.0)}
        held |= {inner: collections.deque(), outer: collections.deque()}
    print("ready", flush=True)
    while True:
        due = min((frames[0][0] for frames in held.values() if frames), default=None)
        wait = None if due is None else max(0.0, due - time.monotonic())
        for device in select.select(list(ways), [], [], wait)[0]:
            with contextlib.suppress(BlockingIOError):
                _, seconds, jitter, loss = ways[device]
                for _ in range(TURN):
                    frame = device.recv(LARGEST)
                    if random.random() >= loss:
                        held[device].append((time.monotonic() + seconds + random.uniform(0, jitter), frame))
        now = time.monotonic()
        for device, frames in held.items():
            while frames and frames[0][0] <= now:
                with contextlib.suppress(OSError):  # if the cable is cut, frames are lost
                    ways[device][0].send(frames.popleft()[1])


if __name__ == "__main__":
    main()
