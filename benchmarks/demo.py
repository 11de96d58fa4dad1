"""Runs the demonstration (examples/digits.py) with all of its steps.

    python benchmarks/demo.py [--out DIR]

Keeps its curves, and draws README's picture.
"""

import argparse
import pathlib
import statistics
import sys

from report import RESULTS, Report, header, line

ROOT = pathlib.Path(__file__).resolve().parent.parent
PICTURE = ROOT / "docs/plots/digits.png"
CHARTS = [dict(table="curves", title="Loss by time", x="seconds", y=["loss"], by="gradients", log=True)]


def row(name, run, reached):
    """Returns the row of a way to exchange gradients. reached: the seconds until its accuracy was enough."""
    return dict(
        gradients=name,
        step_bytes=run["sent"],
        step_ms=round(1e3 * statistics.median(run["times"]), 1),
        loss=round(run["losses"][-1], 4),
        accuracy=round(run["accuracies"][-1], 4),
        reached_seconds=round(reached, 2),
    )


def main():
    sys.path.insert(0, str(ROOT / "examples"))
    import digits

    if "--port" in sys.argv:  # the other process, which the demonstration has started
        digits.main()
        return
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=pathlib.Path, default=RESULTS, metavar="DIR", help="the folder of the results")
    args = parser.parse_args()
    sys.argv[1:] = ["--plot", str(PICTURE if args.out == RESULTS else args.out / "digits.png")]
    runs = digits.main()
    report = Report("make bench-demo", rows=[], curves=[], charts=CHARTS)
    report.show("", *header("gradients", "MB a step", "ms a step", "loss", "accuracy", f"s to {digits.ENOUGH:.0%}"))
    for name, run in runs.items():
        found = row(name, run, digits.seconds_to_enough(run))
        report.data["rows"].append(found)
        curve = zip(run["seconds"], run["losses"])
        report.data["curves"] += [dict(gradients=name, seconds=round(s, 3), loss=round(x, 5)) for s, x in curve]
        values = found["step_bytes"] / 1e6, found["step_ms"], found["loss"], found["accuracy"], found["reached_seconds"]
        report.show(line([name, *(f"{x:.{n}f}" for x, n in zip(values, (3, 1, 4, 3, 1)))]))
    report.show("", "Two processes, whose connections are paced to 100 Mbit/s. One run.")
    report.write(args.out, "demo")


if __name__ == "__main__":
    main()
