"""Formats tables of words and numbers as text."""

from collections.abc import Sequence
from typing import Any

# The heads of the columns that are aligned to the right.
_NUMBERS = ("bytes", "uncompressed", "ratio", "error", "exchange ms", "exposed ms", "step ms", "speed-up")


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a table as text. Columns of numbers are aligned to the right."""
    widths = [max(map(len, column)) for column in zip(head, *rows)]
    lines = [
        [cell.rjust(w) if name in _NUMBERS else cell.ljust(w) for name, cell, w in zip(head, row, widths)]
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
        """Returns a table of `rows` as text, with their sum in a last row unless there is exactly one row.

        `head` is the title of the first column. Each of the `rows` is (text of the axes, bytes, uncompressed bytes).
        """
        if len(rows) != 1:
            rows = [*rows, ("in all", self.bytes, self.raw_bytes)]
        return table((head, "bytes", "uncompressed", "ratio"), [(axes, *spell_sizes(*sizes)) for axes, *sizes in rows])
