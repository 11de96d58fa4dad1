"""Measures what DGT's channels gain on links with jitter and loss: shorter steps, above all the longest, and losses.

    python benchmarks/late.py [--out DIR]

The two hosts are network namespaces, which need root. Rows that the result file already has are not measured again, so
an interrupted run continues. Remove the file to measure all of them.
"""

import argparse
import functools
import json
import os
import pathlib
import subprocess
import sys
import time

import jax
import numpy as np
from differential import TASKS
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from report import Growing, between_hosts, free_port, header, line, mark

import jaxcgx as cgx
from jaxcgx.codecs.base import spell
from jaxcgx.lab import Lab, Link, signals_raise
from jaxcgx.native import connections
from jaxcgx.text import parse_rate

TASK = TASKS["digits"]
RATE = "100mbit"
LINK = Link(parse_rate("late.py", RATE), parse_rate("late.py", RATE), delay=0.02, jitter=0.02, loss=0.005)
CHANNELS, K, DEADLINE = 3, 0.8, 0.06
STEPS, SEEDS = 40, 5
PLAN = cgx.MaxMin(8)
RELIABLE = "reliable"
DGT = functools.partial(cgx.wan.Differential, PLAN, K, rest="late-is-lost", deadline=DEADLINE)
RUNS = {
    RELIABLE: PLAN,
    "never late": DGT(deadline=1e6),
    "fixed": DGT(),
    "fixed, random": DGT(ranked=False),
    "adaptive": DGT(adaptive=K / 4),
    "adaptive, random": DGT(adaptive=K / 4, ranked=False),
}
CHARTS = [dict(table="rows", title="The longest steps", x="seed", y=["ms_95"], by="run")]
NOTES = f"""\
- Two hosts with links of {RATE}. Every packet is {LINK.delay} s late, and up to {LINK.jitter} s more.
  {LINK.loss:.1%} of the frames are lost. Tcp has {1 + CHANNELS} connections.
- The network for digits of `differential.py`, {spell(PLAN)}, {STEPS} steps for each of {SEEDS} seeds. A step before
  them compiles the program. reliable: the plain exchange. The others are DGT with K = {K} and rest="late-is-lost".
  never late: the deadline never passes. fixed and adaptive: with a deadline of {DEADLINE} s, and a fixed or an adaptive
  K. "random" chooses as many blocks at random.
- ms, 95 %, 99 %: the mean and quantiles of the times of all steps. MB/step: what a rank sends, as the kernel counts it.
- shorter: by which share the steps of a seed are shorter than those of the reliable exchange, and the slowest 5 %: the
  means over seeds, with their standard errors. Goal: above 0 by two standard errors.
- loss: on held-out data after the last step, the mean over seeds. below: the loss with random blocks minus the loss
  with ranked blocks of the same seed, with its standard error.
"""


@functools.cache
def mesh():
    return jax.make_mesh((2,), ("dc",))


def parts(arrays, spec):
    """Returns arrays of both hosts, of which this one has its part, or the whole with P()."""
    put = functools.partial(jax.make_array_from_process_local_data, NamedSharding(mesh(), spec))
    return jax.tree.map(put, arrays)


@functools.cache  # a step compiles once for all seeds
def make_train(name):
    exchange, axis = RUNS[name], cgx.Tcp("dc", connections=1 + CHANNELS)
    return cgx.make_train_step(TASK.loss, TASK.optimizer, mesh(), exchange, sharding=cgx.Sharding(axis))


def run_rank(address, rank, todo):
    """Trains the runs of a list of [run, seed]. Prints a row for each."""
    processors = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {processors[rank % len(processors)]})
    jax.config.update("jax_num_cpu_devices", 1)
    jax.distributed.initialize(address, 2, rank)
    evaluate, sent = jax.jit(TASK.loss), lambda: connections.sent()[1 - rank].bytes
    compiled = set()
    for name, seed in todo:
        rng, train = np.random.default_rng(seed), make_train(name)
        weights = TASK.weights(rng)
        batches, held_out = TASK.batches(rng, (STEPS, 2, TASK.batch), TASK.held_out)
        given = [parts([part[i, rank] for part in batches], P("dc")) for i in range(STEPS)]
        if name not in compiled:
            jax.block_until_ready(train.step(train.init(parts(weights, P())), given[0]))
            compiled.add(name)
        state, times, before = train.init(parts(weights, P())), [], sent()
        for batch in given:
            start = time.perf_counter()
            state, _ = jax.block_until_ready(train.step(state, batch))
            times.append(round(1e3 * (time.perf_counter() - start), 2))
        params = jax.tree.map(lambda x: np.asarray(x.addressable_data(0)), state.params)
        row = dict(run=name, seed=seed, ms=times, ms_95=float(np.quantile(times, 0.95)))
        row |= dict(sent_bytes=round((sent() - before) / STEPS), loss=round(float(evaluate(params, held_out)), 4))
        row["load"] = round(os.getloadavg()[0], 1)
        print("ROW", json.dumps(row), flush=True)


def measure(report):
    todo = [(name, seed) for seed in range(SEEDS) for name in RUNS if not report.has("rows", run=name, seed=seed)]
    if not todo:
        return
    with Lab(2, LINK) as lab:
        address, running = f"{lab.address(0)}:{free_port()}", []
        for rank in range(2):
            given = json.dumps(dict(address=address, rank=rank, todo=todo))
            words = [sys.executable, pathlib.Path(__file__).resolve(), "--rank", given]
            output = subprocess.PIPE if rank == 0 else subprocess.DEVNULL
            environment = os.environ | {"JAX_PLATFORMS": "cpu"}
            running.append(lab.start(rank, words, stdout=output, text=True, env=environment))
        for text in running[0].stdout:
            if text.startswith("ROW "):
                report.add("rows", json.loads(text.removeprefix("ROW ")))
        if running[0].wait():
            raise RuntimeError("late.py: rank 0 failed")


def with_error(values):
    """Returns (the mean, its standard error)."""
    return float(np.mean(values)), float(np.std(values, ddof=1) / len(values) ** 0.5)


def show(report):
    rows = {(row["run"], row["seed"]): row for row in report.data["rows"]}
    loads = [row["load"] for row in rows.values()]
    report.show("", f"Load average of the machine: {min(loads)} to {max(loads)}, on {os.cpu_count()} processors.")
    columns = "ms", "95 %", "99 %", "MB/step", "shorter", "goal", "slowest 5 %", "goal", "loss", "below"
    report.show("", *header("run", *columns, width=18))
    slowest = lambda row: float(np.mean(sorted(row["ms"])[-max(1, STEPS // 20) :]))
    for run in RUNS:
        mine = [rows[run, seed] for seed in range(SEEDS)]
        plain = [rows[RELIABLE, seed] for seed in range(SEEDS)]
        times = np.concatenate([row["ms"] for row in mine])
        cells = [run, *(f"{x:.0f}" for x in (times.mean(), *np.quantile(times, (0.95, 0.99))))]
        cells.append(f"{np.mean([row['sent_bytes'] for row in mine]) / 1e6:.3f}")
        for figure in (lambda row: np.mean(row["ms"]), slowest):
            mean, error = with_error([1 - figure(a) / figure(b) for a, b in zip(mine, plain)])
            cells += [""] * 2 if run == RELIABLE else [f"{mean:+.3f} ± {error:.3f}", mark(mean > 2 * error)]
        cells.append(f"{np.mean([row['loss'] for row in mine]):.3f}")
        chance = [rows.get((f"{run}, random", seed)) for seed in range(SEEDS)]
        if all(chance):
            mean, error = with_error([b["loss"] - a["loss"] for a, b in zip(mine, chance)])
            cells.append(f"{mean:+.4f} ± {error:.4f}")
        report.show(line([*cells, *[""] * (len(columns) + 1 - len(cells))], 18))


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    _, command, out = between_hosts(parser, "make bench-late", run_rank)
    report = Growing(command, out / "late.json", ["rows"], charts=CHARTS)
    measure(report)
    show(report)
    report.show("", *NOTES.splitlines())
    report.write(out, "late")


if __name__ == "__main__":
    with signals_raise():
        main()
