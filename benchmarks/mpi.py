"""Measures compressed_allreduce against mpi4jax.allreduce between the processes of mpirun, over MPI and shared memory.

mpirun -n 2 python -m mpi4py benchmarks/mpi.py [--repeats 21] [--size MIB ...] [--out DIR]
"""

import argparse
import pathlib
import time

import jax
import jax.numpy as jnp
import mpi4jax
from mpi4py import MPI
from report import RESULTS, Report, header, line, mark, median, rounded

import jaxcgx as cgx

CODEC = cgx.MaxMin(4)
COMM = MPI.COMM_WORLD
NAMES = "mpi4jax", "two_shot", "one_shot", "memory"
OVER_MPI, IN_MEMORY, ROWS = 4.0, 6.0, 2.0  # the goals, with 64 MiB on two ranks of one host
NOTES = f"""\
- ms: the time of one call on the slowest rank, from a barrier to its end. Programs take turns. The ratio to mpi4jax is
  formed in every turn, and the table has the medians. Arguments are donated, as a training step's state is.
- two_shot, one_shot: over MPI. "MPI x" is how many times as fast as mpi4jax.allreduce the faster of the two is.
- memory: through the memory that the ranks share, the inner level of a hierarchy, with schedule="auto". "memory x" is
  how many times as fast as mpi4jax.allreduce it is.
- Goals with 64 MiB on two ranks: {OVER_MPI:g} times as fast over MPI and {IN_MEMORY:g} times through memory. all_to_all
  of bytes through memory: {ROWS:g} times as fast as mpi4jax.alltoall.
"""


def sums(nodes):
    """{name: the sum of an array over all ranks}."""
    compressed = lambda codec, **options: lambda x: cgx.mpi.compressed_allreduce(x, codec, **options)
    found = (
        lambda x: mpi4jax.allreduce(x, MPI.SUM, comm=COMM),
        compressed(CODEC, schedule="two_shot"),
        compressed(CODEC, schedule="one_shot"),
        compressed({"cross": cgx.Raw(), "inner": CODEC}, comm=nodes),
    )
    return dict(zip(NAMES, found))


def exchanges(nodes):
    """{name: every rank's rows to all ranks}."""
    return {"mpi4jax": lambda x: mpi4jax.alltoall(x, comm=COMM), "memory": nodes.inner.all_to_all}


def seconds(step, x):
    COMM.Barrier()
    start = time.perf_counter()
    x = jax.block_until_ready(step(x))
    return COMM.allreduce(time.perf_counter() - start, MPI.MAX), x


def measure(programs, x, repeats):
    """{name: seconds in every turn}, and {name: the ratio of mpi4jax to it in every turn}."""
    steps = {name: jax.jit(f, donate_argnums=0) for name, f in programs.items()}
    given = {name: jnp.copy(x) for name in steps}
    times = {name: [] for name in steps}
    for turn in range(-2, repeats):  # the first two compile and touch the pages
        for name, step in steps.items():
            taken, given[name] = seconds(step, given[name])
            if turn >= 0:
                times[name].append(taken)
    return times, {name: [a / b for a, b in zip(times["mpi4jax"], taken)] for name, taken in times.items()}


def cells(times):
    return [f"{1e3 * median(taken):.2f}" for taken in times.values()]


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=21)
    parser.add_argument("--size", type=float, nargs="+", default=[0.0625, 1, 16, 64], metavar="MIB")
    parser.add_argument(
        "--out",
        type=pathlib.Path,
        help="folder for the results (default: benchmarks/results, but nowhere when other options are given)",
    )
    args = parser.parse_args()
    nodes = cgx.mpi.hierarchy()
    library, data = MPI.Get_library_version().split(",")[0], dict(sums={}, exchanges={})
    report = Report("make bench-mpi", args.repeats, ranks=COMM.size, mpi=library, **data) if COMM.rank == 0 else None
    show = report.show if report else lambda *lines: None

    def mark_at(size, goal, reached):
        return mark(reached >= goal) if size == 64 and COMM.size == 2 else ""

    show(
        "",
        f"Sums of float32, {CODEC}, {COMM.size} ranks on one host, {library}.",
        "",
        *header("MiB", *NAMES, "MPI x", f"goal {OVER_MPI:g}", "memory x", f"goal {IN_MEMORY:g}", width=6),
    )
    for size in args.size:
        times, ratios = measure(
            sums(nodes), jax.random.normal(jax.random.key(COMM.rank), (int(size * 2**18),)), args.repeats
        )
        data["sums"][size] = {
            name: dict(seconds=rounded(taken), ratios=rounded(ratios[name])) for name, taken in times.items()
        }
        mpi, memory = max(median(ratios[name]) for name in ("two_shot", "one_shot")), median(ratios["memory"])
        show(
            line(
                [
                    f"{size:g}",
                    *cells(times),
                    f"{mpi:.1f}",
                    mark_at(size, OVER_MPI, mpi),
                    f"{memory:.1f}",
                    mark_at(size, IN_MEMORY, memory),
                ],
                width=6,
            )
        )
    show("", "all_to_all of bytes.", "", *header("MiB", "mpi4jax", "memory", "x", f"goal {ROWS:g}", width=6))
    for size in args.size:
        times, ratios = measure(
            exchanges(nodes), jnp.ones((COMM.size, int(size * 2**20) // COMM.size), jnp.uint8), args.repeats
        )
        data["exchanges"][size] = {
            name: dict(seconds=rounded(taken), ratios=rounded(ratios[name])) for name, taken in times.items()
        }
        ratio = median(ratios["memory"])
        show(line([f"{size:g}", *cells(times), f"{ratio:.1f}", mark_at(size, ROWS, ratio)], width=6))
    show("", NOTES.rstrip())
    whole = (args.size, args.repeats) == (parser.get_default("size"), parser.get_default("repeats"))
    if report and (folder := args.out or (RESULTS if whole else None)):
        report.write(folder, "mpi")


if __name__ == "__main__":
    main()
