"""Draws pictures of overlays."""

import math
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxcgx.plan.overlay import Overlay

COLUMNS = 4
MOST = 8  # the most trees that are drawn; they have the largest shares


def draw_overlay(
    overlay: Overlay, path: str | pathlib.Path, rates: Any = None, names: Sequence[str] | None = None
) -> None:
    """Draws the trees of an overlay, with their shares, into a PNG or SVG file.

    Arrows point from children to parents, the direction of sums. Roots are filled. Links that are not in a tree are
    thin. Only the MOST trees with the largest shares are drawn.

    Args:
      overlay: the overlay.
      path: the path of the file.
      rates: the rates of the links in bytes per second, [ranks, ranks]. Slow links are red.
      names: the names of the ranks. None: their numbers.
    """
    from matplotlib import colormaps
    from matplotlib.figure import Figure  # imported here because matplotlib is optional

    n, total = overlay.ranks, sum(overlay.shares)
    names = list(map(str, range(n))) if names is None else names
    at = [(math.sin(2 * math.pi * r / n), math.cos(2 * math.pi * r / n)) for r in range(n)]
    speed = None if rates is None else np.minimum(rates, np.transpose(rates))
    fastest = 1.0 if speed is None else float(np.nanmax(np.where(np.eye(n, dtype=bool), np.nan, speed)))

    def color(i: int, j: int) -> Any:
        return "tab:blue" if speed is None else colormaps["RdYlGn"](float(speed[i, j]) / fastest)

    drawn = sorted(overlay.trees, key=lambda tree: -tree.share)[:MOST]
    columns = min(COLUMNS, len(drawn))
    rows = -(-len(drawn) // columns)
    figure = Figure(figsize=(2.4 * columns, 2.6 * rows), layout="constrained")
    for place, tree in zip(figure.subplots(rows, columns, squeeze=False).flat, drawn):
        place.set(title=f"{tree.share / total:.0%}, root {names[tree.root]}", xlim=(-1.4, 1.4), ylim=(-1.4, 1.4))
        for i in range(n):
            for j in range(i):
                place.plot(*zip(at[i], at[j]), color=color(i, j), linewidth=0.6, alpha=0.5, zorder=1)
        for child, parent in tree.links:
            arrow = dict(arrowstyle="-|>", color=color(child, parent), linewidth=2.5, shrinkA=11, shrinkB=11)
            place.annotate("", at[parent], at[child], arrowprops=arrow, zorder=2)
        for rank, (x, y) in enumerate(at):
            face = "black" if rank == tree.root else "white"
            place.scatter([x], [y], s=420, color=face, edgecolors="black", zorder=3)
            text = "white" if rank == tree.root else "black"
            place.text(x, y, names[rank], ha="center", va="center", color=text, fontsize=9, zorder=4)
    for place in figure.axes:
        place.set_axis_off()
        place.set_aspect("equal")
    figure.savefig(path, dpi=120)
