"""The common parts of the benchmarks' reports: the origin of the figures, the tables, and the files of both."""

import datetime
import importlib.metadata
import json
import os
import pathlib
import platform
import re
import statistics

from jaxcgx.native import registration

RESULTS = pathlib.Path(__file__).parent / "results"


def median(values):
    return round(statistics.median(map(float, values)), 4)


def rounded(values):
    return [round(float(v), 4) for v in values]


def mark(reached):
    return "✓" if reached else "✗"


def line(cells, width=36):
    return f"| {cells[0]:{width}} | " + " | ".join(f"{cell:>11}" for cell in cells[1:]) + " |"


def header(*cells, width=36):
    return [line(cells, width), line(["---", *["---:"] * (len(cells) - 1)], width)]


def _cpu_model():
    found = re.search(r"model name\s*: (.*)", pathlib.Path("/proc/cpuinfo").read_text())
    return found[1] if found else platform.machine()


class Report:
    """Lines that are printed as they come, and their data."""

    def __init__(self, command, repeats=None, **settings):
        # XLA's thread pool has a thread for each processor that this process may use.
        threads = len(os.sched_getaffinity(0))
        versions = dict(python=platform.python_version()) | {
            p: importlib.metadata.version(p) for p in ("jax", "jaxlib", "jaxcgx")
        }
        self.data = dict(
            command=command,
            date=datetime.date.today().isoformat(),
            cpu=_cpu_model(),
            threads=threads,
            versions=versions,
            native=registration.MODULE.build_info(),
            **settings,
        )
        if repeats:
            self.data["repeats"] = repeats
        self.text = []
        named = ", ".join(f"{name} {version}" for name, version in versions.items())
        self.show(
            f"Made by `{command}` on {self.data['date']}: {self.data['cpu']}, {threads} threads, "
            f"{self.data['native']['kernels']} "
            f"kernels, {named}." + (f" Medians of {repeats} repetitions." if repeats else "")
        )

    def show(self, *lines):
        print(*lines, sep="\n", flush=True)
        self.text.extend(lines)

    def write(self, folder, name):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.json").write_text(json.dumps(self.data, indent=1) + "\n")
        (folder / f"{name}.md").write_text("\n".join(self.text) + "\n")
