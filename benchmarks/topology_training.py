"""Measures training steps whose overlay follows the links: a link becomes slow, and later another one in its place.

    python benchmarks/topology_training.py [--only line|pair] [--repeats 5] [--out DIR]

Each of four centers is a host with two ranks. The hosts are network namespaces, which need root.
"""

import argparse
import contextlib
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from host import serve
from hosts import Hosts
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from report import Report, between_hosts, header, line, mark, median
from topology import NAMES, NEAR, RATE, SETUPS, SLOW, set_link, true_rates
from wan_host import AXES, BITS4, TCP

import jaxcgx as cgx
from jaxcgx.lab import Lab, Link, signals_raise
from jaxcgx.wan.overlays import search

SHAPE = 4, 2  # centers, ranks in each
INPUTS, HIDDEN = 64, 25_600  # of a network with two layers, and as many outputs as inputs
EXAMPLES = 4  # per rank and step
EVERY = 5  # steps from one update of the topology to the next
BEFORE, AFTER = 4 * EVERY, 6 * EVERY  # steps of the topology before a link moves, and after it
CHARTS = [
    dict(table="steps", title="Training steps while the slow link moves", x="step", y=["ms"], by="setup", log=True)
]
NOTES = f"""\
- Four hosts at {RATE // 10**6} Mbit/s with two ranks each, and a mesh ("dc", "local"). line: one host has
  {SLOW // 10**6} Mbit/s, in both directions. pair: the link between two hosts has it. A network of two layers with
  {2 * INPUTS * HIDDEN:,} parameters trains, with 4 bits between the hosts and float32 in them. It computes little, so a
  step is mostly exchange.
- topology: `cgx.wan.Topology(...).steps(...)` with `make_train_step`, which updates every {EVERY} steps. It begins
  while all links are equal. Then the first link becomes slow ("before the move"), and later the second one in its place
  ("after"). Its time is the median of the last {EVERY - 1} steps, without the one that updates. best: the same step
  with the trees that `search` finds for the rates that were set. Goal: within {NEAR} of it.
- worst step: the longest step of the topology, in which it compiles a program for another overlay.
- until near: how many steps after the change the first one was within {NEAR} of the best.
"""


# In a host


def loss_fn(params, x):
    return jnp.mean((jnp.tanh(x @ params["first"]) @ params["second"] - x) ** 2)


class Program:
    """A training step and its state."""

    def __init__(self, make, mesh):
        rng, self._training = np.random.default_rng(0), make(mesh)
        normal = lambda *shape: 0.02 * rng.standard_normal(shape, np.float32)
        params = dict(first=normal(INPUTS, HIDDEN), second=normal(HIDDEN, INPUTS))
        x = normal(mesh.size * EXAMPLES, INPUTS)
        self._batch = jax.make_array_from_callback(x.shape, NamedSharding(mesh, P(AXES)), lambda place: x[place])
        self._state = self._training.init(params)

    def run(self, steps):
        for _ in range(steps):
            self._state, _ = jax.block_until_ready(self._training.step(self._state, self._batch))


def scheduled(overlay):
    plan = cgx.Plan.every(BITS4, schedule={"dc": overlay, "local": "auto"})
    return lambda mesh: cgx.make_train_step(loss_fn, optax.sgd(0.1), mesh, plan, sharding=cgx.Sharding(TCP))


def adapting(mesh):
    topology = cgx.wan.Topology(mesh, TCP[0])
    return topology.steps(lambda overlay: scheduled(overlay)(mesh), every=EVERY)


def run_rank(address, rank, ranks, setup):
    jax.config.update("jax_num_cpu_devices", 1)
    jax.distributed.initialize(address, ranks, rank)
    mesh = jax.make_mesh(SHAPE, AXES, axis_types=(AxisType.Auto,) * 2)
    makers = {"ring": scheduled(cgx.wan.Overlay.ring(range(SHAPE[0]))), "topology": adapting}
    for second, name in enumerate(("best before", "best after")):
        makers[name] = scheduled(search.trees(true_rates(setup, second)))
    serve({"jaxcgx": {name: lambda make=make: Program(make, mesh) for name, make in makers.items()}})


# In the process that starts the other ones


def measure(setup, repeats):
    """Returns (rows, steps of the topology)."""
    with contextlib.ExitStack() as stack:
        lab = stack.enter_context(Lab(SHAPE[0], Link(RATE, RATE)))
        command = [sys.executable, pathlib.Path(__file__).resolve(), "--rank"]
        hosts = Hosts(stack, lab, {"jaxcgx": command}, dict(setup=setup), ranks=SHAPE[1])
        ms = lambda name, count: [max(hosts.ask(name, 1)["ms"]) for _ in range(count)]
        alone = lambda name: median(ms(name, repeats))
        for (
            name
        ) in hosts.methods:  # the first step compiles, and so does the next one, which gets the first one's arrays
            hosts.ask(name, EVERY)
        set_link(lab, setup, second=False, slow=True)
        rows, steps = [], []

        def take(when, count):
            first = len(steps)
            steps.extend(dict(setup=setup, step=first + i, ms=round(x, 1)) for i, x in enumerate(ms("topology", count)))
            mine, best, ring = [each["ms"] for each in steps[-count:]], alone(f"best {when}"), alone("ring")
            near = next((i for i, x in enumerate(mine) if x <= NEAR * best), None)
            own = median(mine[1 - EVERY :])
            over = round(own / best, 2)
            rows.append(dict(setup=setup, when=when, ring_ms=ring, best_ms=best, topology_ms=own, over_the_best=over))
            rows[-1] |= dict(worst_ms=max(mine), steps_until_near=near, reached=over <= NEAR)

        take("before", BEFORE)
        set_link(lab, setup, second=False, slow=False)
        set_link(lab, setup, second=True, slow=True)
        take("after", AFTER)
        return rows, steps


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", choices=SETUPS, help="one setup")
    parser.add_argument("--repeats", type=int, default=5, metavar="N", help="counted steps (default: 5)")
    args, command, out = between_hosts(parser, "make bench-topology", run_rank)
    report = Report(command, args.repeats, rows=[], steps=[], charts=CHARTS)
    for setup in [args.only] if args.only else SETUPS:
        rows, steps = measure(setup, args.repeats)
        report.data["rows"] += rows
        report.data["steps"] += steps
        first, second = (NAMES[setup].format(*hosts) for hosts in SETUPS[setup])
        report.show("", f"{setup}: {first} is slow, then {second}.", "")
        report.show(
            *header("ms of a step", "ring", "best", "topology", "over best", "worst step", "until near", "goal")
        )
        for row in rows:
            cells = [f"{row[name]:.0f}" for name in ("ring_ms", "best_ms", "topology_ms")]
            cells += [f"{row['over_the_best']:.2f}", f"{row['worst_ms']:.0f}", str(row["steps_until_near"])]
            report.show(line([f"{row['when']} the move", *cells, mark(row["reached"])]))
    report.show("", *NOTES.splitlines())
    if out:
        report.write(out, "topology-training")


if __name__ == "__main__":
    with signals_raise():
        main()
