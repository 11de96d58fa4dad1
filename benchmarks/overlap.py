"""Measures how much of an exchange training steps hide, over Tcp between two hosts.

    python benchmarks/overlap.py [--rates RATE ...] [--repeats 15] [--out DIR]

The hosts are network namespaces, which need root. Each computes on one processor. The script also draws one step.
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
import jax.numpy as jnp
import numpy as np
import optax
from collectives import Call, Mesh
from jax import lax
from jax.sharding import PartitionSpec as P
from report import Report, between_hosts, header, line, mark, median, rounded
from timeline import draw, most_alike, of_rank_0

import jaxcgx as cgx
from jaxcgx.lab import signals_raise

LAYERS, WIDTH = 16, 1024  # 64 MiB of parameters
BATCHES = {"1gbit": [16, 64, 128, 256], "200mbit": [256, 384, 512]}  # {rate of the links: batches}
CODEC = cgx.MaxMin(4)
PLAN = cgx.Plan(CODEC, min_size=0)
EXPOSED = 0.25  # goal: the exposed part of a step whose computation and exchange take about as long
ALIKE = 0.6, 1.67  # the ratio of the exchange to the computation that counts as about as long
STEPS = {  # options of make_train_step
    "at the end": dict(exchange=PLAN),
    "at the end, 4 MiB": dict(exchange=cgx.Plan(CODEC, min_size=0, fusion_mb=4)),
    "overlapped": dict(exchange=PLAN, overlap="backward"),
    "priority": dict(exchange=PLAN, overlap=cgx.Priority()),
}
RUN = 4  # steps with "priority" that are timed together, because an exchange continues in the next step
LIMIT = 900  # seconds
PROGRAMS = "compute", "at the end", "overlapped", "priority"
CHART = dict(table="rows", title="A step", x="batch", y=[f"ms {name}" for name in PROGRAMS], panel="rate")

NOTES = f"""\
- {LAYERS} layers of {WIDTH} x {WIDTH} float32, {CODEC} with feedback, SGD, two hosts, each on one processor.
- compute: the same step without any exchange. exchange: how much longer a step takes with its exchange at the end, in
  one message. exposed: how much longer the overlapped step takes than compute, over the overlapped step. hidden: the
  part of the exchange that is hidden. Each turn runs all programs. Ratios are formed within a turn, and the table has
  their medians.
- priority: a step with overlap=Priority(), whose exchange continues in the next step. {RUN} steps in a row are timed
  together, after one that isn't timed. It has its own exposed part.
- Kernels and the network stack run on the processor that computes, so they can't be hidden. Only the time on the wire
  can, behind the backward pass, which is two thirds of compute.
- The forward pass, a third of compute, hides nothing of an overlapped step. So the step takes at least a third of
  compute and the time on the wire. If that time equals compute, exposed is at least 0.25: the goal is then the bound of
  overlap with the backward pass alone, and leaves no time for kernels. Steps with priority also hide the exchange
  behind the next forward pass.
- Goal: exposed at most {EXPOSED} where the exchange takes {ALIKE[0]} to {ALIKE[1]} times as long as compute.
"""


def loss(params, x):
    for name in sorted(params):
        x = jnp.tanh(x @ params[name])
    return (x**2).mean()


def alone(mesh, params, batch):
    """A step that does nothing with its gradients."""

    def step(params, x):
        gradients = cgx.grad(loss, "data", None)(params, x)
        return jax.tree.map(lambda p, g: p - 1e-2 * g, params, gradients)

    mapped = jax.shard_map(step, mesh=mesh, in_specs=(P(), P("data")), out_specs=P(), check_vma=False)
    run, state = jax.jit(mapped, donate_argnums=0), [jax.tree.map(jnp.copy, params)]

    def again():
        state[0] = jax.block_until_ready(run(state[0], batch))

    return again


def exchanged(mesh, params, batch, options):
    train = cgx.make_train_step(loss, optax.sgd(1e-2), mesh, sharding=cgx.Sharding(cgx.Tcp("data")), **options)
    state = train.init(params)

    def again():
        nonlocal state
        state, _ = jax.block_until_ready(train.step(state, batch))

    def finish():
        nonlocal state
        state = jax.block_until_ready(train.finish(state))

    again.text, again.finish = lambda: train.step.programs(state, batch)[0].as_text(), finish
    return again


def run_rank(address, rank, processes, batch, repeats):
    """Measures all programs together with the other rank. Prints the times, and the events of one step."""
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank % os.cpu_count()]})
    cgx.keep_pages(large=True)
    jax.config.update("jax_num_cpu_devices", 1)
    jax.distributed.initialize(address, processes, rank)
    mesh = Mesh(processes)
    together = Call(mesh, lambda x: lax.psum(x, "data"), np.zeros(1, np.int32))
    numbers = np.random.default_rng(0)
    shape = LAYERS, WIDTH, WIDTH
    weights = (numbers.standard_normal(shape, np.float32) / WIDTH**0.5).astype(np.float32)
    params = {f"layer{i:02}": weight for i, weight in enumerate(weights)}
    params = jax.device_put(params, jax.sharding.NamedSharding(mesh.mesh, P()))
    x = mesh.array(np.random.default_rng(rank).standard_normal((batch, WIDTH), np.float32))
    programs = {"compute": alone(mesh.mesh, params, x)}
    programs |= {name: exchanged(mesh.mesh, params, x, options) for name, options in STEPS.items()}
    times = {name: [] for name in programs}
    for turn in range(repeats + 3):
        for name, program in programs.items():
            late = name == "priority"
            if late:
                program()
            together()
            start = time.perf_counter()
            for _ in range(RUN if late else 1):
                program()
            if turn >= 3:
                times[name].append((time.perf_counter() - start) * 1e3 / (RUN if late else 1))
            if late:
                program.finish()  # so that its last exchange doesn't slow the next program
    print("RESULTS", json.dumps(dict(ms=times, events=events(programs["overlapped"]))), flush=True)


def events(program, sums=r"layer\d"):
    """Returns the events of one run: [what, ms of its start, ms of its end]. `what` is "compute" or "exchange".

    sums: a regular expression for the sums that count, by default those of layers, unlike that of the loss.
    """
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            program()
        (file,) = pathlib.Path(folder).rglob("*.trace.json.gz")
        found = [e for e in json.loads(gzip.decompress(file.read_bytes()))["traceEvents"] if e.get("ph") == "X"]
    ended = sorted((e for e in found if e["name"].startswith("end: ")), key=lambda e: e["ts"])
    end_of = lambda e: next((x for x in ended if x["name"] == f"end: {e['name']}" and x["ts"] >= e["ts"]), e)
    found = [e for e in found if "hlo_op" in e.get("args", {})]
    first = min(e["ts"] for e in found)
    # Both calls of a sum have the name of the same JAX operation.
    target = dict(re.findall(r'%(\S+) = .*custom_call_target="(\w+)"', program.text()))
    counted = set(re.findall(rf"%(\S+) = .*custom-call.*{sums}", program.text()))
    is_of = lambda e, name: target.get(e["name"]) == name and e["name"] in counted
    of = lambda name: sorted((e for e in found if is_of(e, name)), key=lambda e: e["ts"])
    spans = [["compute", e["ts"], e["ts"] + e["dur"]] for e in found if e["name"] not in target]
    # Sums end in the order in which they begin.
    for begin, end in zip(of("jaxcgx_tcp_allreduce"), of("jaxcgx_tcp_allreduce_end")):
        last = end_of(end)
        spans.append(["exchange", begin["ts"], last["ts"] + last["dur"]])
    return [
        [what, round((start - first) / 1e3, 3), round((end - first) / 1e3, 3)]
        for what, start, end in sorted(spans, key=lambda s: s[1])
    ]


def figures(rate, batch, ms):
    compute, end, overlapped, late = (np.array(ms[name]) for name in PROGRAMS)
    ratio = median((end - compute) / compute)
    exposed, exposed_late = (median((step - compute) / step) for step in (overlapped, late))
    found = dict(
        rate=rate,
        batch=batch,
        ms={name: median(each) for name, each in ms.items()},
        exchange_over_compute=ratio,
        exposed=exposed,
        hidden=median(1 - (overlapped - compute) / (end - compute)),
        exposed_with_priority=exposed_late,
        ms_of_repetitions={name: rounded(each) for name, each in ms.items()},
    )
    if ALIKE[0] <= ratio <= ALIKE[1]:
        found |= dict(reached=exposed <= EXPOSED, reached_with_priority=exposed_late <= EXPOSED)
    return found


def main():
    parser = argparse.ArgumentParser(description="How much of an exchange the backward pass hides.")
    parser.add_argument("--rates", nargs="+", choices=BATCHES, default=BATCHES, help="of the links (default: all)")
    parser.add_argument("--repeats", type=int, default=15, metavar="N", help="turns (default: 15)")
    args, command, out = between_hosts(parser, "make bench-overlap", run_rank)
    report = Report(command, args.repeats, codec=str(CODEC), rows=[], goal=EXPOSED, charts=[CHART])
    names = ["compute", *STEPS]
    columns = *(f"{n} ms" for n in names), "exch./comp.", "hidden", "exposed", "goal", "exposed, priority", "goal"
    report.show("", *header("links, batch", *columns, width=14))
    spans = []
    for rate, batch in [(each, batch) for each in args.rates for batch in BATCHES[each]]:
        rank = [pathlib.Path(__file__).resolve(), "--rank"]
        found = of_rank_0(rank, rate, LIMIT, batch=batch, repeats=args.repeats)
        row = figures(rate, batch, found["ms"])
        spans.append(found["events"])
        report.data["rows"].append(row)
        shares = [f"{row[name]:.2f}" for name in ("exchange_over_compute", "hidden")]
        for end in "", "_with_priority":
            shares += [f"{row[f'exposed{end}']:.2f}", mark(row[f"reached{end}"]) if f"reached{end}" in row else ""]
        cells = [f"{rate}, {batch}", *(f"{row['ms'][n]:.1f}" for n in names), *shares]
        report.show(line(cells, 14))
    report.show("", *NOTES.splitlines())
    if out:
        alike, which = most_alike(report.data, spans, "exchange_over_compute")
        report.show("", f"One overlapped step {which}: [overlap.png](overlap.png).")
        report.write(out, "overlap")
        draw(out / "overlap.png", alike, f"One step {which}: messages travel while the backward pass goes on")


if __name__ == "__main__":
    with signals_raise():
        main()
