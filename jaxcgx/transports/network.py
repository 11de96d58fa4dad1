"""How fast links and kernels are. exchange/costs.py estimates times from that; docs/planner.md has the sources.

A rate of links is what programs get: 0.949 of what 1 Gbit/s Ethernet has, as frames, headers and acknowledgements need
the rest.
"""

import dataclasses
from typing import Any, NamedTuple

from jaxcgx.checks import check_choice, check_field, check_number, check_positive

PAYLOAD = 0.949 / 8  # bytes of payload for each bit of a link


class Ways(NamedTuple):
    """How well a transport uses a link. A pair has a number for two ranks, and one for more.

    A factor is a time over that of the same bytes in full duplex. With half-duplex it is more than 1: one direction
    waits for the other.
    """

    gather: tuple[float, float] = (1, 1)
    exchange: tuple[float, float] = (1, 1)
    shift: tuple[float, float] = (1, 1)
    latency: float = 50e-6  # seconds of a step, whatever its size
    step_of_psum: float = 1  # the same of a step of a plain psum, as a multiple
    step_of_shift: tuple[float, float] = (1, 1)
    pieces: bool = False  # kernels and bytes overlap, piece by piece


WAYS = {
    # XLA's collectives between CPU processes. The latency is between that of two hosts with a core each (0.33 ms) and
    # that of four hosts on two cores (1.24 ms).
    "gloo": Ways(
        gather=(1.40, 1.06),
        exchange=(1.83, 1.70),
        shift=(1.80, 1.0),
        latency=500e-6,
        step_of_psum=0.65,
        step_of_shift=(1, 1.65),
    ),
    "tcp": Ways(latency=165e-6, pieces=True),
    # NCCL, MPI, the memory of one process. An assumption, and not a measurement.
    "duplex": Ways(),
}


def _check_from(function: str, argument: str, value: Any, least: float) -> Any:
    return check_number(function, argument, value, lambda x: x >= least, f"a number of at least {least:g}")


def _check_latency(function: str, argument: str, value: Any) -> Any:
    return None if value is None else _check_from(function, argument, value, 0)


def _check_mover(function: str, argument: str, value: Any) -> Any:
    return None if value is None else check_choice(function, argument, value, WAYS)


@dataclasses.dataclass(frozen=True)
class Network:
    """How fast the ranks of an exchange send and compute.

    All ranks must have the same one, because it decides which schedule they take. So it travels in a plan
    (`Plan(network=...)`). The defaults are 1 Gbit/s Ethernet between machines with a few cores.

    Args:
      up: bytes per second that a rank sends.
      down: bytes per second that a rank receives. None: as many.
      latency: seconds that a step takes whatever its size. None: those of the transport.
      burst: bytes that a link passes at once after a pause. Such links are limited by a token bucket.
      mover: who moves the bytes: "gloo", "tcp" or "duplex" (NCCL, MPI). None: the transport of the exchange.
      sharing: ranks whose kernels take turns on one processor.
      encode: bytes of float32 per second that a kernel encodes, alone on the processor.
      decode: the same for decoding.
      reduce: the same for sums of encoded messages, counted by the float32 of all messages.
    """

    up: float = 1e9 * PAYLOAD
    down: float | None = None
    latency: float | None = None
    burst: float = 0
    mover: str | None = None
    sharing: float = 1
    encode: float = 10e9
    decode: float = 10e9
    reduce: float = 20e9

    def __post_init__(self) -> None:
        for name in ("up", "encode", "decode", "reduce"):
            check_field(self, name, check_positive)
        if self.down is not None:
            check_field(self, "down", check_positive)
        check_field(self, "latency", _check_latency)
        check_field(self, "burst", _check_from, 0)
        check_field(self, "mover", _check_mover)
        check_field(self, "sharing", _check_from, 1)

    @property
    def ways(self) -> Ways:
        return WAYS[self.mover or "duplex"]

    @property
    def step(self) -> float:
        """The latency of a step in seconds."""
        return self.ways.latency if self.latency is None else self.latency

    def wire(self, sent: float, steps: float, factor: float = 1, latency: float = 1) -> float:
        """Seconds in which a rank sends and receives bytes.

        The latency of one message and the bytes of another overlap in part. The root of the sum of squares fits best
        between their maximum and their sum.

        Args:
          sent: the bytes that a rank sends. It receives as many.
          steps: how many steps wait for one another.
          factor: of half-duplex, as in `Ways`.
          latency: of a step, as a multiple.
        """
        down = self.down or self.up
        extra = max(0.0, (factor - 1) * sent - self.burst) / max(self.up, down)
        return float(((sent / min(self.up, down) + extra) ** 2 + (steps * latency * self.step) ** 2) ** 0.5)
