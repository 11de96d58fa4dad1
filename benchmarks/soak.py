"""Trains for many steps between two processes, and checks that memory, descriptors and residuals stay bounded.

    python benchmarks/soak.py [--steps 100000]

The processes exchange over Tcp on loopback, with feedback. The script fails if one of the goals is missed.
"""

import argparse
import hashlib
import itertools
import json
import os
import pathlib
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from report import RESULTS, Report, free_port, header, line, mark

import jaxcgx as cgx

STEPS, SAMPLES = 100_000, 100
SETTLED = 0.1  # the part of the steps after which nothing may grow any more
GROWTH = 0.03  # goal: the most that memory grows after that
SPREAD = 1.5  # goal: the largest norm of the residuals after that, over the largest one before
POOLS = 2  # goal: the most threads that a pool, such as gRPC's, starts late
BATCHES = 64
SIZES = 64, 256, 16
CHARTS = [
    dict(table="samples", title=title, x="step", y=[y], by="rank")
    for title, y in (("Memory", "memory_mib"), ("Norm of the residuals", "residual_norm"))
]
NOTES = f"""\
- A step trains a network of two layers on one of {BATCHES} batches, with `MaxMin(4, rounding="stochastic")`, which
  plain SGD with feedback follows. Each of {SAMPLES} samples has the resident memory of a process, its open descriptors
  and threads, and the norm of all of its residuals.
- settled: the largest number in the first {SETTLED:.0%} of the steps. Goals: after that, memory grows by at most
  {GROWTH:.0%}, descriptors don't, pools start at most {POOLS} threads, and the norm is at most {SPREAD:g} times as
  large. At the end, both processes have the same parameters.
"""


def run_rank(address, rank, steps):
    """Prints samples, one a line, and then a digest of the parameters."""
    jax.config.update("jax_num_cpu_devices", 1)
    jax.distributed.initialize(address, 2, rank)
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("data",))
    rng = np.random.default_rng(0)
    whole = [rng.standard_normal((2 * 8, size), np.float32) for size in (*[SIZES[0]] * BATCHES, SIZES[2])]
    *inputs, targets = (
        jax.make_array_from_callback(x.shape, jax.NamedSharding(mesh, jax.P("data")), lambda at, x=x: x[at])
        for x in whole
    )

    def loss_fn(params, batch):
        x, y = batch
        return jnp.mean((jnp.tanh(x @ params["in"]) @ params["out"] - y) ** 2)

    train = cgx.make_train_step(
        loss_fn, optax.sgd(0.02), mesh, cgx.MaxMin(4, rounding="stochastic"), sharding=cgx.Sharding(cgx.Tcp("data"))
    )
    shapes = dict(zip(("in", "out"), itertools.pairwise(SIZES)))
    state = train.init({name: 0.1 * rng.standard_normal(shape, np.float32) for name, shape in shapes.items()})
    for step in range(1, steps + 1):
        state, metrics = train.step(state, (inputs[step % BATCHES], targets))
        if step % max(1, steps // SAMPLES) == 0:
            residuals = jax.tree.leaves(state.exchange.own.residuals)
            sample = dict(
                step=step,
                rank=rank,
                memory_mib=int(pathlib.Path("/proc/self/statm").read_text().split()[1])
                * os.sysconf("SC_PAGE_SIZE")
                / 2**20,
                descriptors=len(os.listdir("/proc/self/fd")),
                threads=len(os.listdir("/proc/self/task")),
                residual_norm=float(np.sqrt(sum(np.sum(np.square(r.addressable_data(0))) for r in residuals))),
                loss=float(metrics.loss),
            )
            print("SAMPLE", json.dumps(sample), flush=True)
    digest = hashlib.sha256(
        b"".join(np.asarray(x.addressable_data(0)).tobytes() for x in jax.tree.leaves(state.params))
    )
    print("SAMPLE", json.dumps(digest.hexdigest()), flush=True)


def judge(samples, rank):
    """Yields (name of a number, its most in the settled part, its most after that, whether it stays bounded)."""
    mine = [sample for sample in samples if sample["rank"] == rank]
    settled = max(1, int(SETTLED * len(mine)))
    goals = dict(memory_mib=(1 + GROWTH, 0), descriptors=(1, 0), threads=(1, POOLS), residual_norm=(SPREAD, 0))
    for name, (times, more) in goals.items():
        first, then = (max(sample[name] for sample in part) for part in (mine[:settled], mine[settled:]))
        yield name, first, then, bool(np.isfinite(then)) and then <= times * first + more


def main():
    if sys.argv[1:2] == ["--rank"]:
        return run_rank(sys.argv[2], *map(int, sys.argv[3:]))
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=STEPS)
    steps = parser.parse_args().steps
    command = "make soak" + (f" STEPS={steps}" if steps != STEPS else "")
    report = Report(command, charts=CHARTS, steps=steps)
    address, start = f"127.0.0.1:{free_port()}", time.monotonic()
    words = [sys.executable, __file__, "--rank", address]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    running = [
        subprocess.Popen([*words, str(rank), str(steps)], stdout=subprocess.PIPE, text=True, env=environment)
        for rank in range(2)
    ]
    lines = [process.communicate()[0].splitlines() for process in running]
    if any(process.returncode for process in running):
        sys.exit("soak: a process failed, see above")
    said = [[json.loads(text.removeprefix("SAMPLE ")) for text in each if text.startswith("SAMPLE ")] for each in lines]
    *samples, params = zip(*said)
    report.data["samples"] = [sample for pair in samples for sample in pair]
    report.show("", f"{steps:,} steps in {time.monotonic() - start:.0f} s.", "")
    report.show(*header("of a process", "settled", "most after", "bounded"))
    bounded = [params[0] == params[1]]
    for rank in range(2):
        for name, first, then, ok in judge(report.data["samples"], rank):
            bounded.append(ok)
            report.show(
                line(
                    [
                        f"{name.replace('_mib', ' (MiB)').replace('_', ' ')}, rank {rank}",
                        f"{first:.4g}",
                        f"{then:.4g}",
                        mark(ok),
                    ]
                )
            )
    report.show(line(["same parameters", "", "", mark(bounded[0])]))
    report.show("", NOTES.rstrip())
    report.write(RESULTS, "soak")
    return sys.exit(not all(bounded))


if __name__ == "__main__":
    main()
