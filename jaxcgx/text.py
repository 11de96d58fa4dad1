"""Tables of words and numbers, as text."""


def table(head, rows):
    """Columns under their heads, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(head, *rows)]
    lines = [
        [
            cell.rjust(w) if name in ("bytes", "uncompressed", "ratio", "error") else cell.ljust(w)
            for name, cell, w in zip(head, row, widths)
        ]
        for row in (head, ["-" * w for w in widths], *rows)
    ]
    return "\n".join("  ".join(line).rstrip() for line in lines)


def ratio(sent, raw):
    """Uncompressed bytes for each byte that is sent."""
    return raw / sent if sent else 1.0


def spell_sizes(sent, raw):
    """Cells under "bytes", "uncompressed" and "ratio"."""
    return f"{sent:,}", f"{raw:,}", f"{ratio(sent, raw):.2f}"


class Totals:
    """What has `totals`, {axes: (bytes, the same uncompressed)}, has them in all."""

    @property
    def bytes(self):
        """Over all axes."""
        return sum(sent for sent, _ in self.totals.values())

    @property
    def raw_bytes(self):
        """The same without compression."""
        return sum(raw for _, raw in self.totals.values())

    @property
    def ratio(self):
        return ratio(self.bytes, self.raw_bytes)

    def spell_totals(self, head, rows):
        """A table of `rows`, (axes in words, bytes, the same uncompressed), and in all."""
        if len(rows) != 1:
            rows = [*rows, ("in all", self.bytes, self.raw_bytes)]
        return table((head, "bytes", "uncompressed", "ratio"), [(axes, *spell_sizes(*sizes)) for axes, *sizes in rows])
