"""Measures compressed_psum against mpi4jax.allreduce between the processes of mpirun, over MPI and shared memory.

mpirun -n 2 --bind-to core python -m mpi4py benchmarks/mpi.py [--repeats 21] [--size MIB ...] [--layers WIDTH ...]
    [--out DIR]
"""

import argparse
import functools
import pathlib
import statistics
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
OVER_MPI, IN_MEMORY, ROWS = 4.0, 6.0, 2.0  # goals with 64 MiB on two ranks of one host
LAYERS, LOOP, FUSION = 4, 4, (64, 16)
CHARTS = [
    dict(table=table, title=f"The time of a call: {table}", x="name", y=[f"{name} seconds" for name in names], log=True)
    for table, names in (("sums", NAMES), ("exchanges", ("mpi4jax", "memory")))
]
NOTES = f"""\
- ms: the time of one call on the slowest rank, from a barrier to its end. Programs take turns. The ratio to mpi4jax is
  formed in every turn, and the table has the medians. Arguments are donated, as a training step's state is.
- "x" has the median of the turns' ratios, followed by their quartiles.
- The layers are those of a transformer, 12 leaves each: four matrices of width x width, two of width x 4 width, and six
  vectors. mpi4jax sums leaf by leaf in one program. MPI and memory have messages of up to 64 or 16 MiB.
- Calls: each sum is a separate call, as a training step is. Loops: {LOOP} sums in one program, whose outputs are on
  pages that are already in use. The time is that of one sum.
- two_shot, one_shot: over MPI. "MPI x" is the speed of the faster one, relative to mpi4jax.allreduce.
- memory: through shared memory, the inner level of a hierarchy, with schedule="auto". "memory x" is its speed, relative
  to mpi4jax.allreduce.
- Goals with 64 MiB on two ranks: {OVER_MPI:g} times as fast over MPI and {IN_MEMORY:g} times through memory. all_to_all
  of bytes through memory: {ROWS:g} times as fast as mpi4jax.alltoall.
"""


def sums(nodes):
    """Returns {name: function that sums an array over all ranks}."""
    compressed = lambda plan, comm=COMM: lambda x: cgx.compressed_psum(x, comm, plan)
    found = (
        lambda x: mpi4jax.allreduce(x, MPI.SUM, comm=COMM),
        compressed(cgx.Plan.every(CODEC, schedule="two_shot")),
        compressed(cgx.Plan.every(CODEC, schedule="one_shot")),
        compressed({"cross": cgx.Raw(), "inner": CODEC}, nodes),
    )
    return dict(zip(NAMES, found))


def layers(width):
    """Returns the leaves of transformer layers: 12 width^2 numbers and a few more."""
    shapes = [(width, width)] * 4 + [(width, 4 * width), (4 * width, width)] + [(width,)] * 5 + [(4 * width,)]
    return [[jax.random.normal(jax.random.key(COMM.rank), shape) for shape in shapes] for _ in range(LAYERS)]


def of_trees(nodes):
    """Returns {name: function that averages a tree over all ranks}."""
    plain = lambda x: mpi4jax.allreduce(x, MPI.SUM, comm=COMM) / COMM.size
    found = {"mpi4jax": lambda tree: jax.tree.map(plain, tree)}
    for name, codec, comm in ("MPI", CODEC, COMM), ("memory", {"cross": cgx.Raw(), "inner": CODEC}, nodes):
        for size in FUSION:
            plan = cgx.Plan.every(codec, fusion_mb=size)
            found[f"{name} {size}"] = functools.partial(cgx.compressed_pmean, axis_name=comm, plan=plan)
    return found


def looped(f):
    return lambda tree: jax.lax.fori_loop(0, LOOP, lambda _, tree: f(tree), tree)


def exchanges(nodes):
    """Returns {name: function that exchanges rows among all ranks}."""
    return {"mpi4jax": lambda x: mpi4jax.alltoall(x, comm=COMM), "memory": nodes.inner.all_to_all}


def seconds(step, x):
    COMM.Barrier()
    start = time.perf_counter()
    x = jax.block_until_ready(step(x))
    return COMM.allreduce(time.perf_counter() - start, MPI.MAX), x


def measure(programs, x, repeats):
    """Returns {name: seconds in every turn}, and {name: ratio of mpi4jax to it in every turn}."""
    steps = {name: jax.jit(f, donate_argnums=0) for name, f in programs.items()}
    given = {name: jax.tree.map(jnp.copy, x) for name in steps}
    times = {name: [] for name in steps}
    for turn in range(-2, repeats):  # the first two compile and touch the pages
        for name, step in steps.items():
            taken, given[name] = seconds(step, given[name])
            if turn >= 0:
                times[name].append(taken)
    return times, {name: [a / b for a, b in zip(times["mpi4jax"], taken)] for name, taken in times.items()}


def cells(times):
    return [f"{1e3 * statistics.median(taken):.2f}" for taken in times.values()]


def spread(ratios):
    """Formats the median and the quartiles of ratios."""
    if len(ratios) < 2:
        return f"{ratios[0]:.1f}"
    low, middle, high = statistics.quantiles(ratios, n=4)
    return f"{middle:.1f} ({low:.1f}-{high:.1f})"


def best(ratios, names):
    """Returns the ratios of the fastest of some programs."""
    return max((ratios[name] for name in names), key=statistics.median)


def kept(times, ratios):
    return {
        name: dict(seconds=[round(t, 6) for t in taken], ratios=rounded(ratios[name])) for name, taken in times.items()
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=21)
    parser.add_argument("--size", type=float, nargs="+", default=[0.0625, 1, 16, 64], metavar="MIB")
    parser.add_argument("--layers", type=int, nargs="*", default=[128, 512, 1024], metavar="WIDTH")
    parser.add_argument(
        "--out",
        type=pathlib.Path,
        help="folder for the results (default: benchmarks/results, but nowhere when other options are given)",
    )
    args = parser.parse_args()
    nodes = cgx.mpi.hierarchy()
    library, data = MPI.Get_library_version().split(",")[0], dict(sums={}, layers={}, exchanges={})
    report = (
        Report("make bench-mpi", args.repeats, ranks=COMM.size, mpi=library, charts=CHARTS, **data)
        if COMM.rank == 0
        else None
    )
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
        data["sums"][size] = kept(times, ratios)
        over_mpi, in_memory = best(ratios, ("two_shot", "one_shot")), ratios["memory"]
        mpi, memory = median(over_mpi), median(in_memory)
        show(
            line(
                [
                    f"{size:g}",
                    *cells(times),
                    spread(over_mpi),
                    mark_at(size, OVER_MPI, mpi),
                    spread(in_memory),
                    mark_at(size, IN_MEMORY, memory),
                ],
                width=6,
            )
        )
    if args.layers:
        show("", f"Means of {LAYERS} transformer layers, {12 * LAYERS} leaves.")
        columns = "mpi4jax", *(f"{name} {size}" for name in ("MPI", "memory") for size in FUSION)
        show("", *header("MiB a layer", *columns, "MPI x", "memory x", width=12))
    for width in args.layers:
        tree = layers(width)
        mib = sum(leaf.size for leaf in tree[0]) / 2**18
        for how, wrap, count in ("calls", lambda f: f, 1), ("loops", looped, LOOP):
            programs = {name: wrap(f) for name, f in of_trees(nodes).items()}
            times, ratios = measure(programs, tree, args.repeats)
            times = {name: [t / count for t in taken] for name, taken in times.items()}
            data["layers"][f"{width} {how}"] = kept(times, ratios)
            gains = [spread(best(ratios, [f"{name} {size}" for size in FUSION])) for name in ("MPI", "memory")]
            show(line([f"{mib:.1f} {how}", *cells(times), *gains], width=12))
    show("", "all_to_all of bytes.", "", *header("MiB", "mpi4jax", "memory", "x", f"goal {ROWS:g}", width=6))
    for size in args.size:
        times, ratios = measure(
            exchanges(nodes), jnp.ones((COMM.size, int(size * 2**20) // COMM.size), jnp.uint8), args.repeats
        )
        data["exchanges"][size] = kept(times, ratios)
        ratio = median(ratios["memory"])
        show(line([f"{size:g}", *cells(times), f"{ratio:.1f}", mark_at(size, ROWS, ratio)], width=6))
    show("", NOTES.rstrip())
    whole = all(getattr(args, name) == parser.get_default(name) for name in ("size", "repeats", "layers"))
    if report and (folder := args.out or (RESULTS if whole else None)):
        report.write(folder, "mpi")


if __name__ == "__main__":
    main()
