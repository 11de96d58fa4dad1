"""Tables of words and numbers, as text."""

from collections.abc import Sequence
from typing import Any

# Heads of columns that are aligned to the right.
_NUMBERS = ("bytes", "uncompressed", "ratio", "error", "exchange ms", "exposed ms", "step ms", "speed-up")


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns under their heads, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(head, *rows)]
    lines = [
        [cell.rjust(w) if name in _NUMBERS else cell.ljust(w) for name, cell, w in zip(head, row, widths)]
        for row in (head, ["-" * w for w in widths], *rows)
    ]
    return "\n".join("  ".join(line).rstrip() for line in lines)


def ratio(sent: float, raw: float) -> float:
    """Uncompressed bytes for each byte that is sent."""
    return raw / sent if sent else 1.0


def spell_sizes(sent: int, raw: int) -> tuple[str, str, str]:
    """Cells under "bytes", "uncompressed" and "ratio"."""
    return f"{sent:,}", f"{raw:,}", f"{ratio(sent, raw):.2f}"


class Totals:
    """Sums over all axes, for whatever has `totals`."""

    totals: dict[Any, tuple[int, int]]  # {axes: (bytes, the same uncompressed)}

    @property
    def bytes(self) -> int:
        """The bytes over all axes."""
        return sum(sent for sent, _ in self.totals.values())

    @property
    def raw_bytes(self) -> int:
        """The bytes over all axes without compression."""
        return sum(raw for _, raw in self.totals.values())

    @property
    def ratio(self) -> float:
        """Uncompressed bytes for each byte that is sent."""
        return ratio(self.bytes, self.raw_bytes)

    def spell_totals(self, head: str, rows: Sequence[tuple[str, int, int]]) -> str:
        """A table of `rows`, (axes in words, bytes, the same uncompressed), and their sum where there are several."""
        if len(rows) != 1:
            rows = [*rows, ("in all", self.bytes, self.raw_bytes)]
        return table((head, "bytes", "uncompressed", "ratio"), [(axes, *spell_sizes(*sizes)) for axes, *sizes in rows])
