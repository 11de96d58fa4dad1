"""Measures what an exchange adds to a training step between hosts, beside PyTorch's hooks.

    python benchmarks/exposed.py --torch PYTHON [--hosts N ...] [--rates MBIT ...] [--repeats 5] [--out DIR]

Model, methods and turns are those of training_speed.py, which also trains to a loss. The hosts (jaxcgx.lab) need root.
Results are kept, so a run that was interrupted continues.
"""

import argparse
import pathlib
import shlex
import sys

import training_speed as speed
from report import RESULTS, Report, congestion, header, line, mark

from jaxcgx.lab import signals_raise, why_not

MODEL = "transformer"
BEST = {100: 0.35, 1000: 0.35, 10_000: 0.8}  # {Mbit/s: the goal for jaxcgx's best method over PyTorch's best}
SAME = 0.6  # the goal for PowerSGD(4) in both frameworks

NOTES = f"""\
- The transformer, the methods and the hosts are those of
  [training-speed-transformer.md](training-speed-transformer.md), and so is what a turn is: {speed.RATES[100]} steps at
  100 Mbit/s and {speed.RATES[1000]} on faster links, after a step that doesn't count. Methods whose exchanges cross
  steps have turns of {speed.SPAN} steps, which all count.
- exposed: the time of a step minus that of the same framework without any exchange, within each turn. The two
  frameworks' steps without exchange differ, which isn't the exchange's doing. The arithmetic of compression counts.
- The least of each framework is that of the methods that exchange in every step. jaxcgx has more of these than
  PyTorch, and the least of more is lower by chance.
- ratio: jaxcgx's exposed time over PyTorch's. Goals: the best against the best at most {BEST[100]} at 100 Mbit/s and
  1 Gbit/s and {BEST[10_000]} at 10 Gbit/s, PowerSGD(4) against PowerSGD(4) at most {SAME}.
- PyTorch: DistributedDataParallel over Gloo. With PowerSGD all gradients are one bucket.
"""


def parse():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--torch", metavar="PYTHON", required=True, help="a Python that has torch")
    parser.add_argument("--hosts", type=int, nargs="+", default=speed.HOSTS, metavar="N", help="(default: 2 4)")
    parser.add_argument("--rates", type=int, nargs="+", default=list(speed.RATES), choices=speed.RATES, metavar="MBIT")
    parser.add_argument("--repeats", type=int, default=5, metavar="N", help="counted turns (default: 5)")
    parser.add_argument("--out", type=pathlib.Path, metavar="DIR", help="where the results are written")
    args = parser.parse_args()
    chosen = any(getattr(args, name) != parser.get_default(name) for name in ("hosts", "rates", "repeats"))
    args.command = shlex.join(["python", "benchmarks/exposed.py", *sys.argv[1:]]) if chosen else "make bench-exposed"
    args.out = args.out or (None if chosen else RESULTS)
    args.methods = None  # all
    return args


def quickest(rows, kind, having=""):
    """Returns the name of the method of a kind with the shortest exposed time."""
    names = [name for name, r in rows.items() if r["kind"] == kind and having in name]
    return min(names, key=lambda name: rows[name]["exposed_ms"])


def compare(report, what, having, networks, goals):
    """Shows jaxcgx's quickest method of each network beside PyTorch's."""
    report.show("", what, "", *header("network", "jaxcgx", "ms", "PyTorch", "ms", "ratio", "goal", ""))
    for (network, mbit), rows in networks.items():
        names = [quickest(rows, kind, having) for kind in ("jaxcgx", "PyTorch")]
        mine, theirs = (rows[name]["exposed_ms"] for name in names)
        ratio = round(mine / theirs, 2)
        row = dict(network=network, mbit=mbit, what=what, methods=names, ratio=ratio, goal=goals[mbit])
        row |= dict(reached=theirs > 0 and ratio <= goals[mbit])
        report.data["ratios"].append(row)
        cells = [network, names[0], f"{mine:.1f}", names[1], f"{theirs:.1f}", f"{ratio:.2f}", goals[mbit]]
        report.show(line([*cells, mark(row["reached"])]))


def main():
    args = parse()
    if why := why_not():
        sys.exit(f"exposed.py: not measured, {why}")
    settings = dict(torch=speed.version(args.torch), congestion=congestion())
    report = Report(args.command, args.repeats, **settings, rows=[], ratios=[])
    report.show("", f"PyTorch: {settings['torch']}. TCP of the hosts: {settings['congestion']}.")
    networks = {}
    for count in args.hosts:
        network = f"{MODEL}, {count} hosts"
        with speed.hosts_of(MODEL, count, args) as hosts:
            taken = speed.speeds(hosts, f"exposed, {network}", args)
        for mbit, turns in taken.items():
            rows = networks[f"{network}, {mbit} Mbit/s", mbit] = speed.figures(turns, {})
            report.show("", f"{network}, {mbit} Mbit/s.", "", *header("method", "MB sent", "step ms", "exposed ms"))
            for name, r in rows.items():
                figures = {
                    key: r[key] for key in ("kind", "ms", "quartiles", "exposed_ms", "sent_bytes", "ms_of_turns")
                }
                report.data["rows"].append(dict(network=network, mbit=mbit, method=name) | figures)
                sent, ms, exposed = f"{r['sent_bytes'] / 1e6:.3f}", f"{r['ms']:.1f}", f"{r['exposed_ms']:.1f}"
                report.show(line([name, sent, ms, exposed]))
    compare(report, "The method of each framework that adds least.", "", networks, BEST)
    compare(report, "PowerSGD(4).", "PowerSGD", networks, dict.fromkeys(BEST, SAME))
    report.show("", *NOTES.splitlines())
    if args.out:
        report.write(args.out, "exposed")
        speed.forget(args)


if __name__ == "__main__":
    with signals_raise():
        main()
