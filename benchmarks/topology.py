"""Measures what a topology gains if one of four links is slow, and how soon it notices that another one is slow.

    python benchmarks/topology.py [--only line|pair] [--repeats 5] [--out DIR]

The hosts are network namespaces, which need root.
"""

import argparse
import contextlib
import json
import os
import pathlib
import shlex
import subprocess
import sys
import time

import jax
import numpy as np
from collectives import Mesh
from jax.sharding import PartitionSpec
from report import RESULTS, Report, free_port, header, line, mark, median, rounded

import jaxcgx as cgx
from jaxcgx.lab import Lab, Link, signals_raise, why_not
from jaxcgx.plan.overlay import Overlay, Tree
from jaxcgx.report.figures import draw_overlay
from jaxcgx.wan.overlays import search

HOSTS, RATE, SLOW = 4, 100_000_000, 10_000_000  # bit/s
ELEMENTS = 1 << 22
CODEC = cgx.MaxMin(4)
GAIN, NEAR, PROBES = 1.5, 1.2, 10  # goals
MOST_UPDATES = 40
SETUPS = {  # the hosts of the link that is slow first, and of the one that is slow later
    "line": [(1,), (2,)],
    "pair": [(0, 1), (1, 2)],
}
NAMES = {"line": "the line of host {}", "pair": "the link between hosts {} and {}"}
CHARTS = [
    dict(table="steps", title="Steps while the slow link moves", x="step", y=["ms"], by="setup"),
    dict(table="rows", title="One exchange", x="schedule", y=["ms_of_repetitions"], panel="setup"),
]

NOTES = f"""\
- Four hosts at {RATE // 10**6} Mbit/s. line: one host has a tenth of that rate, in both directions. pair: the link
  between two hosts has a tenth of it. These two are neighbours in the fixed ring.
- One exchange: {ELEMENTS:,} float32 in {CODEC} over Tcp, {CODEC.wire_bytes((ELEMENTS,), "float32") / 1e6:.2f} MB.
  ring: ranks 0, 1, 2, 3. owners and trees: the overlays that `search` finds for the rates that were set. topology: the
  overlay of a `Topology`, which measured the links itself, after the updates and probes that the row names. Goal:
  {GAIN} times as fast as the ring.
- The slow host's line must carry the message at least once in each direction. The ring carries 1.5 times as much. So if
  a line is slow, a schedule gains at most a factor of 1.5 by its bytes. The ring also waits at every step.
- Then another link becomes slow instead, and the steps continue, each with an exchange and an update. Goal: within
  {NEAR} of the best overlay for the new links, measured at the end, after at most {PROBES} probes.
"""


# In a host


def run_rank(address, rank, processes):
    """Executes the lines of the input, and prints the results."""
    jax.config.update("jax_num_cpu_devices", 1)
    jax.distributed.initialize(address, processes, rank)
    mesh, spec = Mesh(processes), PartitionSpec("data")
    x = mesh.array(np.random.default_rng(rank).standard_normal(ELEMENTS, np.float32))
    tcp = cgx.Tcp("data", timeout=120)
    topology = cgx.wan.Topology(mesh.mesh, tcp, greed=0.9)
    programs, same = {}, True

    def program(schedule):
        if schedule not in programs:
            body = lambda x: cgx.compressed_pmean(x, tcp, cgx.Plan.every(CODEC, schedule=schedule))
            mapped = jax.shard_map(body, mesh=mesh.mesh, in_specs=spec, out_specs=spec, check_vma=False)
            programs[schedule] = jax.jit(mapped)
            jax.block_until_ready(programs[schedule](x))
        return programs[schedule]

    def exchange(schedule):
        nonlocal same
        run = program(schedule)
        start = time.perf_counter()
        y = jax.block_until_ready(run(x))
        took = time.perf_counter() - start
        bits = np.asarray(y.addressable_data(0)).view(np.uint32)
        digest = np.array([bits.sum(dtype=np.uint32), np.bitwise_xor.reduce(bits)])
        everybody = np.asarray(jax.experimental.multihost_utils.process_allgather(digest))
        same &= bool((everybody == everybody[0]).all())
        return took * 1e3

    print("READY", flush=True)
    for text in sys.stdin:
        what = json.loads(text)
        if what["do"] == "exchange":
            schedule = what["schedule"] if isinstance(what["schedule"], str) else read_overlay(what["schedule"])
            answer = dict(ms=[exchange(schedule) for _ in range(what["times"])])
        elif what["do"] == "update":
            topology.update()
            rates = np.nan_to_num(topology.links.rates).tolist()
            answer = dict(version=topology.version, probes=topology.probes, rates=rates)
            answer["overlay"] = [(tree.parents, tree.share) for tree in topology.overlay.trees]
            answer["greedy"] = topology.links.greedy(0.9)
        else:
            answer = dict(same=same)
        print("ANSWER", json.dumps(answer), flush=True)


def read_overlay(trees):
    return Overlay(tuple(Tree(tuple(parents), share) for parents, share in trees))


def spelled(overlay):
    return [(tree.parents, tree.share) for tree in overlay.trees]


# In the process that starts the other ones


class Hosts:
    """Four hosts that get their orders together."""

    def __init__(self, lab, stack):
        address = f"{lab.address(0)}:{free_port()}"
        self.running = []
        for rank in range(HOSTS):
            words = [sys.executable, pathlib.Path(__file__).resolve(), "--rank", json.dumps([address, rank, HOSTS])]
            options = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            self.running.append(lab.start(rank, words, env=os.environ | {"JAX_PLATFORMS": "cpu"}, **options))
            stack.callback(self.running[-1].wait)
            stack.callback(self.running[-1].kill)
        self.hear("READY")

    def hear(self, word):
        found = [next((text for text in process.stdout if text.startswith(word)), None) for process in self.running]
        if None in found:
            raise RuntimeError("topology.py: a process ended")
        return [text.removeprefix(word).strip() for text in found]

    def tell(self, do, **more):
        """Waits for the answers of all hosts, and returns that of rank 0."""
        for process in self.running:
            process.stdin.write(json.dumps(dict(do=do, **more)) + "\n")
            process.stdin.flush()
        return list(map(json.loads, self.hear("ANSWER")))

    def exchange(self, schedule, times):
        """Returns the milliseconds of each exchange, on the slowest host."""
        found = self.tell("exchange", schedule=schedule, times=times)
        return [max(each) for each in zip(*(host["ms"] for host in found))]

    def update(self):
        found = self.tell("update")
        if any(host["overlay"] != found[0]["overlay"] or host["version"] != found[0]["version"] for host in found):
            raise RuntimeError("topology.py: hosts have different overlays")
        return found[0]


def set_link(lab, setup, second, slow):
    """Makes the first or the second link of a setup slow, or restores its rate."""
    hosts = SETUPS[setup][second]
    if setup == "line":
        rate = SLOW if slow else RATE
        lab.change(*hosts, Link(rate, rate))
    else:
        lab.join(*hosts, f"{SLOW}bit") if slow else lab.part(*hosts)


def true_rates(setup, second):
    rates = np.full((HOSTS, HOSTS), RATE / 8.0)
    slow = SLOW / 8.0
    i, *others = SETUPS[setup][second]
    for j in others or range(HOSTS):  # the other host of a pair; the line of a host is its links to all
        rates[i, j] = rates[j, i] = slow
    return rates


def measure(setup, repeats):
    """Returns (rows, steps, overlays).

    The rows are the schedules with the first link slow. The steps are those while the slow link moves.
    """
    with Lab(HOSTS, Link(RATE, RATE)) as lab, contextlib.ExitStack() as stack:
        hosts = Hosts(lab, stack)
        set_link(lab, setup, second=False, slow=True)
        rates = true_rates(setup, second=False)
        schedules = {"ring": "ring", "two_shot": "two_shot", "owners": spelled(search.owners(rates))}
        schedules["trees"] = spelled(search.trees(rates))
        rows = [dict(setup=setup, schedule=name, ms=hosts.exchange(each, repeats)) for name, each in schedules.items()]
        for updates in range(1, MOST_UPDATES + 1):
            found = hosts.update()
            if found["greedy"] == 0.9 and updates > 1:
                break
            hosts.exchange(found["overlay"], 1)
        before = found
        ms = hosts.exchange(found["overlay"], repeats)
        rows.append(dict(setup=setup, schedule="topology", ms=ms, updates=updates, probes=found["probes"]))
        ring = rows[0]["ms"]
        for row in rows:
            row["faster"] = round(median(ring) / median(row["ms"]), 2)
            row["ms_of_repetitions"], row["ms"] = rounded(row["ms"]), median(row["ms"])

        set_link(lab, setup, second=False, slow=False)
        set_link(lab, setup, second=True, slow=True)
        steps = []
        for step in range(20):
            (ms,) = hosts.exchange(found["overlay"], 1)
            steps.append(
                dict(
                    setup=setup,
                    step=step,
                    ms=round(ms, 1),
                    version=found["version"],
                    probes=found["probes"] - before["probes"],
                )
            )
            found = hosts.update()
        best = median(hosts.exchange(spelled(search.trees(true_rates(setup, second=True))), repeats))
        after = median(hosts.exchange(found["overlay"], repeats))
        if not all(host["same"] for host in hosts.tell("end")):
            raise RuntimeError("topology.py: replicas differ")
        near = next((step for step in steps[1:] if step["ms"] <= NEAR * best), None)
        moved = dict(
            setup=setup,
            best_ms=best,
            topology_ms=after,
            over_the_best=round(after / best, 2),
            steps_until_near=None if near is None else near["step"],
            probes_until_near=None if near is None else near["probes"],
            replicas="the same",
        )
        return rows, steps, moved, {"before": before, "after": found}


def main():
    parser = argparse.ArgumentParser(description="What a topology gains where a link is slow.")
    parser.add_argument("--only", choices=SETUPS, help="one setup")
    parser.add_argument("--repeats", type=int, default=5, metavar="N", help="exchanges of each kind (default: 5)")
    parser.add_argument("--out", type=pathlib.Path, metavar="DIR", help="where the results are written")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        run_rank(*json.loads(args.rank))
        return
    if why := why_not():
        sys.exit(f"topology.py: {why}")
    given = sys.argv[1:]
    command = shlex.join(["python", "benchmarks/topology.py", *given]) if given else "make bench-topology"
    load = round(os.getloadavg()[0], 1)
    report = Report(command, args.repeats, codec=str(CODEC), load=load, rows=[], moved=[], steps=[], charts=CHARTS)
    report.show("", f"Load average when it began: {load:g}.")
    out = args.out or (None if given else RESULTS)
    for setup in [args.only] if args.only else SETUPS:
        rows, steps, moved, overlays = measure(setup, args.repeats)
        report.data["rows"] += rows
        report.data["steps"] += steps
        first, second = (NAMES[setup].format(*hosts) for hosts in SETUPS[setup])
        report.show(
            "", f"{setup}: {first} is slow.", "", *header("schedule", "ms", "faster", "updates", "probes", "goal")
        )
        for row in rows:
            row["reached"] = row["faster"] >= GAIN
            reached = mark(row["reached"]) if row["schedule"] != "ring" else ""
            more = [str(row.get(key, "")) for key in ("updates", "probes")]
            report.show(line([row["schedule"], f"{row['ms']:.1f}", f"{row['faster']:.2f}", *more, reached]))
        near = moved["probes_until_near"]
        moved["reached"] = near is not None and near <= PROBES and moved["over_the_best"] <= NEAR
        report.data["moved"].append(moved)
        report.show("", f"Then {second} is slow in its place.", "")
        report.show(*header("", "best ms", "topology ms", "over best", "steps", "probes", "goal"))
        cells = [f"{moved['best_ms']:.1f}", f"{moved['topology_ms']:.1f}", f"{moved['over_the_best']:.2f}"]
        cells += [str(moved["steps_until_near"]), str(near), mark(moved["reached"])]
        report.show(line(["after the move", *cells]))
        if out:
            for when, found in overlays.items():
                name = f"topology_{setup}_{when}.png"
                rates = np.array(found["rates"])
                draw_overlay(read_overlay(found["overlay"]), out / name, np.where(rates > 0, rates, np.nan))
                report.show("", f"The overlay {when} the move: [{name}]({name}).")
    report.show("", *NOTES.splitlines())
    if out:
        report.write(out, "topology")


if __name__ == "__main__":
    with signals_raise():
        main()
