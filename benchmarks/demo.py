"""Runs the demonstration (examples/digits.py) with all of its steps.

    python benchmarks/demo.py [--out DIR]

Keeps its curves, and draws README's picture from them and from results/training-speed-transformer.json.
"""

import argparse
import math
import pathlib
import statistics
import sys

import matplotlib
import numpy as np
from report import RESULTS, Report, header, line

from jaxcgx.report import results

ROOT = pathlib.Path(__file__).resolve().parent.parent
PICTURE = ROOT / "docs/plots/digits.png"
CHARTS = [dict(table="curves", title="Accuracy by time", x="seconds", y=["accuracy"], by="gradients")]
NETWORK, MBIT = "transformer, 2 hosts", 1000  # of the second panel
METHODS = {  # {label: methods, of which the fastest is drawn}
    "psum of float32": ["psum, one array"],
    "PyTorch, no hook": ["PyTorch, no hook"],
    "PyTorch's fastest hook": ["PyTorch, fp16", "PyTorch, PowerSGD(4)"],
    "jaxcgx, 4 bits, overlap": ["MaxMin(4), backward"],
}


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


def draw(demo, speed, path):
    """Draws the accuracy of the demonstration and the loss of the transformer, both against seconds."""
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    for each in demo["rows"]:
        points = [(c["seconds"], 100 * c["accuracy"]) for c in demo["curves"] if c["gradients"] == each["gradients"]]
        left.plot(*zip(*points), label=f"{each['gradients']}: {each['step_bytes'] / 1e6:.2f} MB a step")
    left.set(ylabel="test accuracy, %", title="Digits, 2 processes, paced to 100 Mbit/s")
    rows = {r["method"]: r for r in speed["rows"] if (r["network"], r["mbit"]) == (NETWORK, MBIT)}
    for label, methods in METHODS.items():
        fastest = min(methods, key=lambda method: rows[method]["seconds"] or math.inf)
        curve = [r for r in speed["losses"] if (r["network"], r["method"]) == (NETWORK, fastest)]
        shown = label if len(methods) == 1 else f"{label}: {fastest.removeprefix('PyTorch, ')}"
        # A single loss is noisy, so each point is the mean of three in a row.
        steps, losses = (np.convolve([r[what] for r in curve], np.ones(3) / 3, "valid") for what in ("steps", "loss"))
        right.plot(steps * rows[fastest]["ms"] / 1e3, losses, label=shown)
    right.set(ylabel="loss on held-out text", title=f"Transformer, {NETWORK.split(', ')[1]}, {MBIT // 1000} Gbit/s")
    for axes in left, right:
        axes.set(xlabel="seconds", xlim=0)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)
    figure.savefig(path, dpi=120)


def main():
    sys.path.insert(0, str(ROOT / "examples"))
    import digits

    if "--port" in sys.argv:  # the other process, which the demonstration has started
        digits.main()
        return
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=pathlib.Path, default=RESULTS, metavar="DIR", help="the folder of the results")
    args = parser.parse_args()
    picture = PICTURE if args.out == RESULTS else args.out / "digits.png"
    sys.argv[1:] = ["--plot", str(picture)]
    runs = digits.main()
    report = Report("make bench-demo", rows=[], curves=[], charts=CHARTS)
    report.show("", *header("gradients", "MB a step", "ms a step", "loss", "accuracy", f"s to {digits.ENOUGH:.0%}"))
    for name, run in runs.items():
        found = row(name, run, digits.seconds_to_enough(run))
        report.data["rows"].append(found)
        report.data["curves"] += [
            dict(gradients=name, seconds=round(seconds, 3), loss=round(loss, 5), accuracy=round(accuracy, 4))
            for seconds, loss, accuracy in zip(run["seconds"], run["losses"], run["accuracies"])
        ]
        values = found["step_bytes"] / 1e6, found["step_ms"], found["loss"], found["accuracy"], found["reached_seconds"]
        report.show(line([name, *(f"{x:.{n}f}" for x, n in zip(values, (3, 1, 4, 3, 1)))]))
    report.show("", "Two processes, whose connections are paced to 100 Mbit/s. One run.")
    report.write(args.out, "demo")
    draw(report.data, results.read(RESULTS / "training-speed-transformer.json"), picture)


if __name__ == "__main__":
    main()
