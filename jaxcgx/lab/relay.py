"""Holds what hosts send, as a program of its own, for kernels without netem.

    python relay.py SECONDS INNER OUTER [SECONDS INNER OUTER ...]

It carries frames between two network devices: from INNER to OUTER after SECONDS, from OUTER to INNER at once. Programs
on either side see one cable. The kernel hands over large TCP segments whole, with the header that says how they are
cut (PACKET_VNET_HDR), so that the relay keeps up with fast links. Only modules of Python itself: it starts at once.
"""

import collections
import contextlib
import select
import socket
import sys
import time

ALL = 3  # ETH_P_ALL: frames of every protocol
SOL_PACKET, VNET_HDR, IGNORE_OUTGOING = 263, 15, 23  # linux/if_packet.h
SNDBUFFORCE, RCVBUFFORCE = 32, 33  # asm/socket.h: past the limits of the system
MEMORY = 1 << 28  # bytes of a socket's buffers
LARGEST = 1 << 18  # bytes of a frame, and more
TURN = 64  # frames of a device before the others have their turn


def open_device(name: str) -> socket.socket:
    """A socket that sends and receives the frames of a device."""
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
    """Opens the devices, says so, and carries frames until it is ended."""
    ways: dict[socket.socket, tuple[socket.socket, float]] = {}  # from a device: to which, and after how long
    held: dict[socket.socket, collections.deque[tuple[float, bytes]]] = {}  # (when it is due, the frame), in order
    for seconds, *names in zip(*[iter(sys.argv[1:])] * 3):
        inner, outer = map(open_device, names)
        ways |= {inner: (outer, float(seconds)), outer: (inner, 0.0)}
        held |= {inner: collections.deque(), outer: collections.deque()}
    print("ready", flush=True)
    while True:
        due = min((frames[0][0] for frames in held.values() if frames), default=None)
        wait = None if due is None else max(0.0, due - time.monotonic())
        for device in select.select(list(ways), [], [], wait)[0]:
            with contextlib.suppress(BlockingIOError):
                for _ in range(TURN):
                    frame = device.recv(LARGEST)
                    held[device].append((time.monotonic() + ways[device][1], frame))
        now = time.monotonic()
        for device, frames in held.items():
            while frames and frames[0][0] <= now:
                with contextlib.suppress(OSError):  # a cut cable loses frames
                    ways[device][0].send(frames.popleft()[1])


if __name__ == "__main__":
    main()
