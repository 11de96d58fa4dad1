"""The common parts of the benchmarks' reports: tables in Markdown, and files of tables and data.

jaxcgx/report/results.py defines the format of the data. `python -m jaxcgx report` draws it.
"""

import argparse
import contextlib
import json
import pathlib
import shlex
import statistics
import sys

from jaxcgx.lab import why_not
from jaxcgx.lab.network import CONGESTION
from jaxcgx.report import results

sys.path.append(str(pathlib.Path(__file__).parents[1] / "tests"))
from started import free_port as free_port  # for the scripts that start processes

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


def congestion():
    """Returns the congestion control of TCP that hosts of the lab have."""
    settings = pathlib.Path("/proc/sys/net/ipv4")
    allowed = (settings / "tcp_allowed_congestion_control").read_text().split()
    return CONGESTION if CONGESTION in allowed else (settings / "tcp_congestion_control").read_text().strip()


def between_hosts(parser, target, run_rank):
    """Parses the arguments of a benchmark that starts itself as ranks in hosts. A rank does its part, and ends here.

    Returns (the arguments, the command for the report, the folder of the results or None).
    """
    parser.add_argument("--out", type=pathlib.Path, metavar="DIR", help="where the results are written")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    args, given, script = parser.parse_args(), sys.argv[1:], pathlib.Path(sys.argv[0]).name
    if args.rank:
        run_rank(**json.loads(args.rank))
        sys.exit()
    if why := why_not():
        sys.exit(f"{script}: {why}")
    command = shlex.join(["python", f"benchmarks/{script}", *given]) if given else target
    return args, command, args.out or (None if given else RESULTS)


class Report:
    """Lines that are printed at once, and their data."""

    def __init__(self, command, repeats=None, **settings):
        self.data = results.origin(command) | settings
        if repeats:
            self.data["repeats"] = repeats
        self.text = []
        named = ", ".join(f"{name} {version}" for name, version in self.data["versions"].items())
        self.show(
            f"Made by `{command}` on {self.data['date']}: {self.data['cpu']}, {self.data['threads']} threads, "
            f"{self.data['native']['kernels']} "
            f"kernels, {named}." + (f" Medians of {repeats} repetitions." if repeats else "")
        )

    def show(self, *lines):
        print(*lines, sep="\n", flush=True)
        self.text.extend(lines)

    def write(self, folder, name):
        results.write(folder / f"{name}.json", self.data)
        (folder / f"{name}.md").write_text("\n".join(self.text) + "\n")


class Growing(Report):
    """A report whose file gets every row as soon as it is measured.

    It begins with the rows that the file already has from the same command. They are not measured again, so a
    measurement that was interrupted continues.
    """

    def __init__(self, command, file, tables, **settings):
        super().__init__(command, **{name: [] for name in tables}, **settings)
        self.file = file
        with contextlib.suppress(FileNotFoundError):
            old = results.read(file)
            if old["command"] == command:
                self.data |= {name: old[name] for name in tables if name in old}

    def has(self, table, **where):
        """Returns whether a table has a row with these values."""
        return any(where.items() <= row.items() for row in self.data[table])

    def add(self, table, *rows):
        self.data[table] += rows
        results.write(self.file, self.data)
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
