"""Measures how far steps hide communication (P3 and DGT), over Tcp between two hosts.

    python benchmarks/priority.py [--rates RATE ...] [--repeats 5] [--out DIR]

The hosts are network namespaces, which need root. Each computes on one processor. The script also draws some steps.
"""

import argparse
import gzip
import json
import os
import pathlib
import re
import tempfile
import time

import jax
import numpy as np
from collectives import Call, Mesh
from jax import lax
from jax.sharding import PartitionSpec as P
from overlap import alone, exchanged
from report import Report, between_hosts, header, line, mark, median, rounded
from timeline import draw, most_alike, of_rank_0

import jaxcgx as cgx
from jaxcgx.lab import signals_raise

LAYERS, WIDTH = 8, 1024  # 32 MiB of parameters
BATCHES = {"50mbit": [704, 1024, 1440, 2048, 3072], "25mbit": [2880]}  # {rate of the links: batches}
CODEC = cgx.MaxMin(4)
PLAN = cgx.Plan(CODEC, min_size=0)
MORE = 0.15  # goal: how much longer a step may take than the longer of computation and communication
ALIKE = 0.6, 1.67  # the ratio of communication to computation for which the goal counts
RUN = 4  # steps that are timed together, because an exchange continues in the next step
STEPS = {
    "plain": dict(exchange=PLAN),
    "backward": dict(exchange=PLAN, overlap="backward"),
    "priority": dict(exchange=PLAN, overlap=cgx.Priority()),
    "DGT": dict(exchange=cgx.wan.Differential(PLAN, k=0.5)),
    "mixed sync": dict(exchange=cgx.wan.MixedSync(PLAN)),
}
LESS = 0.25  # goal of DGT: how much less time a step takes, at least, than the plain step
LIMIT = 900  # seconds
CHART = dict(
    table="rows",
    title="A step",
    x="batch",
    y=["ms compute", "ms communicate", "ms plain", "ms priority", "ms DGT", "ms mixed sync"],
    panel="rate",
)

NOTES = f"""\
- {LAYERS} layers of {WIDTH} x {WIDTH} float32, {CODEC} with feedback, SGD, two hosts, each on one processor.
- compute: the same step without any exchange. communicate: the exchange of such gradients without any computation.
  plain, backward and priority: steps of make_train_step, with overlap=None, "backward" and Priority(). DGT: with
  Differential(k=0.5). mixed sync: with MixedSync. {RUN} steps in a row are timed together, after one that isn't timed.
  Each turn runs all programs. Ratios are formed within a turn, and the table has their medians.
- more: how much longer a step with "priority" takes than the longer of compute and communicate. at best: the same if
  kernels took no time and the wire always sent the first layer that it can. The gradient of the first layer is ready
  last and needed first, so its exchange can't be hidden. That of the last layer is ready first, but from its arrival
  until its next gradient, the wire has nothing to send.
- Goal: more is at most {MORE} if communicate takes {ALIKE[0]} to {ALIKE[1]} times as long as compute.
- less: how much less time a step with DGT takes than the plain step, goal {LESS}. DGT hides half of the exchange, but
  not more than the time of the rest of the step. So it can hide at most a quarter of the plain step if both are equal,
  and a third if communicate takes twice as long as compute.
- In the picture, a bar begins when a layer's gradients are sent, and ends when the next step has waited for them. A
  step waits for the first layer first. Gradients that arrived before the step waited for them have too long a bar,
  because the trace doesn't have the moment of their arrival.
"""


def communicate(mesh, params):
    """An exchange, with feedback, of gradients that already exist."""
    exchange = cgx.compress_gradients(cgx.Tcp("data"), PLAN, axis_size=mesh.size)
    kept = cgx.state_specs(jax.eval_shape(exchange.init, params), "data")
    on_ranks = lambda f, given, out: jax.shard_map(f, mesh=mesh, in_specs=given, out_specs=out, check_vma=False)
    run = jax.jit(on_ranks(exchange.update, (P(), kept), (P(), kept)), donate_argnums=1)
    state = [jax.jit(on_ranks(exchange.init, P(), kept))(params)]

    def again():
        _, state[0] = jax.block_until_ready(run(params, state[0]))

    return again


def run_rank(address, rank, processes, batch, repeats):
    """Measures all programs together with the other rank. Prints the times, and the events of some steps."""
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank % os.cpu_count()]})
    cgx.keep_pages(large=True)
    jax.config.update("jax_num_cpu_devices", 1)
    jax.distributed.initialize(address, processes, rank)
    mesh = Mesh(processes)
    together = Call(mesh, lambda x: lax.psum(x, "data"), np.zeros(1, np.int32))
    numbers = np.random.default_rng(0)
    weights = (numbers.standard_normal((LAYERS, WIDTH, WIDTH), np.float32) / WIDTH**0.5).astype(np.float32)
    params = {f"layer{i:02}": weight for i, weight in enumerate(weights)}
    params = jax.device_put(params, jax.sharding.NamedSharding(mesh.mesh, P()))
    x = mesh.array(np.random.default_rng(rank).standard_normal((batch, WIDTH), np.float32))
    programs = {"compute": alone(mesh.mesh, params, x), "communicate": communicate(mesh.mesh, params)}
    programs |= {name: exchanged(mesh.mesh, params, x, options) for name, options in STEPS.items()}
    times = {name: [] for name in programs}
    for turn in range(repeats + 1):
        for name, program in programs.items():
            program()
            together()
            start = time.perf_counter()
            for _ in range(RUN):
                program()
            if turn:
                times[name].append((time.perf_counter() - start) * 1e3 / RUN)
    print("RESULTS", json.dumps(dict(ms=times, events=events(programs["priority"]))), flush=True)


def events(program):
    """Returns the events of some steps: [what, ms of its start, ms of its end].

    `what` is "compute", or the layer of an exchange.
    """
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(RUN):
                program()
        (file,) = pathlib.Path(folder).rglob("*.trace.json.gz")
        found = [e for e in json.loads(gzip.decompress(file.read_bytes()))["traceEvents"] if e.get("ph") == "X"]
    text = program.text()
    calls = dict(re.findall(r'%(\S+) = .*custom_call_target="(\w+)"', text))
    layer = dict(re.findall(r"%(\S+) = .*custom-call.*(layer\d+)", text))
    found = [e for e in found if "hlo_op" in e.get("args", {})]
    first = min(e["ts"] for e in found)
    spans = [["compute", e["ts"], e["ts"] + e["dur"]] for e in found if e["name"] not in calls]
    # The exchange of the loss belongs to no layer.
    is_of = lambda e, target: calls.get(e["name"]) == target and e["name"] in layer
    of = lambda target: sorted((e["ts"], e["name"]) for e in found if is_of(e, target))
    waits = of("jaxcgx_tcp_allreduce_end")
    # Waits follow each other. A sum ends when the wait for the next one begins. The last one ends when the next event
    # begins.
    begins = sorted([at for at, _ in waits] + [start for _, start, _ in spans])
    of_waits = {at for at, _ in waits}
    ends = []
    for i, (at, name) in enumerate(waits):
        behind = of_waits if (i + 1) % LAYERS else set(begins) - of_waits
        ends.append((layer[name], min((t for t in begins if t > at and t in behind), default=at)))
    for at, name in of("jaxcgx_tcp_allreduce"):
        later = [t for each, t in ends if each == layer[name] and t > at]
        spans += [[layer[name], at, min(later)]] if later else []
    return [[what, round((start - first) / 1e3, 3), round((end - first) / 1e3, 3)] for what, start, end in spans]


def at_best(compute, wire):
    """Returns how much longer than the longer of the two a step takes if nothing but the order of layers limits it.

    A layer has three products of matrices, the first layer two. In the backward pass, the first product of a layer is
    its gradient.
    """
    product, left = compute / (3 * LAYERS - 1), np.zeros(LAYERS)  # left: the time on the wire of unsent gradients

    def send(time):
        for i, each in enumerate(left):
            left[i] -= min(time, each)
            time -= each - left[i]

    for _ in range(RUN):
        waited = 0.0
        for i in range(LAYERS):
            waits = left[: i + 1].sum()
            send(waits + product)
            waited += waits
        for i in reversed(range(LAYERS)):
            send(product)
            left[i] = wire / LAYERS
            if i:
                send(product)
    return (compute + waited) / max(compute, wire) - 1


def figures(rate, batch, ms):
    compute, wire, late = (np.array(ms[name]) for name in ("compute", "communicate", "priority"))
    ratio, more = median(wire / compute), median(late / np.maximum(compute, wire) - 1)
    less = median(1 - np.array(ms["DGT"]) / np.array(ms["plain"]))
    found = dict(
        rate=rate,
        batch=batch,
        ms={name: median(each) for name, each in ms.items()},
        communicate_over_compute=ratio,
        more=more,
        at_best=at_best(median(compute), median(wire)),
        less=less,
        less_reached=less >= LESS,
        ms_of_repetitions={name: rounded(each) for name, each in ms.items()},
    )
    return found | (dict(reached=more <= MORE) if ALIKE[0] <= ratio <= ALIKE[1] else {})


def main():
    parser = argparse.ArgumentParser(description="Whether steps take as long as the longer of computation and wire.")
    parser.add_argument("--rates", nargs="+", choices=BATCHES, default=BATCHES, help="of the links (default: all)")
    parser.add_argument("--repeats", type=int, default=5, metavar="N", help="turns (default: 5)")
    args, command, out = between_hosts(parser, "make bench-priority", run_rank)
    report = Report(command, args.repeats, codec=str(CODEC), rows=[], goal=MORE, charts=[CHART])
    names = ["compute", "communicate", *STEPS]
    columns = *(f"{n} ms" for n in names), "comm./comp.", "at best", "more", "goal", "less", "goal"
    report.show("", *header("links, batch", *columns, width=14))
    spans = []
    for rate, batch in [(each, batch) for each in args.rates for batch in BATCHES[each]]:
        rank = [pathlib.Path(__file__).resolve(), "--rank"]
        found = of_rank_0(rank, rate, LIMIT, batch=batch, repeats=args.repeats)
        row = figures(rate, batch, found["ms"])
        spans.append(found["events"])
        report.data["rows"].append(row)
        shares = [f"{row[name]:.2f}" for name in ("communicate_over_compute", "at_best", "more")]
        reached = mark(row["reached"]) if "reached" in row else ""
        shares += [reached, f"{row['less']:.2f}", mark(row["less_reached"])]
        report.show(line([f"{rate}, {batch}", *(f"{row['ms'][n]:.1f}" for n in names), *shares], 14))
    report.show("", *NOTES.splitlines())
    if out:
        alike, which = most_alike(report.data, spans, "communicate_over_compute")
        report.show("", f"Steps {which}: [priority.png](priority.png).")
        report.write(out, "priority")
        draw(out / "priority.png", alike, f"Steps {which}: a bar ends where the next step has waited for its gradients")


if __name__ == "__main__":
    with signals_raise():
        main()
