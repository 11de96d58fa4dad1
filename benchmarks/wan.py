"""Measures every technique of wide-area training between rate-limited hosts: a step, its bytes, and the loss.

    python benchmarks/wan.py [--few] [--networks REGEX] [--techniques REGEX] [--steps 80] [--repeats 3] [--out DIR]

The hosts (jaxcgx.lab) need root. Results are kept, so a run that was interrupted continues with the next technique or
network.
"""

import argparse
import contextlib
import json
import pathlib
import re
import shlex
import sys
import tempfile
from typing import NamedTuple

import numpy as np
import training_speed_data as data
from hosts import Hosts
from report import RESULTS, Report, header, line, mark, median, rounded
from wan_host import METHODS, PERIOD

from jaxcgx.lab import Lab, Link, signals_raise, why_not
from jaxcgx.report.figures import draw

HERE = pathlib.Path(__file__).resolve().parent
KEPT = HERE.parent / "build" / "wan"
MODEL = "transformer"
STEPS = 80
SHAPES = {"2 centers of 2 ranks": (2, 2), "4 centers": (4, 1)}  # centers, ranks in each
LINKS = {
    "100 Mbit/s": Link(up=100_000_000, down=100_000_000),
    "1 Gbit/s": Link(up=1_000_000_000, down=1_000_000_000),
    "110 up, 500 down": Link(up=110_000_000, down=500_000_000),
}
UNLIMITED = Link(up=100_000_000_000, down=100_000_000_000)  # for runs in which only the losses count
TURN = 3  # steps in a row
LONG = (
    "HFA|DiLoCo|P3"  # techniques that take turns of a period: those where not every step has an exchange, or is whole
)
BASE = "float32"
# Techniques that rarely exchange, and those that they are compared with.
FEW = "^(float32|4 bits|HFA|DiLoCo|4 bits [+] HFA|4 bits [+] DiLoCo.*)$", "^(100 Mbit/s|1 Gbit/s)$"
EQUAL = 20  # steps of BASE that define the equal time for losses
SHORTER = 0.75  # goal of DGT: the time of a step over that without DGT

BY_TIME = dict(table="times", title="Loss by time", x="seconds", y=["loss"], by="technique", panel="network", log=True)
CHARTS = [
    dict(table="rows", title="Seconds of a step", x="network", y=["seconds"], by="technique", panel="centers"),
    dict(table="losses", title="Loss by step", x="steps", y=["loss"], by="technique", panel="centers"),
    BY_TIME,
]
# The techniques in the committed pictures, no more than there are colors.
DRAWN = re.compile("float32|4 bits|FP16|BSC|MPQ|P3|DGT, (defer|quantize)|4 bits [+] (HFA|DiLoCo|TSEngine)|TSEngine")
NOTES = f"""\
- A center is a host with its own link, and its ranks are processes in this host. All of them share the processors of
  one machine. The model is a transformer of 3.3 million parameters on the text of Python's documentation, with 4
  windows per rank and step. The optimizer is Adam, without momentum if the technique has its own.
- step ms: the time of the slowest rank, the median of the turns. Techniques take turns of {TURN} steps. HFA, DiLoCo and
  P3 take turns of {PERIOD}: ms and bytes are means over all steps, including P3's `finish`. less: how much less than
  {BASE} in the same turn.
- MB up, MB down: what the kernel counted on the link of each center, with headers, in a step.
- loss: on held-out text, after the same number of steps, and after the time in which {BASE} makes {EQUAL} steps on that
  network. It doesn't depend on the link. There is one seed, so close losses differ by chance. ">": all steps were done
  before that time.
- DGT sends half of the blocks at once. "random" chooses as many blocks at random; `make bench-differential` compares
  the losses over several seeds. "lost by the sender": the other blocks are dropped without feedback. HFA averages in a
  center every {PERIOD // 4} steps and between centers every {PERIOD}, DiLoCo every {PERIOD}.
- TSEngine is cgx.wan.Topology, MultiGPS a schedule with two owners. Here all links have the same rate. bench-topology
  has links with different rates.
"""
NOTES_OF_ALL = """\
- at best: DGT sends half of the blocks later. This is the time of a step if it hides half of the time on the wire, but
  not more than the rest of the step. The time on the wire is the bytes of the step without DGT over the rate of the
  link. The processors' work isn't hidden, because all ranks share the processors. Where "at best" is above the goal,
  the wire is too small or too large a part of the step to reach the goal. [priority.md](priority.md) has steps that
  can.
- HFA and DiLoCo: `make bench-wan-few` measures them alone, beside float32 and 4 bits. If
  [its table](wan-few.md) has a later date, it supersedes their rows here: their steps have become faster.
"""


class Found(NamedTuple):
    """The measurements with one layout of centers."""

    losses: dict  # {technique: losses every PERIOD steps}
    turns: dict  # {network: {technique: {"ms", "sent", "received": of each turn}}}


def curve(hosts, technique, steps):
    """Returns the losses on held-out text every PERIOD steps."""
    losses = [np.mean(hosts.ask(technique, 0)["loss"])]
    while PERIOD * len(losses) <= steps:
        hosts.ask(technique, PERIOD)
        losses.append(np.mean(hosts.ask(technique, 0)["loss"]))
    print(f"{technique}: loss {losses[-1]:.3f}", file=sys.stderr, flush=True)
    return rounded(losses)


def turns(hosts, repeats, ranks):
    """Measures the turns of all techniques. A host has `ranks` ranks.

    Returns {technique: {"ms": of each turn, on the slowest rank, "sent", "received": bytes of each turn and host}}.
    """
    found = {technique: dict(ms=[], sent=[], received=[]) for technique in hosts.methods}
    for turn in range(repeats + 1):  # the first turn doesn't count
        for technique, values in found.items():
            steps = PERIOD if re.search(LONG, technique) else TURN
            # An exchange of streaming DiLoCo is in flight for 3 of 5 steps. At the end of a turn, none is in flight.
            told = hosts.ask(technique, steps + PERIOD // 5 * (turn == 0))
            if turn:
                values["ms"].append(max(told["ms"]))
                for what in "sent", "received":  # each rank of a host reads the counters of the whole host
                    values[what].append([max(told[what][i : i + ranks]) for i in range(0, len(told[what]), ranks)])
    return found


def measure(centers, networks, args):
    """Returns the measurements with one layout. A technique's losses and a network's turns are kept when complete."""
    count, ranks = SHAPES[centers]
    kept = KEPT / f"{count}x{ranks}_{args.steps}_{args.repeats}_{args.techniques or 'all'}.json"
    kept.parent.mkdir(parents=True, exist_ok=True)
    found = Found(*json.loads(kept.read_text())) if kept.exists() else Found({}, {})
    if all(network in found.turns for network in networks):
        return found
    with contextlib.ExitStack() as stack:
        path = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()), "data.npz")
        data.write(path, MODEL, count * ranks)
        lab = stack.enter_context(Lab(count, UNLIMITED))
        settings = dict(shape=SHAPES[centers], name=centers, model=MODEL, rate=data.MODELS[MODEL].rate, data=str(path))
        commands = {"jaxcgx": [sys.executable, HERE / "wan_host.py"]}
        hosts = Hosts(stack, lab, commands, settings, methods=args.techniques, ranks=ranks)
        for technique in hosts.methods:
            if technique not in found.losses:
                found.losses[technique] = curve(hosts, technique, args.steps)
                kept.write_text(json.dumps(found))
        for network in networks:
            if network not in found.turns:
                hosts.limit(LINKS[network])
                found.turns[network] = turns(hosts, args.repeats, ranks)
                kept.write_text(json.dumps(found))
                print(f"{centers}, {network}: measured", file=sys.stderr, flush=True)
    return found


def figures(found, network):
    """Returns {technique: its figures} on a network."""
    measured, last = found.turns[network], PERIOD * (len(next(iter(found.losses.values()))) - 1)
    base = measured.get(BASE)
    rows = {}
    for technique, values in measured.items():
        ms, losses = np.array(values["ms"]), found.losses[technique]
        steps = base and EQUAL * median(base["ms"]) / median(ms)
        rows[technique] = dict(
            ms=median(ms),
            seconds=round(median(ms) / 1e3, 4),
            quartiles=rounded(np.percentile(ms, [25, 75])),
            less=base and median(1 - ms / np.array(base["ms"])),
            up_bytes=[round(median(of_host)) for of_host in zip(*values["sent"])],
            down_bytes=[round(median(of_host)) for of_host in zip(*values["received"])],
            loss=losses[-1],
            steps_at_time=base and round(steps, 1),
            loss_at_time=base and round(float(np.interp(steps, PERIOD * np.arange(len(losses)), losses)), 4),
            all_done=base and bool(steps > last),
        )
    return rows


def show(report, rows):
    report.show(*header("technique", "step ms", "less", "MB up", "MB down", "loss", "at equal time"))
    for technique, r in rows.items():
        cells = [
            technique,
            f"{r['ms']:.1f}",
            "-" if r["less"] is None else f"{100 * r['less']:.0f} %",
            *(" ".join(f"{x / 1e6:.3f}" for x in r[f"{way}_bytes"]) for way in ("up", "down")),
            f"{r['loss']:.3f}",
            "-" if r["loss_at_time"] is None else ">" * r["all_done"] + f"{r['loss_at_time']:.3f}",
        ]
        report.show(line(cells))


def goals(networks):
    """Returns lines that compare DGT with its goals, and with what a step can be at best."""
    yield from header("DGT, K = 0.5", "goal", "at best", "measured", "reached")
    for network, rows in networks.items():
        link = LINKS[network]
        for technique, without in (("DGT, defer", BASE), ("4 bits + DGT, defer", "4 bits")):
            if technique in rows and without in rows:
                plain = rows[without]
                wire = 8e3 * max(max(plain["up_bytes"]) / link.up, max(plain["down_bytes"]) / link.down)
                best = 1 - min(wire / 2, plain["ms"] - wire) / plain["ms"]
                ratio = rows[technique]["ms"] / plain["ms"]
                cells = [f"{SHORTER:.2f}", f"{best:.2f}", f"{ratio:.2f}", mark(ratio <= SHORTER)]
                yield line([f"{network}: {technique}, of {without}", *cells])


def parse():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--networks", metavar="REGEX", help="only matching ones of " + ", ".join(LINKS))
    parser.add_argument("--techniques", metavar="REGEX", help="only these techniques")
    parser.add_argument("--few", action="store_true", help="only techniques that rarely exchange: writes wan-few")
    parser.add_argument(
        "--steps", type=int, default=STEPS, metavar="N", help=f"steps of a training run (default: {STEPS})"
    )
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="counted turns (default: 3)")
    parser.add_argument("--out", type=pathlib.Path, default=RESULTS, metavar="DIR", help="the folder of the results")
    args = parser.parse_args()
    if args.few:
        args.techniques, args.networks = FEW
    return args


def main():
    args = parse()
    if why := why_not():
        sys.exit(f"wan.py: not measured, {why}")
    name = "wan-few" if args.few else "wan"
    usual = sys.argv[1:] == ["--few"] * args.few
    command = f"make bench-{name}" if usual else shlex.join(["python", "benchmarks/wan.py", *sys.argv[1:]])
    report = Report(command, args.repeats, rows=[], losses=[], times=[], charts=CHARTS)
    networks, first = [name for name in LINKS if re.search(args.networks or "", name)], {}
    for centers in list(METHODS)[:1] if args.few else METHODS:
        found = measure(centers, networks, args)
        for technique, losses in found.losses.items():
            points = [
                dict(centers=centers, technique=technique, steps=PERIOD * i, loss=x) for i, x in enumerate(losses)
            ]
            report.data["losses"] += points
        for network in networks:
            rows, where = figures(found, network), dict(centers=centers, network=f"{centers}, {network}")
            first |= {network: rows} if centers == "2 centers of 2 ranks" else {}
            for technique, r in rows.items():
                report.data["rows"].append(where | dict(technique=technique) | r)
                report.data["times"] += [
                    where | dict(technique=technique, seconds=round(PERIOD * i * r["seconds"], 3), loss=loss)
                    for i, loss in enumerate(found.losses[technique])
                    if i
                ]
            report.show("", f"{centers}, {network}; loss after {args.steps} steps.", "")
            show(report, rows)
    notes = NOTES if args.few else NOTES + NOTES_OF_ALL
    report.show("", *([] if args.few else [*goals(first), ""]), *notes.splitlines(), "")
    for number, network in enumerate(dict.fromkeys(row["network"] for row in report.data["times"])):
        points = [row for row in report.data["times"] if row["network"] == network]
        drawn, picture = [row for row in points if DRAWN.fullmatch(row["technique"])], f"{name}_{number}.png"
        (args.out / picture).write_bytes(draw(BY_TIME, drawn, f"Loss by time: {network}"))
        report.show(f"- Loss by time, {network}: [{picture}]({picture}).")
    report.write(args.out, name)
    if args.out == RESULTS:
        for file in KEPT.glob("*.json"):
            file.unlink()


if __name__ == "__main__":
    with signals_raise():
        main()
