"""Compares the times that exchange/costs.py predicts with measured ones.

    python benchmarks/prediction.py [--measure] [--networks REGEX] [--repeats 5] [--size MIB ...] [--out DIR]

The measured times are those of results/collectives.json, from which constants of the model come. With --measure, they
also include other networks: more hosts, other rates (needs root). The latency of each network comes from its smallest
message, whose rows don't count as predictions.
"""

import argparse
import json
import pathlib
import re
import shlex

import collectives
import numpy as np
from report import RESULTS, Report, header, line

from jaxcgx.exchange import costs
from jaxcgx.transports.network import PAYLOAD, Network

# Constants of the machine, from make bench (results/cpu-kernels-avx512.md), in bytes of float32 per second.
KERNELS = dict(encode=27e9, decode=27e9, reduce=54e9)
STACK = 2.2e9  # bytes per second that the network stack of both processors moves (loopback in results/collectives.md)
# {Mbit/s: seconds of traffic that pass a link at once, in effect} (the lab's token bucket: 1 ms)
BURST = {1000: 0.8e-3, 10_000: 0.8e-3}
LEAST = 16_000  # bytes that pass slower links at once
KEPT = RESULTS.parents[1] / "build" / "prediction"
PROGRAMS = "psum", "two_shot", "one_shot", "ring", "Tcp"
FIXED = "psum", "two_shot", "one_shot"  # a ring rounds at every hop, so "auto" never takes it
GOAL = 0.15
SLOWER = 0.10  # goal: "auto" takes at most this much longer than the best fixed choice
NETWORKS = [
    collectives.Network(f"{name}, {hosts} hosts", hosts, mbit, [0.0625, 1, 4, 16])
    for hosts in (2, 4, 8)
    for name, mbit in (("100 Mbit/s", 100), ("300 Mbit/s", 300), ("1 Gbit/s", 1000))
]
NOTES = f"""\
- ms, predicted: the time of one exchange in a loop, with MaxMin 4. off: the prediction over the measurement, minus 1.
- Constants of the model come from results/collectives.json. So the first table shows how well the model fits, and the
  others how well it predicts. Every network's latency comes from its 64 KiB rows, which are therefore left out.
- All hosts share 2 processors, so with N hosts kernels take N times as long. A step of Gloo takes 1.2 ms with 4
  processes on 2 processors, and 0.3 ms with 2 processes.
- If the plan has no network, "auto" assumes 1 Gbit/s. Its cases include the 64 KiB rows.
- goals: within {100 * GOAL:.0f} %; "auto" at most {100 * SLOWER:.0f} % slower than the best fixed choice.
"""


def network_of(mbit, hosts, mover, latency):
    up = min(mbit * 1e6 * PAYLOAD, STACK / hosts)
    burst = max(LEAST, BURST.get(mbit, 0) * up)
    return Network(up=up, burst=burst, latency=latency, mover=mover, sharing=hosts, **KERNELS)


def time_of(program, row, network):
    """Returns the predicted Time of a program. psum has no kernels."""
    ranks = row["processes"]
    if program == "psum":
        return costs.Time(0, costs.plain_seconds(ranks, row["size_bytes"], network))
    load = costs.Load(ranks, row["size_bytes"], row["wire_bytes"])
    return costs.seconds(costs.choose(load, Network(mover="tcp")) if program == "Tcp" else program, load, network)


def latencies(row, mbit):
    """Returns {mover: seconds of a step}, from the times of a small message."""
    found = {"gloo": [], "tcp": []}
    for program in PROGRAMS:
        mover = "tcp" if program == "Tcp" else "gloo"
        none, second = (time_of(program, row, network_of(mbit, row["processes"], mover, x)) for x in (0.0, 1.0))
        wire = max(row["ms"][program] / 1e3 - none.kernels, 0)
        # The time on the wire is the root of a sum of squares. If exchanges are alike, they are linear in the squared
        # latency.
        square = max(wire**2 - none.wire**2, 0) / (second.wire**2 - none.wire**2)
        found[mover].append(square**0.5)
    return {mover: float(np.median(values)) for mover, values in found.items()}


def rate(name):
    """Returns the Mbit/s of a network's links, from its name. None means loopback."""
    found = re.match(r"(\d+) ([GM])bit/s", name)
    return found and int(found[1]) * (1000 if found[2] == "G" else 1)


def predicted(rows):
    """Returns the rows of a network with predictions, without those of its smallest message."""
    mbit, smallest = rate(rows[0]["network"]), min(rows, key=lambda row: row["size_bytes"])
    latency = latencies(smallest, mbit)
    found = []
    for row in rows:
        if row is smallest:
            continue
        times = {}
        for program in PROGRAMS:
            mover = "tcp" if program == "Tcp" else "gloo"
            network = network_of(mbit, row["processes"], mover, latency[mover])
            times[program] = round(time_of(program, row, network).total * 1e3, 4)
        off = {program: round(times[program] / row["ms"][program] - 1, 4) for program in PROGRAMS}
        kept = {name: row[name] for name in ("network", "processes", "size_bytes", "ms")}
        found.append(kept | dict(latency=latency, predicted_ms=times, off=off))
    return found


def show(report, title, networks):
    """Shows a table of {network: rows}, and adds the rows to the data."""
    report.show("", title, "", *header("network, size", *PROGRAMS))
    every, chosen = [], []
    for rows in networks.values():
        for row in predicted(rows):
            chosen.append((row, costs.faster(*(row["predicted_ms"][name] for name in ("one_shot", "two_shot")))))
            report.data["rows"].append(row | dict(table=title))
            every += row["off"].values()
            cells = [
                f"{row['ms'][p]:.2f} {100 * row['off'][p]:+.0f} %" + " ✗" * (abs(row["off"][p]) > GOAL)
                for p in PROGRAMS
            ]
            report.show(line([f"{row['network']}, {collectives.megabytes(row['size_bytes'] / 2**20)}", *cells]))
    off = np.abs(every)
    report.show(
        "",
        f"{(off <= GOAL).sum()} of {len(off)} within 15 %, median {100 * np.median(off):.1f} %.",
        automatic('"auto"', [(row, row["auto"]) for rows in networks.values() for row in rows]),
        automatic('"auto" of a plan that has the network', chosen),
    )


def automatic(name, chosen):
    """Compares the choices over Gloo, [(row, program)], with the best fixed choice. Returns a sentence."""
    slower = {
        f"{row['network']}, {collectives.megabytes(row['size_bytes'] / 2**20)}": (
            row["ms"][program] / min(row["ms"][fixed] for fixed in FIXED) - 1
        )
        for row, program in chosen
    }
    over = {case: value for case, value in slower.items() if value > SLOWER}
    exceptions = "; ".join(f"{case}: {100 * value:.0f} %" for case, value in over.items())
    return (
        f"{name} takes at most {100 * SLOWER:.0f} % longer than the fastest of {', '.join(FIXED)} in "
        f"{len(slower) - len(over)} of {len(slower)} cases" + (f" ({exceptions})." if over else ".")
    )


def measured(networks, repeats):
    """Returns {network: rows} of new runs.

    Results of a run that was interrupted are kept in `KEPT` for the next run.
    """
    KEPT.mkdir(parents=True, exist_ok=True)
    found, files = {}, []
    for network in networks:
        sizes = "_".join(f"{size:g}" for size in network.sizes)
        files.append(KEPT / f"{network.processes}_{rate(network.name)}_{sizes}_{repeats}.json")
        if not files[-1].exists():
            print(f"measuring {network.name}", flush=True)
            results = collectives.measure(network, repeats)
            loops = [r for r in results if r["what"] == "loop"]
            rows = [collectives.row(network, r["size"], r["what"], r["ms"]) for r in loops]
            files[-1].write_text(json.dumps(rows))
        found[network.name] = json.loads(files[-1].read_text())
    for file in files:
        file.unlink()
    return found


def parse():
    parser = argparse.ArgumentParser(description="Predicted times of exchanges against measured ones.")
    parser.add_argument(
        "--measure",
        action="store_true",
        help="measure more networks (root; about 20 minutes; a run that was cut off goes on)",
    )
    parser.add_argument("--networks", metavar="REGEX", help="of these, only those whose names match")
    parser.add_argument("--repeats", type=int, default=5, metavar="N", help="repetitions (default: 5)")
    parser.add_argument("--size", type=float, nargs="+", metavar="MIB", help="sizes (default: 1/16 to 16)")
    parser.add_argument("--out", type=pathlib.Path, default=RESULTS, metavar="DIR", help="where the results go")
    return parser.parse_args()


def main():
    args = parse()
    given = [f"--networks {shlex.quote(args.networks)}"] * bool(args.networks)
    given += [f"--size {' '.join(f'{size:g}' for size in args.size)}"] if args.size else []
    given += [f"--repeats {args.repeats}"] if args.repeats != 5 else []
    plain = "make bench-prediction" + " MEASURE=yes" * args.measure
    options = " ".join(["python benchmarks/prediction.py", *["--measure"] * args.measure, *given])
    report = Report(options if given else plain, goal=GOAL, rows=[])
    committed = {}
    for row in json.loads((RESULTS / "collectives.json").read_text())["rows"]:
        if row["what"] == "loop" and rate(row["network"]) and "kept" not in row["network"]:
            committed.setdefault(row["network"], []).append(row)
    show(report, "Where the constants come from (results/collectives.json)", committed)
    if args.measure:
        networks = [n for n in NETWORKS if re.search(args.networks or "", n.name)]
        for network in networks:
            network.sizes = args.size or network.sizes
        show(report, "New runs", measured(networks, args.repeats))
    report.show("", *NOTES.splitlines())
    report.write(args.out, "prediction")


if __name__ == "__main__":
    main()
