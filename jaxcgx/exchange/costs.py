"""The time that an exchange takes. `schedule="auto"` decides by it, and all constants of that choice are here.

A plan with `prefer="bytes"` decides by the bytes alone, for networks whose bytes cost money or much more than their
latency.

A rank sends a message to W - 1 others. The message has `wire` compressed bytes, and had `raw` bytes of float32 before.

- two_shot has two exchanges. In each a rank sends W - 1 rows of wire / W bytes. Kernels encode the message, add up one
  W-th of it from W ranks, encode that sum, and decode the whole.
- one_shot has one exchange. A rank sends W - 1 rows of `wire` bytes. Kernels encode once and decode W messages. Two
  ranks send the same number of bytes as with two_shot, in one exchange instead of two, with one rounding instead of
  two. With more ranks it wins only while messages are so small that a row costs its latency, not its bytes.
- ring sends as many bytes as two_shot, in W - 1 steps that wait for one another instead of one exchange, and rounds at
  every step. It never wins on a network where any two ranks communicate at full speed, so "auto" never chooses it. It
  is for networks whose links form a ring.

A sparse codec may need more bytes for sums (`back`) than for leaves, because sums must hold everything that was sent.
Both schedules then send nearly the same bytes, and one_shot wins. With many ranks two_shot wins again: sums are then
so dense that they need shorter indices, or none. Decoding a sparse message costs its bytes, not its elements, most of
which are 0.

The constants describe the network that compression is for: 1 Gbit/s Ethernet between machines with a few cores.
"""

LATENCY = 50e-6  # seconds that a row costs whatever its size: a system call, a switch, a wake-up
BANDWIDTH = 125e6  # bytes per second that a rank sends
KERNEL = 10e9  # bytes of float32 per second that a kernel encodes or decodes


def seconds(schedule: str, ranks: int, raw: int, wire: int, back: int | None = None, sparse: bool = False) -> float:
    """An upper bound of the seconds that a sum to all ranks takes.

    Args:
      schedule: "one_shot" or "two_shot".
      ranks: the number of ranks.
      raw: the bytes of the message in float32.
      wire: the compressed bytes of the message.
      back: the compressed bytes of the sum. None means as many as `wire`.
      sparse: whether decoding costs the compressed bytes instead of the float32 bytes.
    """
    others, back = ranks - 1, wire if back is None else back
    if schedule == "one_shot":
        decoded = wire * ranks if sparse else raw * ranks
        return others * (LATENCY + wire / BANDWIDTH) + (raw + decoded) / KERNEL
    decoded = wire + back if sparse else 2 * raw
    return others * (2 * LATENCY + (wire + back) / ranks / BANDWIDTH) + ((1 + 1 / ranks) * raw + decoded) / KERNEL


def choose(ranks: int, raw: int, wire: int, back: int | None = None, sparse: bool = False, prefer: str = "time") -> str:
    """The schedule that takes the least time, or sends the fewest bytes where `prefer` is "bytes".

    If both take or send the same, it is one_shot, which rounds less often.
    """

    def cost(schedule: str) -> float:
        if prefer == "bytes":
            return wire if schedule == "one_shot" else (wire + (wire if back is None else back)) / ranks
        return seconds(schedule, ranks=ranks, raw=raw, wire=wire, back=back, sparse=sparse)

    return min(("one_shot", "two_shot"), key=cost)
