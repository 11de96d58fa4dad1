"""python -m jaxcgx report: makes tables, plots and an HTML page of results. And draws pictures of overlays."""

import base64
import html
import io
import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxcgx.checks import is_number
from jaxcgx.plan.overlay import Overlay
from jaxcgx.report import results
from jaxcgx.report.results import Data
from jaxcgx.text import table

STYLE = """\
body { font: 15px/1.5 sans-serif; max-width: 75em; margin: 2em auto; padding: 0 1em; color: #222 }
table { border-collapse: collapse; font-size: 13px; display: block; overflow-x: auto }
th, td { border-bottom: 1px solid #ddd; padding: .2em .7em; text-align: right; white-space: nowrap }
th:first-child, td:first-child { text-align: left }
img { max-width: 100% }
"""
MOST = 60  # the most rows of a table that is shown; a longer table is only in the plots
TREES, COLUMNS = 8, 4  # the most trees of an overlay that are drawn, and how many of them side by side
SPREAD = "Of repeated measurements: the median, and behind it the lower and the upper quartile."


def spell_cell(value: Any) -> str:
    """Returns a value as text for people. A list of numbers becomes its median and, in brackets, its quartiles."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.4g}"
    if isinstance(value, list) and value and all(is_number(each) for each in value):
        low, middle, high = map(spell_cell, results.quartiles(value))
        return f"{middle} [{low}, {high}]"
    return str(value)


def spell_table(rows: Sequence[Data]) -> tuple[list[str], list[list[str]]]:
    """Returns (head, lines) of a table as text. The head has the units."""
    cells = [results.flat(row) for row in rows]
    names = list(dict.fromkeys(name for row in cells for name in row))
    lines = [[spell_cell(row.get(name)) for name in names] for row in cells]
    return [results.spell_name(name) for name in names], lines


def spell_origin(data: Data) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in data["versions"].items())
    return f"Made by `{data['command']}` on {data['date']}: {data['cpu']}, {data['threads']} threads, {versions}."


def spell(name: str, data: Data) -> str:
    """Returns all tables of a file as text. For a table with more than MOST rows, it is only the number of rows."""
    parts = [f"{name}\n{'=' * len(name)}\n{spell_origin(data)}"]
    for title, rows in results.tables(data).items():
        shown = table(*spell_table(rows)) if len(rows) <= MOST else f"{len(rows)} rows"
        parts.append(f"{title}\n{shown}")
    return "\n\n".join([*parts, SPREAD])


def draw(chart: Data, rows: Sequence[Data], title: str) -> bytes:
    """Returns a plot as PNG: a line, or bars over words, for each value of the key `by` and each of the keys `y`."""
    from matplotlib.figure import Figure  # imported here because matplotlib is optional

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    lines: dict[str, list[tuple[Any, float, float, float]]] = {}  # (x, median, lower and upper quartile)
    for row in rows:
        for y in chart["y"]:
            value = row.get(y)
            if value is not None:
                low, middle, high = results.quartiles(value if isinstance(value, list) else [value])
                label = results.spell_name(y).partition(" (")[0]  # without the unit
                if "by" in chart:
                    which = row[chart["by"]]
                    label = f"{which}, {label}" if isinstance(which, str) else f"{chart['by']} {which} {label}"
                lines.setdefault(label, []).append((row[chart["x"]], middle, low, high))
    words = list(dict.fromkeys(row[chart["x"]] for row in rows)) if isinstance(rows[0][chart["x"]], str) else None
    for number, (label, points) in enumerate(lines.items()):
        xs, middles, lows, highs = zip(*points)
        spread = [[m - low for m, low in zip(middles, lows)], [high - m for m, high in zip(middles, highs)]]
        if words:
            width = 0.8 / len(lines)
            places = [words.index(x) + number * width for x in xs]
            axes.bar(places, middles, width, yerr=spread, label=label)
        elif any(map(any, spread)):
            axes.errorbar(xs, middles, yerr=spread, marker="o", capsize=3, label=label)
        else:
            axes.plot(xs, middles, marker="o" if len(xs) <= 20 else "", label=label)
    if words:
        axes.set_xticks(
            [i + 0.4 - 0.4 / len(lines) for i in range(len(words))], words, rotation=90 if len(words) > 12 else 20
        )
    if chart.get("log"):
        if not words:
            axes.set_xscale("log", base=2)
        axes.set_yscale("log")
    axes.set(title=title, xlabel=results.spell_name(chart["x"]), ylabel=results.unit(chart["y"][0]))
    axes.grid(alpha=0.3)
    if len(lines) > 1:
        axes.legend(fontsize="small")
    found = io.BytesIO()
    figure.savefig(found, format="png", dpi=120)
    return found.getvalue()


def plots(data: Data) -> dict[str, bytes]:
    """Returns {title: PNG} for all plots of a file. A chart has a plot for each value of the key `panel`."""
    found: dict[str, bytes] = {}
    for chart in data.get("charts", []):
        panels: dict[Any, list[Data]] = {}
        for row in map(results.flat, results.tables(data).get(chart["table"], [])):
            panels.setdefault(row[chart["panel"]] if "panel" in chart else None, []).append(row)
        for panel, rows in panels.items():
            title = chart["title"] if panel is None else f"{chart['title']}: {panel}"
            found[title] = draw(chart, rows, title)
    return found


def page(files: Mapping[str, Data], drawn: Mapping[str, Mapping[str, bytes]]) -> str:
    """Returns an HTML page of files, {name: data}, with embedded pictures, {name: {title: PNG}}."""
    parts: list[str] = []
    for name, data in files.items():
        parts.append(f"<h2>{html.escape(name)}</h2>\n<p>{html.escape(spell_origin(data))}</p>")
        for title, png in drawn.get(name, {}).items():
            source = base64.b64encode(png).decode()
            parts.append(f'<p><img alt="{html.escape(title)}" src="data:image/png;base64,{source}"></p>')
        for title, rows in results.tables(data).items():
            if len(rows) <= MOST:
                head, lines = spell_table(rows)
                body = [_row("th", head), *(_row("td", line) for line in lines)]
                parts.append(f"<h3>{html.escape(title)}</h3>\n<table>\n" + "\n".join(body) + "\n</table>")
    text = "\n".join(parts)
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>Results</title>\n'
        f"<style>\n{STYLE}</style>\n</head>\n<body>\n<h1>Results</h1>\n{text}\n<p>{SPREAD}</p>\n</body>\n</html>\n"
    )


def _row(tag: str, cells: Sequence[str]) -> str:
    return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"


def save(folder: pathlib.Path, files: Mapping[str, Data]) -> list[str]:
    """Writes the plots and the page into a folder, and returns lines with their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    said: list[str] = []
    drawn: dict[str, dict[str, bytes]] = {}
    try:
        drawn = {name: plots(data) for name, data in files.items()}
    except ImportError:
        said.append("no plots: they need matplotlib, as in pip install 'jaxcgx[examples]'")
    for name, titles in drawn.items():
        for number, png in enumerate(titles.values(), 1):
            path = folder / (f"{name}-{number}.png" if len(titles) > 1 else f"{name}.png")
            path.write_bytes(png)
            said.append(f"written: {path}")
    path = folder / "report.html"
    path.write_text(page(files, drawn))
    return [*said, f"written: {path}"]


def draw_overlay(
    overlay: Overlay, path: str | pathlib.Path, rates: Any = None, names: Sequence[str] | None = None
) -> None:
    """Draws the trees of an overlay, with their shares, into a PNG or SVG file.

    Arrows point from children to parents, the direction of sums. Roots are filled. Links that are not in a tree are
    thin. Only the 8 trees with the largest shares are drawn.

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

    drawn = sorted(overlay.trees, key=lambda tree: -tree.share)[:TREES]
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
