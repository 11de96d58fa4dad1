"""What an exchange takes: how `schedule="auto"` decides. All constants of the choice stand here.

A rank sends a message of `wire` compressed bytes, which were `raw` bytes of float32 before, to W - 1 others.

- two_shot: each of its two exchanges sends W - 1 rows of wire / W bytes. Kernels encode the message, sum a W-th of it
from
  W ranks, encode that, and decode the whole.
- one_shot: one exchange, but W - 1 rows of all the bytes; kernels encode once and decode W messages. For two ranks that
is
  the same number of bytes as two_shot in one exchange instead of two, with one rounding instead of two. For more it
  wins
  while messages are so small that a row costs its latency, not its bytes.
- ring: as many bytes as two_shot, in W - 1 steps that wait for one another instead of one exchange, and a rounding at
every
  step. On a network where any two ranks talk at full speed it never wins, so "auto" never takes it; it is for
  those whose links form a ring.

A sparse codec sends sums in more bytes than leaves, `back`, if they are to have all that was sent: then both send
nearly the same
bytes, and one_shot wins until there are so many ranks that sums are dense enough for shorter indices, or none. And what
a sparse
codec decodes costs its bytes, not the elements' that are 0.

The constants are of the network that compression is for, 1 Gbit/s Ethernet between machines with a few cores.
"""

LATENCY = 50e-6  # seconds that a row costs whatever its size: a system call, a switch, a wake-up
BANDWIDTH = 125e6  # bytes per second that a rank sends
KERNEL = 10e9  # bytes of float32 per second that a kernel encodes or decodes


def seconds(schedule: str, ranks: int, raw: int, wire: int, back: int | None = None, sparse: bool = False) -> float:
    """A bound of the time that a reduction to all takes. back: bytes of the sum, if not those of the message."""
    others, back = ranks - 1, wire if back is None else back
    if schedule == "one_shot":
        decoded = wire * ranks if sparse else raw * ranks
        return others * (LATENCY + wire / BANDWIDTH) + (raw + decoded) / KERNEL
    decoded = wire + back if sparse else 2 * raw
    return others * (2 * LATENCY + (wire + back) / ranks / BANDWIDTH) + ((1 + 1 / ranks) * raw + decoded) / KERNEL


def choose(ranks: int, raw: int, wire: int, back: int | None = None, sparse: bool = False) -> str:
    """The schedule with the least time; of equals the one with fewer roundings."""
    return min(("one_shot", "two_shot"), key=lambda schedule: seconds(schedule, ranks, raw, wire, back, sparse))
