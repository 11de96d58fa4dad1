"""Compares the times that exchange/costs.py and report/advise.py predict with measured ones.

    python benchmarks/prediction.py [--measure] [--kernels] [--networks REGEX] [--repeats 5] [--size MIB ...]
        [--out DIR]

The measured times are those of results/collectives.json, from which constants of the model come, and of other networks:
more hosts, other rates. --measure measures these again (needs root), and --kernels the speeds of kernels for training
steps, as `advise` does. Otherwise both come from results/prediction.json.
The latency of each network comes from its smallest message, whose rows don't count as predictions. Training steps are
those of results/training-speed-*.json. Hierarchies come from results/wan.json, and a slow line from
results/topology.json.
"""

import argparse
import dataclasses
import json
import pathlib
import re
import shlex

import collectives
import numpy as np
import training_speed_data
from report import RESULTS, Report, header, line, median
from simulation import local_steps

import jaxcgx as cgx
from jaxcgx.codecs.base import spell
from jaxcgx.exchange import costs
from jaxcgx.report import machine
from jaxcgx.report.advise import Case
from jaxcgx.transports.network import PAYLOAD, Network

# Constants of the machine, from make bench (results/cpu-kernels-avx512.md), in bytes of float32 per second.
KERNELS = dict(encode=27e9, decode=27e9, reduce=54e9)
STACK = 2.2e9  # bytes per second that the network stack of both processors moves (loopback in results/collectives.md)
# {Mbit/s: seconds of traffic that pass a link at once, in effect} (the lab's token bucket: 1 ms)
BURST = {1000: 0.8e-3, 10_000: 0.8e-3}
LEAST = 16_000  # bytes that pass slower links at once
KEPT = RESULTS.parents[1] / "build" / "prediction"
PROGRAMS = "psum", "two_shot", "one_shot", "ring", "Tcp"
FIXED = "psum", "two_shot", "one_shot"  # the choices over Gloo, beside which psum is shown
GLOO = *FIXED, "ring"
NEW = "New runs"
GOAL = 0.15
SLOWER = 0.10  # goal: "auto" takes at most this much longer than the best fixed choice
NETWORKS = [
    collectives.Network(f"{name}, {hosts} hosts", hosts, mbit, [0.0625, 1, 4, 16])
    for hosts in (2, 4, 8)
    for name, mbit in (("100 Mbit/s", 100), ("300 Mbit/s", 300), ("1 Gbit/s", 1000))
]
NONE = "no exchange"
EACH = 1e-6  # fusion_mb with which every array is a message
# {method of training_speed.py: (codec, mover, fusion_mb, overlap)}. The planner has no model of the methods that are
# written by hand, of overlap=Priority(), and of PyTorch.
METHODS = {
    "psum, float32": (cgx.Raw(), "gloo", EACH, False),
    "psum, one array": (cgx.Raw(), "gloo", 64, False),
    "MaxMin(4), Gloo": (cgx.MaxMin(4), "gloo", 64, False),
    "MaxMin(4), Tcp": (cgx.MaxMin(4), "tcp", 64, False),
    "MaxMin(4), backward": (cgx.MaxMin(4), "tcp", 1, True),  # 1: for less than 16 MiB
    "Eden(4), Tcp": (cgx.Eden(4), "tcp", 64, False),
    "ByteGrad, Tcp": (cgx.ByteGrad(), "tcp", 64, False),
    "DGC 1 %, Tcp": (cgx.TopK(0.01), "tcp", 64, False),
    "PowerSGD(4), Gloo": (cgx.PowerSGD(4), "gloo", 64, False),
    "DiLoCo, 4 bits, H 20": (cgx.MaxMin(4), "tcp", 64, False),
    "DiLoCo, 4 bits, H 20, streaming": (cgx.MaxMin(4), "tcp", 64, True),
}
ROUND = 20  # steps of a round of DiLoCo
LINES = {
    "100 Mbit/s": dict(link="100mbit"),
    "1 Gbit/s": dict(link="1gbit"),
    "110 up, 500 down": dict(link="500mbit", up="110mbit"),
}
SLOW = dict(world=4, link="10mbit")  # the line of results/topology.json to which a synchronous exchange slows down
SLOW_SIZE = 2**24  # bytes of float32
NOTES = f"""\
- ms, predicted: the time of one exchange in a loop, with MaxMin 4. off: the prediction over the measurement, minus 1.
- Constants of the model come from results/collectives.json. So the first table shows how well the model fits, and the
  others how well it predicts. Every network's latency comes from its 64 KiB rows, which are therefore left out, also
  where choices of "auto" are counted.
- All hosts share 2 processors, so with N hosts kernels take N times as long. A step of Gloo takes 1.2 ms with 4
  processes on 2 processors, and 0.3 ms with 2 processes.
- If the plan has no network, "auto" assumes 1 Gbit/s. It chooses between two_shot and one_shot. A ring rounds at every
  hop, so its error grows with the number of ranks, and it allows no feedback. So "auto" never takes it, and its choice
  over Gloo is compared with rings in a sentence of its own.
- steps: ms of a training step, and off. The prediction is the planner's (report/advise.py), with the latencies of
  Cluster. Its computation is that of a step without exchange in the same turn, and off is the median of the turns.
  Hosts share 2 processors here, too. Kernels were measured as `advise` does it, on the machine that is named above the
  table. Where steps were measured on another machine, its kernels may differ.
- hierarchy: how much longer a step with float32 takes than one with MaxMin 4, which has the same computation. The ranks
  of a center share its link. slow line: an exchange over Tcp, {SLOW_SIZE >> 20} MiB, if one of the lines has a tenth of
  the rate of the others. The prediction is that of hosts which all have this line.
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
    latency = smallest.get("latency") or latencies(smallest, mbit)
    found = []
    for row in rows:
        if row is smallest and "latency" not in row:
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
    every, known, unknown = [], [], []
    for rows in networks.values():
        choices = {row["size_bytes"]: row["auto"] for row in rows}
        for row in predicted(rows):
            known.append((row, costs.faster(*(row["predicted_ms"][name] for name in ("one_shot", "two_shot")))))
            unknown.append((row, choices[row["size_bytes"]]))
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
        automatic('"auto" over Gloo', unknown, FIXED),
        automatic('"auto" over Gloo, of a plan that has the network,', known, FIXED),
        automatic('"auto" over Gloo, with rings counted,', unknown, GLOO),
        automatic('"auto" over Gloo, of a plan that has the network, with rings counted,', known, GLOO),
        automatic('"auto" over Tcp', [(row, "Tcp") for row, _ in known], PROGRAMS),
    )


def automatic(name, chosen, others):
    """Compares the choices of "auto", [(row, program)], with the fastest of `others`. Returns a sentence."""
    slower = {
        f"{row['network']}, {collectives.megabytes(row['size_bytes'] / 2**20)}": (
            row["ms"][program] / min(row["ms"][other] for other in others) - 1
        )
        for row, program in chosen
    }
    over = {case: value for case, value in slower.items() if value > SLOWER}
    exceptions = "; ".join(f"{case}: {100 * value:.0f} %" for case, value in over.items())
    return (
        f"{name} takes at most {100 * SLOWER:.0f} % longer than the fastest of {', '.join(others)} in "
        f"{len(slower) - len(over)} of {len(slower)} cases" + (f" ({exceptions})." if over else ".")
    )


def committed(old):
    """Returns {network: rows} of the new runs of an older report, which have the latency of their network."""
    found = {}
    for row in old["rows"]:
        if row["table"] == NEW:
            network = collectives.Network(row["network"], row["processes"], rate(row["network"]), [])
            times = {program: [ms] for program, ms in row["ms"].items()}
            full = collectives.row(network, row["size_bytes"] / 2**20, "loop", times)
            found.setdefault(row["network"], []).append(full | dict(latency=row["latency"]))
    return found


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


def measured_kernels():
    """Returns {codec: the speeds of its kernels on this machine, with feedback}, as `advise` measures them."""
    found = {}
    for codec in dict.fromkeys(codec for codec, *_ in METHODS.values() if not codec.raw):
        speeds = machine.kernels(codec, again=True)
        found[spell(codec)] = dict(encode=speeds.encode_fed, decode=speeds.decode, reduce=speeds.reduce)
    return found


def network_between(cluster, mover, codec, kernels):
    """Returns the network of a cluster, all of whose ranks share the processors of one machine."""
    speeds = {} if codec.raw else kernels[spell(codec)]
    return dataclasses.replace(cluster.between(mover), sharing=cluster.world, **speeds)


def step_of(method, hosts, mbit, compute, tree, kernels):
    """Returns the seconds of a step that the planner predicts, from those of its computation."""
    codec, mover, fusion_mb, overlap = METHODS[method]
    cluster = cgx.Cluster(world=hosts, link=f"{mbit}mbit")
    network = network_between(cluster, mover, codec, kernels)
    case = Case(
        tree=tree, nodes=hosts, each=1, compute=compute, overlap=overlap, fusion_mb=fusion_mb, inner=cluster.inside()
    )
    if codec.raw:
        return case.choice(cgx.Raw(), "psum", network=network, error=0.0).step
    schedules = ["psum"] if codec.low_rank else ["one_shot", "two_shot"]
    choices = [case.choice(codec, schedule, network=network, error=0.0) for schedule in schedules]
    (chosen,) = (choice for choice in choices if choice.auto)
    if "DiLoCo" in method:
        return local_steps(compute, chosen.exchange, every=ROUND, overlap=overlap)
    return chosen.step


def origin(name):
    """Says when and where the results of a file were measured."""
    found = json.loads((RESULTS / f"{name}.json").read_text())
    return f"results/{name}.json: {found['date']}, {found['cpu']}"


def show_steps(report):
    """Shows a table of the steps of results/training-speed-*.json, and adds its rows to the data.

    The speed of a machine changes from turn to turn. So predictions begin with the computation of the same turn.
    """
    names = [training_speed_data.results_of(model) for model in training_speed_data.MODELS]
    rows = [row for name in names for row in json.loads((RESULTS / f"{name}.json").read_text())["rows"]]
    turns = {(row["network"], row["mbit"], row["method"]): np.array(row["ms_of_turns"]) for row in rows}
    trees = {name: make[0](np.random.default_rng(0)) for name, make in training_speed_data.MAKERS.items()}
    places = [*map(origin, names), f"kernels: {report.data['kernels_measured']}"]
    report.show("", f"Steps of training runs ({'; '.join(places)})", "", *header("network", *METHODS))
    for network, mbit in dict.fromkeys((row["network"], row["mbit"]) for row in rows):
        model, hosts = network.split(", ")
        cells = [f"{network}, {mbit} Mbit/s"]
        for method in METHODS:
            ms = turns[network, mbit, method]
            found = [
                1e3 * step_of(method, int(hosts.split()[0]), mbit, each / 1e3, trees[model], report.data["kernels"])
                for each in turns[network, mbit, NONE]
            ]
            off = median(np.divide(found, ms) - 1)
            row = dict(network=network, mbit=mbit, method=method, ms=median(ms), predicted_ms=median(found), off=off)
            report.data["steps"].append(row)
            cells.append(f"{row['ms']:.1f} {100 * off:+.0f} %" + " ✗" * (abs(off) > GOAL))
        report.show(line(cells))
    within = {name: [abs(r["off"]) <= GOAL for r in report.data["steps"] if r["method"] == name] for name in METHODS}
    off = np.abs([row["off"] for row in report.data["steps"]])
    report.show(
        "",
        f"{(off <= GOAL).sum()} of {len(off)} steps within 15 %, median {100 * np.median(off):.1f} %.",
        "By method: " + "; ".join(f"{name}: {sum(each)} of {len(each)}" for name, each in within.items()) + ".",
    )


def hierarchies(kernels):
    """Yields (what was measured, ms, predicted ms) between two centers of two ranks."""
    rows = json.loads((RESULTS / "wan.json").read_text())["rows"]
    ms = {(row["network"], row["technique"]): row["ms"] for row in rows}
    tree = training_speed_data.MAKERS["transformer"][0](np.random.default_rng(0))
    for name, links in LINES.items():
        cluster = cgx.Cluster(world=4, nodes=2, **links)
        network = network_between(cluster, "tcp", cgx.MaxMin(4), kernels)
        case = Case(tree=tree, nodes=2, each=2, compute=0, overlap=False, fusion_mb=64, inner=cluster.inside())
        plain = case.choice(cgx.Raw(), "psum", network=network, error=0.0)
        coded = case.choice(cgx.MaxMin(4), "one_shot", network=network, error=0.0)
        place = f"2 centers of 2 ranks, {name}"
        less = ms[place, "float32"] - ms[place, "4 bits"]
        yield f"hierarchy, {name}", less, 1e3 * (plain.step - coded.step)


def slow_lines(kernels):
    """Yields (what was measured, ms, predicted ms) of hosts, one of which has a slow line."""
    rows = json.loads((RESULTS / "topology.json").read_text())["rows"]
    ms = {row["schedule"]: row["ms"] for row in rows if row["setup"] == "line"}
    load = costs.Load(SLOW["world"], SLOW_SIZE, cgx.MaxMin(4).wire_bytes((SLOW_SIZE // 4,), np.float32))
    for schedule in "two_shot", "ring":
        found = costs.seconds(schedule, load, network_between(cgx.Cluster(**SLOW), "tcp", cgx.MaxMin(4), kernels)).total
        yield f"slow line, {schedule}", ms[schedule], 1e3 * found


def show_others(report):
    """Shows a table of hierarchies and of a slow line, and adds its rows to the data."""
    report.show("", f"Hierarchies ({origin('wan')}) and a slow line ({origin('topology')})", "")
    report.show(*header("what", "ms", "predicted", "off"))
    kernels = report.data["kernels"]
    for what, ms, found in [*hierarchies(kernels), *slow_lines(kernels)]:
        off = found / ms - 1
        report.data["others"].append(dict(what=what, ms=ms, predicted_ms=round(found, 4), off=round(off, 4)))
        report.show(line([what, f"{ms:.1f}", f"{found:.1f}", f"{100 * off:+.0f} %" + " ✗" * (abs(off) > GOAL)]))


def parse():
    parser = argparse.ArgumentParser(description="Predicted times of exchanges against measured ones.")
    parser.add_argument(
        "--measure",
        action="store_true",
        help="measure more networks (root; about 20 minutes; a run that was cut off goes on)",
    )
    parser.add_argument("--kernels", action="store_true", help="measure kernels (an idle machine; a minute)")
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
    plain = "make bench-prediction" + " MEASURE=yes" * args.measure + " KERNELS=yes" * args.kernels
    flags = ["--measure"] * args.measure + ["--kernels"] * args.kernels
    options = " ".join(["python benchmarks/prediction.py", *flags, *given])
    report = Report(options if given else plain, goal=GOAL, rows=[], steps=[], others=[])
    old = json.loads((RESULTS / "prediction.json").read_text())
    now = f"{report.data['date']}, {report.data['cpu']}"
    report.data["measured"] = now if args.measure else old["measured"]  # the new runs
    report.data["kernels"] = measured_kernels() if args.kernels else old["kernels"]
    report.data["kernels_measured"] = now if args.kernels else old["kernels_measured"]
    fitted = {}
    for row in json.loads((RESULTS / "collectives.json").read_text())["rows"]:
        if row["what"] == "loop" and rate(row["network"]) and "kept" not in row["network"]:
            fitted.setdefault(row["network"], []).append(row)
    show(report, f"Where the constants come from ({origin('collectives')})", fitted)
    if args.measure:
        networks = [n for n in NETWORKS if re.search(args.networks or "", n.name)]
        for network in networks:
            network.sizes = args.size or network.sizes
        show(report, NEW, measured(networks, args.repeats))
    else:
        show(report, NEW, committed(old))
        report.show("", f"The new runs ({old['measured']}) are of `make bench-prediction MEASURE=yes`.")
    show_steps(report)
    show_others(report)
    report.show("", *NOTES.splitlines())
    report.write(args.out, "prediction")


if __name__ == "__main__":
    main()
