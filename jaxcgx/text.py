"""Words and numbers as people write them: tables, rates (110mbit) and times (40ms)."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from jaxcgx.checks import unexpected

# The heads of the columns that are aligned to the right, besides those of milliseconds.
_NUMBERS = ("bytes", "uncompressed", "ratio", "error", "speed-up", "hours", "cost")


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a table as text. Columns of numbers are aligned to the right."""
    widths = [max(map(len, column)) for column in zip(head, *rows)]
    align = [str.rjust if name in _NUMBERS or name.endswith(" ms") else str.ljust for name in head]
    lines = [
        [aligned(cell, w) for aligned, cell, w in zip(align, row, widths)]
        for row in (head, ["-" * w for w in widths], *rows)
    ]
    return "\n".join("  ".join(line).rstrip() for line in lines)


def ratio(sent: float, raw: float) -> float:
    """Returns the uncompressed bytes per byte that is sent, or 1 if nothing is sent."""
    return raw / sent if sent else 1.0


def spell_sizes(sent: int, raw: int) -> tuple[str, str, str]:
    """Returns the cells for the columns "bytes", "uncompressed" and "ratio"."""
    return f"{sent:,}", f"{raw:,}", f"{ratio(sent, raw):.2f}"


class Totals:
    """A base class that sums `totals` over all axes."""

    totals: dict[Any, tuple[int, int]]  # {axes: (bytes, uncompressed bytes)}

    @property
    def bytes(self) -> int:
        """The bytes that are sent over all axes."""
        return sum(sent for sent, _ in self.totals.values())

    @property
    def raw_bytes(self) -> int:
        """The bytes that would be sent over all axes without compression."""
        return sum(raw for _, raw in self.totals.values())

    @property
    def ratio(self) -> float:
        """The uncompressed bytes per byte that is sent."""
        return ratio(self.bytes, self.raw_bytes)

    def spell_totals(self, head: str, rows: Sequence[tuple[str, int, int]]) -> str:
        """Returns a table of `rows` of (text below `head`, bytes, raw bytes), and their sum unless there is one row."""
        if len(rows) != 1:
            rows = [*rows, ("in all", self.bytes, self.raw_bytes)]
        return table((head, "bytes", "uncompressed", "ratio"), [(axes, *spell_sizes(*sizes)) for axes, *sizes in rows])


RATES = {"bit": 1, "kbit": 10**3, "mbit": 10**6, "gbit": 10**9}  # bit/s
TIMES = {"us": 1e-6, "ms": 1e-3, "s": 1.0}  # seconds


def _parse(place: str, text: Any, units: Mapping[str, float], example: str) -> float:
    found = re.fullmatch(rf"([0-9]+(?:\.[0-9]+)?)({'|'.join(units)})", text) if isinstance(text, str) else None
    if not found:
        kind = ValueError if isinstance(text, str) else TypeError
        raise unexpected(place, f'a number and one of {", ".join(units)}, as in "{example}"', repr(text), kind=kind)
    return float(found[1]) * units[found[2]]


def parse_rate(place: str, text: Any, most: int = 10**11) -> int:
    """Returns a rate such as "110mbit" in bit/s, at most `most`. Errors name the text's `place`."""
    rate = round(_parse(place, text, RATES, "110mbit"))
    if not 8_000 <= rate <= most:
        raise unexpected(place, f"a rate from 8kbit to {spell_rate(most)}", repr(text))
    return rate


def parse_time(place: str, text: Any) -> float:
    return _parse(place, text, TIMES, "40ms")


def spell_rate(rate: float) -> str:
    """Returns a rate in bit/s as a text that parse_rate reads."""
    unit = next(unit for unit in reversed(RATES) if rate >= RATES[unit] or unit == "bit")
    return f"{rate / RATES[unit]:.10g}{unit}"
