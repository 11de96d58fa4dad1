"""compressed_allreduce against mpi4jax.allreduce between the processes of mpirun.

    mpirun -n 2 python -m mpi4py benchmarks/mpi.py [--repeats 21] [--size MIB ...] [--out DIR]
"""
import argparse
import pathlib
import time

import jax
import jax.numpy as jnp
import mpi4jax
from mpi4py import MPI

import jaxcgx as cgx
from report import RESULTS, Report, header, line, mark, median, rounded

CODEC = cgx.MaxMin(4)
COMM = MPI.COMM_WORLD
NAMES = "mpi4jax", "two_shot", "one_shot", "memory"
SPEEDUP = 4.0  # the goal, with 64 MiB on two ranks of one host
NOTES = f"""\
- ms: of one call on the slowest rank, from a barrier to its end. Programs take turns; the ratio to mpi4jax is formed in every
  turn, and the medians stand here. Arguments are donated, as a training step's state is. Goal: {SPEEDUP:g} times as fast as
  mpi4jax.allreduce with 64 MiB of float32 on two ranks of one host, at 4 bits.
- two_shot, one_shot: over MPI; the speed-up is that of the faster. memory: two_shot through the memory that the ranks share, as
  the inner level of a hierarchy.
"""


def programs():
    """{name: the sum of an array over all ranks}."""
    compressed = lambda codec, **options: lambda x: cgx.mpi.compressed_allreduce(x, codec, **options)
    sums = (lambda x: mpi4jax.allreduce(x, MPI.SUM, comm=COMM), compressed(CODEC, schedule="two_shot"), compressed(CODEC, schedule="one_shot"),
            compressed({"cross": cgx.Raw(), "inner": CODEC}, comm=cgx.mpi.hierarchy()))
    return dict(zip(NAMES, sums))


def seconds(step, x):
    COMM.Barrier()
    start = time.perf_counter()
    x = jax.block_until_ready(step(x))
    return COMM.allreduce(time.perf_counter() - start, MPI.MAX), x


def measure(size, repeats):
    """{name: seconds in every turn} for `size` MiB of float32."""
    steps = {name: jax.jit(f, donate_argnums=0) for name, f in programs().items()}
    given = {name: jax.random.normal(jax.random.key(COMM.rank), (int(size * 2**18),)) for name in steps}
    times = {name: [] for name in steps}
    for turn in range(-2, repeats):  # the first two compile and touch the pages
        for name, step in steps.items():
            taken, given[name] = seconds(step, given[name])
            if turn >= 0:
                times[name].append(taken)
    return times


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=21)
    parser.add_argument("--size", type=float, nargs="+", default=[0.0625, 1, 16, 64], metavar="MIB")
    parser.add_argument("--out", type=pathlib.Path, help="folder for the results; without it only those of a whole run are written")
    args = parser.parse_args()
    report = Report("make bench-mpi", args.repeats, ranks=COMM.size, mpi=MPI.Get_library_version().split(",")[0], sizes={}) if COMM.rank == 0 else None
    if report:
        report.show("", f"float32, {CODEC}, {COMM.size} ranks on one host, {report.data['mpi']}.", "", *header("MiB", *NAMES, "speed-up", "goal"))
    for size in args.size:
        times = measure(size, args.repeats)
        if not report:
            continue
        ratios = {name: [a / b for a, b in zip(times["mpi4jax"], taken)] for name, taken in times.items()}
        best = max(("two_shot", "one_shot"), key=lambda name: median(ratios[name]))
        goal = mark(median(ratios[best]) >= SPEEDUP) if size == 64 and COMM.size == 2 else ""
        report.data["sizes"][size] = {name: dict(seconds=rounded(taken), ratios=rounded(ratios[name])) for name, taken in times.items()}
        report.show(line([f"{size:g}", *(f"{1e3 * median(taken):.2f}" for taken in times.values()), f"{median(ratios[best]):.1f}", goal]))
    if report:
        report.show("", NOTES.rstrip())
        if folder := args.out or (RESULTS if (args.size, args.repeats) == (parser.get_default("size"), parser.get_default("repeats")) else None):
            report.write(folder, "mpi")


if __name__ == "__main__":
    main()
