"""Measures how long the first commands of a new user take: `make demo` and `make recipe`, each in a fresh clone.

    python benchmarks/first_run.py [--out DIR]

A clone has the last commit. Its time contains its environment, the build and the installation.
"""

import argparse
import itertools
import os
import pathlib
import subprocess
import sys
import tempfile
import time

from report import RESULTS, Report, header, line, mark

ROOT = pathlib.Path(__file__).resolve().parent.parent
TARGETS = {"demo": ("examples/digits.py", 90), "recipe": ("recipes/train.py", 120)}  # the last command, the goal in s
CHARTS = [dict(table="rows", title="A first command", x="target", y=["installing_seconds", "seconds"])]
NOTES = """\
- Each target runs in a clone of its own. installing: making the environment, building, and installing, with packages
  from pip's cache where it has them. command: the program itself. Goals are those for 2 cores.
"""


def first_run(target, program):
    """Returns the seconds of (installing, the command) of `make TARGET` in a fresh clone of the repository."""
    inherited = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")}
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["git", "clone", "--quiet", ROOT, folder], check=True)
        words, times = ["make", "--trace", target], [time.monotonic()]
        with subprocess.Popen(words, cwd=folder, env=inherited, stdout=subprocess.PIPE, text=True) as make:
            for text in make.stdout:
                print(text, end="", file=sys.stderr)
                if len(times) == 1 and program in text:  # make shows a command before it starts it
                    times.append(time.monotonic())
        if make.returncode:
            raise subprocess.CalledProcessError(make.returncode, words)
        times.append(time.monotonic())
    installing, command = (round(after - before, 1) for before, after in itertools.pairwise(times))
    return installing, command


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=pathlib.Path, default=RESULTS, metavar="DIR", help="the folder of the results")
    args = parser.parse_args()
    report = Report("make bench-first-run", rows=[], charts=CHARTS)
    found = {target: first_run(target, program) for target, (program, _) in TARGETS.items()}
    report.show("", *header("seconds in a fresh clone", "installing", "command", "in all", "goal", ""))
    for target, (installing, command) in found.items():
        goal, whole = TARGETS[target][1], installing + command
        report.data["rows"].append(dict(target=target, installing_seconds=installing, seconds=command, goal=goal))
        cells = [f"{x:.1f}" for x in (installing, command, whole)]
        report.show(line([f"`make {target}`", *cells, f"<= {goal}", mark(whole <= goal)]))
    report.show("", *NOTES.splitlines())
    report.write(args.out, "first-run")


if __name__ == "__main__":
    main()
