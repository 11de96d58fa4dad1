"""The speeds of links and kernels, for the estimates in exchange/costs.py. docs/planner.md has the sources.

The rate of a link is the rate that programs get. With 1 Gbit/s Ethernet it is 0.949 Gbit/s: frames, headers and
acknowledgements take the rest.
"""

import dataclasses
from typing import Any, NamedTuple

from jaxcgx.checks import check_choice, check_number, check_positive, set_field

PAYLOAD = 0.949 / 8  # bytes of payload for each bit of a link


class Ways(NamedTuple):
    """How a transport uses a link. Pairs are (value for two ranks, value for more ranks).

    `gather`, `exchange` and `shift` are factors: the time of the operation, divided by the time of sending and
    receiving the same bytes at once. A factor above 1 means half-duplex: one direction waits for the other.

    Attributes:
      gather: the factor of an all-gather.
      exchange: the factor of an all-to-all.
      shift: the factor of a shift, in which each rank sends to the next.
      latency: the seconds of a step, independent of its size.
      step_of_psum: the latency of a step of a plain psum, as a multiple of `latency`.
      step_of_shift: the same for a shift.
      pieces: whether kernels and bytes overlap, piece by piece.
    """

    gather: tuple[float, float] = (1, 1)
    exchange: tuple[float, float] = (1, 1)
    shift: tuple[float, float] = (1, 1)
    latency: float = 50e-6
    step_of_psum: float = 1
    step_of_shift: tuple[float, float] = (1, 1)
    pieces: bool = False


WAYS = {
    # XLA's collectives between CPU processes. The latency is between the latencies of two hosts with one core each
    # (0.33 ms) and of four hosts that share two cores (1.24 ms).
    "gloo": Ways(
        gather=(1.40, 1.06),
        exchange=(1.83, 1.70),
        shift=(1.80, 1.0),
        latency=500e-6,
        step_of_psum=0.65,
        step_of_shift=(1, 1.65),
    ),
    "tcp": Ways(latency=165e-6, pieces=True),
    # NCCL, MPI, and the memory of one process. These values are assumed, not measured.
    "duplex": Ways(),
}


def _check_from(function: str, argument: str, value: Any, least: float) -> Any:
    return check_number(function, argument, value, lambda x: x >= least, f"a number of at least {least:g}")


@dataclasses.dataclass(frozen=True)
class Network:
    """The speeds at which the ranks of an exchange send and compute.

    All ranks must have the same network, because it decides which schedule they use. So it is part of a plan
    (`Plan(network=...)`). The defaults are 1 Gbit/s Ethernet between machines with a few cores.

    Args:
      up: bytes per second that a rank sends.
      down: bytes per second that a rank receives. None: the same as `up`.
      latency: the seconds of a step, independent of its size. None: the latency of the transport.
      burst: bytes that a link passes at once after a pause, if a token bucket limits it.
      mover: who moves the bytes: "gloo", "tcp" or "duplex" (NCCL, MPI). None: the transport of the exchange.
      sharing: the number of ranks whose kernels take turns on one processor.
      encode: bytes of float32 per second that a kernel encodes, alone on the processor.
      decode: the same for decoding. For sparse codecs, it is in compressed bytes per second.
      reduce: the same for sums of encoded messages. The bytes of all messages count.
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
            set_field(self, name, check_positive)
        set_field(self, "burst", _check_from, 0)
        set_field(self, "sharing", _check_from, 1)
        if self.down is not None:
            set_field(self, "down", check_positive)
        if self.latency is not None:
            set_field(self, "latency", _check_from, 0)
        if self.mover is not None:
            set_field(self, "mover", check_choice, WAYS)

    @property
    def ways(self) -> Ways:
        """How `mover` uses a link."""
        return WAYS[self.mover or "duplex"]

    @property
    def step(self) -> float:
        """The latency of a step in seconds."""
        return self.ways.latency if self.latency is None else self.latency

    def wire(self, sent: float, steps: float, factor: float = 1, latency: float = 1) -> float:
        """Returns the seconds that a rank takes to send and receive bytes.

        The latency of one message overlaps in part with the bytes of another. So the time is between the larger of the
        two times and their sum; the root of the sum of their squares fits best.

        Args:
          sent: the bytes that a rank sends. It receives the same number of bytes.
          steps: the number of steps that wait for one another.
          factor: the factor of half-duplex, as in `Ways`.
          latency: the latency of a step, as a multiple of `step`.
        """
        down = self.down or self.up
        extra = max(0.0, (factor - 1) * sent - self.burst) / max(self.up, down)
        return float(((sent / min(self.up, down) + extra) ** 2 + (steps * latency * self.step) ** 2) ** 0.5)
