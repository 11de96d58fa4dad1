"""Measures many sums in a program, over Gloo and over Tcp, with two policies of Linux's scheduler.

    python benchmarks/gloo.py [--repeats 7] [--out DIR]

benchmarks/notes/collectives.md, "Slow and quick days", says why the policy matters.
"""

import argparse
import json
import os
import pathlib
import shlex
import sys
import time

import jax
import numpy as np
from collectives import Call, Mesh
from jax import lax
from report import RESULTS, Report, free_port, header, line, median
from started import results

import jaxcgx as cgx

ARRAYS = 53  # as many as the transformer of benchmarks/training_speed.py has
SIZES = 256, 62_500  # elements of an array; 53 of the second size are as many as the transformer has
POLICIES = "SCHED_OTHER", "SCHED_BATCH"
PROGRAMS = {
    "Gloo": lambda x: [lax.psum(row, "data") for row in x],
    "Tcp": lambda x: [cgx.compressed_psum(row, cgx.Tcp("data"), cgx.Raw()) for row in x],
}
CALLS = 10  # that are timed together
LIMIT = 600  # seconds

NOTES = f"""\
- Two processes on loopback sum {ARRAYS} arrays of float32 in one program: over Gloo by lax.psum, over Tcp by
  compressed_psum with Raw(). processors: of each process. Where each has one, they are different ones.
- SCHED_OTHER is the policy that processes have. `chrt --batch 0 python ...` starts one with SCHED_BATCH.
- KiB: of an array. ms: of all {ARRAYS} sums in rank 0, the mean of {CALLS} calls. busy: the processor ms of rank 0 in
  this time.
"""


def run_rank(address, rank, policy, processors, repeats):
    """Measures the programs together with the other rank."""
    os.sched_setaffinity(0, processors)
    os.sched_setscheduler(0, getattr(os, policy), os.sched_param(0))
    jax.config.update("jax_num_cpu_devices", 1)
    jax.distributed.initialize(address, 2, rank)
    mesh, found = Mesh(2), []
    for size in SIZES:
        x = np.ones((ARRAYS, size), np.float32)
        calls = {name: Call(mesh, program, x) for name, program in PROGRAMS.items()}
        times = {name: [] for name in calls}
        for turn in range(repeats + 1):
            for name, call in calls.items():
                call()
                start, busy = time.perf_counter(), time.process_time()
                for _ in range(CALLS):
                    call()
                took = time.perf_counter() - start, time.process_time() - busy
                if turn:
                    times[name].append([1e3 * t / CALLS for t in took])
        found.append(dict(kib=size * 4 / 1024, times=times))
    print("RESULT", json.dumps(found), flush=True)


def measure(policy, processors, repeats):
    """Returns what rank 0 prints."""
    told = dict(address=f"127.0.0.1:{free_port()}", policy=policy, repeats=repeats)
    ranks = [told | dict(rank=rank, processors=mine) for rank, mine in enumerate(processors)]
    return results(*([__file__, "--rank", json.dumps(each)] for each in ranks), limit=LIMIT)[0]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--out", type=pathlib.Path, metavar="DIR", help="where the results are written")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    args, given = parser.parse_args(), sys.argv[1:]
    if args.rank:
        run_rank(**json.loads(args.rank))
        return
    command = shlex.join(["python", "benchmarks/gloo.py", *given]) if given else "make bench-gloo"
    processors = sorted(os.sched_getaffinity(0))[:2]
    if len(processors) < 2:
        sys.exit("gloo.py: expected two processors, got one")
    report = Report(command, args.repeats)
    shown = header("processors", "policy", "KiB", "Gloo ms", "busy", "Tcp ms", "busy", width=12)
    report.show("", f"{ARRAYS} sums of two processes.", "", *shown)
    rows = report.data["rows"] = []
    for kind, each in {"one": [processors[:1], processors[1:]], "both": [processors] * 2}.items():
        for policy in POLICIES:
            for found in measure(policy, each, args.repeats):
                figures = {name: [median(t) for t in zip(*times)] for name, times in found["times"].items()}
                rows.append(dict(processors=kind, policy=policy, kib=found["kib"], **figures))
                cells = [f"{t:.1f}" for name in PROGRAMS for t in figures[name]]
                report.show(line([kind, policy, f"{found['kib']:.0f}", *cells], 12))
    report.show("", *NOTES.splitlines())
    if out := args.out or (None if given else RESULTS):
        report.write(out, "gloo")


if __name__ == "__main__":
    main()
