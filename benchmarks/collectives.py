"""Measures compressed_psum against lax.psum between processes, on loopback and between hosts on links of limited rate.

    python benchmarks/collectives.py [--networks REGEX] [--repeats 7] [--size MIB ...] [--out DIR]

Every process has one device. The hosts (jaxcgx.lab) need root. Without root, only the tables of loopback are made.
"""

import argparse
import contextlib
import functools
import itertools
import json
import os
import pathlib
import re
import shlex
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from kernels import repeat
from report import RESULTS, Report, free_port, header, line, mark, median, rounded

import jaxcgx as cgx
from jaxcgx.exchange import costs
from jaxcgx.exchange.resolve import transport_over_axes
from jaxcgx.lab import Lab, signals_raise, why_not
from jaxcgx.report import machine
from jaxcgx.report.results import quartiles

CODEC = cgx.MaxMin(4)
SCHEDULES = "two_shot", "one_shot", "ring"
TCP = "Tcp"  # "auto" over jaxcgx's own connections
SPEEDUP, SHARE = 4.0, 0.9  # goals: speed-up over psum on loopback, and share of the ideal ratio between hosts with Tcp
LARGE = 16  # MiB from which exchanges are also measured as separate calls, and have a goal between hosts
GATHERED = cgx.Float8(), CODEC  # codecs that `--gather` compares
GATHER_SCHEDULES = "two_shot", "one_shot", "gather"
ITERATIONS = {0.0625: 50, 1: 20, 16: 8, 64: 4}  # in one program, by the size in MiB
LIMIT = 900  # seconds that the processes of a network may take


class Network:
    """Processes and their links.

    `mbit` is the rate of each link in Mbit/s. None means loopback. `keep` says whether pages are kept.
    """

    def __init__(self, name, processes, mbit, sizes, keep=False):
        self.name, self.processes, self.mbit, self.sizes, self.keep = name, processes, mbit, sizes, keep


NETWORKS = [
    Network("loopback, 2 processes", 2, None, [0.0625, 1, 16, 64]),
    Network("1 Gbit/s, 2 hosts", 2, 1000, [0.0625, 1, 16, 64]),
    Network("1 Gbit/s, 4 hosts", 4, 1000, [0.0625, 1, 16, 64]),
    Network("100 Mbit/s, 2 hosts", 2, 100, [0.0625, 1, 16]),
    Network("loopback, 2 processes, pages kept", 2, None, [16, 64], keep=True),
    Network("1 Gbit/s, 2 hosts, pages kept", 2, 1000, [16, 64], keep=True),
    Network("1 Gbit/s, 4 hosts, pages kept", 4, 1000, [16, 64], keep=True),
    Network("1 Gbit/s, 8 hosts, pages kept", 8, 1000, [16, 64], keep=True),
]

FAST = [
    Network("loopback, 2 processes", 2, None, [16, 64]),
    Network("loopback, 4 processes", 4, None, [16, 64]),
    Network("25 Gbit/s, 2 hosts", 2, 25_000, [16, 64]),
    Network("10 Gbit/s, 2 hosts", 2, 10_000, [16, 64]),
    Network("10 Gbit/s, 4 hosts", 4, 10_000, [16, 64]),
    Network("1 Gbit/s, 2 hosts", 2, 1000, [16]),
]  # of `--gather`

PROGRAMS = "psum", *SCHEDULES, TCP
CHARTS = [
    dict(
        table="rows",
        title="Bus bandwidth of a sum",
        x="size_bytes",
        y=[f"bus_gbs {name}" for name in PROGRAMS],
        by="what",
        panel="network",
        log=True,
    )
]

NOTES = f"""\
- ms: the time of one exchange in rank 0, in a compiled loop that writes its results to the same pages again and again,
  as a training step with donated state does. "calls": each exchange is a call of a compiled program, whose result is on
  fresh pages, except where jaxcgx.keep_pages(large=True) keeps them ("pages kept"). Programs take turns. The ratio to
  psum is formed in every turn, and the table has the medians.
- Tcp: "auto" over jaxcgx's own connections, cgx.Tcp("data"). XLA's collectives, over Gloo, move everything else.
- speed-up: the time of psum over the time. ideal: raw bytes over wire bytes. share: the speed-up over the ideal. Goals:
  on loopback, with 64 MiB, "auto" {SPEEDUP:g} times as fast as psum; between 2 and 4 hosts at 1 Gbit/s, from {LARGE}
  MiB on, a share of {SHARE:.2f} with Tcp, in loops and in calls.
- algorithm: bytes of the float32 array over the time. bus: the algorithm bandwidth times 2 (n - 1) / n for n ranks.
  nccl-tests defines both. They count the bytes of the plain array, not those that travel. Quartiles are those of the
  repetitions.
- All hosts share the processors of one machine. So their kernels take turns, unlike those of real hosts.
- predicted: the time of "auto" by the cost model (costs.py), with the constants for 1 Gbit/s that "auto" uses.
  prediction.py predicts with the constants of these networks.
"""

GATHER_HEAD = *(f"{s} ms" for s in GATHER_SCHEDULES), *(f"predicted {s}" for s in GATHER_SCHEDULES), "fastest", "model"
GATHER_NOTES = """\
- ms: as in [collectives.md](collectives.md), in a loop.
- Gbit/s of psum: 2 (W - 1) / W times the bytes over its time. All hosts share two processors, which move all bytes. So
  links of 10 and 25 Gbit/s are not full, and this rate is the one that counts.
- predicted: by the planner's model (costs.py), with this rate, the latencies of the transports, and the speeds of the
  kernels above, which W ranks share.
- fastest, model: the fastest of the three and psum, measured and by the model.
"""


# In a process


class Mesh:
    """Returns a mesh of one device of every process."""

    def __init__(self, processes):
        self.mesh = jax.make_mesh((processes,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
        self.sharding = NamedSharding(self.mesh, PartitionSpec("data"))

    def array(self, local):
        return jax.make_array_from_process_local_data(self.sharding, local)

    def compiled(self, function, *args, **options):
        spec = PartitionSpec("data")
        mapped = jax.shard_map(function, mesh=self.mesh, in_specs=spec, out_specs=spec, check_vma=False)
        return jax.jit(mapped, **options).lower(*args).compile()


class Loop:
    """A step from (input, old result) to (input, result), many times in one program (see kernels.Loop)."""

    def __init__(self, mesh, step, carry, iterations):
        self.carry, self.iterations = jax.tree.map(mesh.array, carry), iterations
        self.program = mesh.compiled(
            lambda carry: repeat(lambda x, _: (x, step(x)), carry, iterations), self.carry, donate_argnums=0
        )

    def __call__(self):
        self.carry = jax.block_until_ready(self.program(self.carry))


class Call:
    """A step as its own program, whose result is on fresh pages."""

    iterations = 1

    def __init__(self, mesh, step, x):
        self.x = mesh.array(x)
        self.program = mesh.compiled(step, self.x)

    def __call__(self):
        jax.block_until_ready(self.program(self.x))


def reductions():
    return (
        {"psum": lambda x: lax.psum(x, "data")}
        | {
            schedule: lambda x, schedule=schedule: cgx.compressed_psum(
                x, "data", cgx.Plan.every(CODEC, schedule=schedule)
            )
            for schedule in SCHEDULES
        }
        | {TCP: lambda x: cgx.compressed_psum(x, cgx.Tcp("data"), CODEC)}
    )


def gathers():
    """Returns the programs that `--gather` compares, over Gloo and over Tcp."""
    programs = {"psum": lambda x: lax.psum(x, "data")}
    for codec, (mover, axis), schedule in itertools.product(
        GATHERED, (("Gloo", "data"), ("Tcp", cgx.Tcp("data"))), GATHER_SCHEDULES
    ):
        plan = cgx.Plan.every(codec, schedule=schedule)
        programs[f"{type(codec).__name__}, {schedule}, {mover}"] = functools.partial(
            cgx.compressed_psum, axis_name=axis, plan=plan
        )
    return programs


def parts(mesh, x, ranks, iterations):
    """Returns the parts of an exchange, each in its own loop."""
    wire = CODEC.wire_bytes(x.shape, x.dtype) // (4 * ranks) * 4 * ranks
    # Zeros would not do: Tcp doesn't send zeros at the end of a row. As float32, these bytes are ordinary numbers.
    payload, share = np.full(wire, 63, np.uint8), np.full(wire // ranks, 63, np.uint8)

    def tcp():
        return transport_over_axes("collectives.py", cgx.Tcp("data"))

    def all_to_all(rows):
        return lax.all_to_all(rows.reshape(ranks, -1), "data", 0, 0, tiled=True).reshape(-1)

    return {
        "encode": Loop(
            mesh,
            lambda x: cgx.encode(x, CODEC),
            (x, np.zeros(CODEC.wire_bytes(x.shape, x.dtype), np.uint8)),
            iterations,
        ),
        "encode and decode": Loop(mesh, lambda x: cgx.roundtrip(x, CODEC), (x, x), iterations),
        "all_to_all of a payload": Loop(mesh, all_to_all, (payload, payload), iterations),
        "all_gather of a share": Loop(
            mesh, lambda x: lax.all_gather(x, "data", tiled=True), (share, payload), iterations
        ),
        "psum of float32 of a payload's size": Loop(
            mesh, lambda x: lax.psum(x, "data"), (payload.view(np.float32),) * 2, iterations
        ),
        "all_gather of a payload": Loop(
            mesh, lambda x: lax.all_gather(x, "data", tiled=True), (payload, np.tile(payload, ranks)), iterations
        ),
        "all_to_all of a payload, Tcp": Loop(
            mesh, lambda x: tcp().all_to_all(x.reshape(ranks, -1)).reshape(-1), (payload, payload), iterations
        ),
        "all_gather of a payload, Tcp": Loop(
            mesh, lambda x: tcp().all_gather(x).reshape(-1), (payload, np.tile(payload, ranks)), iterations
        ),
    }


def run_rank(address, rank, processes, repeats, sizes, keep, gather):
    """Measures everything together with the other ranks, and prints the times."""
    if keep:
        cgx.keep_pages(large=True)
    jax.config.update("jax_num_cpu_devices", 1)
    jax.distributed.initialize(address, processes, rank)
    mesh = Mesh(processes)
    together = Call(mesh, lambda x: lax.psum(x, "data"), np.zeros(1, np.int32))  # so that all ranks start at once

    def measure(size, programs, what):
        times = {name: [] for name in programs}
        for turn in range(repeats + 1):
            for name, program in programs.items():
                together()
                start = time.perf_counter()
                program()
                if turn:
                    times[name].append((time.perf_counter() - start) * 1e3 / program.iterations)
        return dict(size=size, what=what, ms=times)

    results = []
    for size in sizes:
        x = np.random.default_rng(rank).standard_normal(int(size * 2**18), np.float32)
        iterations = ITERATIONS.get(size, 4)
        if gather:
            loops = {name: Loop(mesh, step, (x, x), iterations) for name, step in gathers().items()}
            results.append(measure(size, loops, "loop"))
            continue
        results.append(
            measure(size, {name: Loop(mesh, step, (x, x), iterations) for name, step in reductions().items()}, "loop")
        )
        if size >= LARGE:
            results.append(measure(size, {name: Call(mesh, step, x) for name, step in reductions().items()}, "calls"))
        if size == sizes[-1]:
            results.append(measure(size, parts(mesh, x, processes, iterations), "parts"))
    print("RESULTS", json.dumps(results), flush=True)


# In the process that starts the other ones


def measure(network, repeats, gather=False):
    """Returns the output of rank 0: [{size, what, ms of every repetition of every program}]."""
    port = free_port()
    with contextlib.ExitStack() as stack:
        lab = stack.enter_context(Lab(network.processes, f"{network.mbit}mbit")) if network.mbit else None
        address = f"{lab.address(0) if lab else '127.0.0.1'}:{port}"
        running = []
        for rank in range(network.processes):
            worker = dict(
                address=address,
                rank=rank,
                processes=network.processes,
                repeats=repeats,
                sizes=network.sizes,
                keep=network.keep,
                gather=gather,
            )
            command = [sys.executable, str(pathlib.Path(__file__).resolve()), "--rank", json.dumps(worker)]
            start = lab.start if lab else lambda host, command, **options: subprocess.Popen(command, **options)
            running.append(
                start(
                    rank,
                    command,
                    stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
                    text=True,
                    env=os.environ | {"JAX_PLATFORMS": "cpu"},
                )
            )
            stack.callback(running[-1].wait)
            stack.callback(running[-1].kill)
        output, _ = running[0].communicate(timeout=LIMIT)
        for line in output.splitlines():
            if line.startswith("RESULTS "):
                return json.loads(line.removeprefix("RESULTS "))
    raise RuntimeError(f"collectives.py: rank 0 of {network.name} failed")


def megabytes(size):
    return f"{size:g} MiB" if size >= 1 else f"{size * 1024:g} KiB"


def row(network, size, what, times):
    """Returns the figures of a size on a network."""
    elements = int(size * 2**18)
    raw, wire = 4 * elements, CODEC.wire_bytes((elements,), jnp.float32)
    load, known = costs.Load(network.processes, raw, wire), cgx.Network(mover="gloo")
    auto = costs.choose(load, known)
    speedup = {name: median(np.divide(times["psum"], times[name])) for name in (*SCHEDULES, TCP)}
    figures = dict(
        network=network.name,
        processes=network.processes,
        what=what,
        size_bytes=raw,
        wire_bytes=wire,
        ms={name: median(ms) for name, ms in times.items()},
        speedup=speedup,
        auto=auto,
        fastest=max(SCHEDULES, key=speedup.get),
        ideal=round(raw / wire, 4),
        share={name: round(speedup[name] * wire / raw, 4) for name in speedup},
    )
    if network.mbit == 1000:
        figures["predicted_ms"] = round(costs.seconds(auto, load, known).total * 1e3, 4)
    if network.mbit == 1000 and network.processes <= 4 and size >= LARGE:
        figures["reached"] = figures["share"][TCP] >= SHARE
    elif network.mbit is None and size == 64:
        figures["reached"] = speedup[auto] >= SPEEDUP
    speed = {name: bandwidths(network.processes, raw, median(ms) / 1e3) for name, ms in times.items()}
    for which, name in enumerate(("algorithm_gbs", "bus_gbs")):
        figures[name] = {program: round(both[which], 4) for program, both in speed.items()}
    return figures | dict(ms_of_repetitions={name: rounded(ms) for name, ms in times.items()})


def bandwidths(ranks, size, seconds):
    """Returns (algorithm bandwidth, bus bandwidth) of an all-reduce in GB/s, as nccl-tests define them.

    Both count the bytes of the uncompressed tensor, `size`, not the bytes that travel. So compression increases them.
    """
    algorithm = size / seconds / 1e9
    return algorithm, algorithm * 2 * (ranks - 1) / ranks


def bandwidth_lines(rows):
    """Shows the bandwidths of psum, and of compressed_psum over Gloo and over Tcp."""
    yield from header("network, size", "of", "ms", "quartiles", "algorithm", "bus", width=44)
    for r in rows:
        calls = ", calls" if r["what"] == "calls" else ""
        for name in ("psum", r["auto"], TCP):
            low, middle, high = quartiles(r["ms_of_repetitions"][name])
            figures = [
                f"{middle:.2f}",
                f"{low:.2f}-{high:.2f}",
                *(f"{r[k][name]:.4f}" for k in ("algorithm_gbs", "bus_gbs")),
            ]
            yield line([f"{r['network']}, {megabytes(r['size_bytes'] / 2**20)}{calls}", name, *figures], 44)


def row_line(r):
    name = megabytes(r["size_bytes"] / 2**20) + (", calls" if r["what"] == "calls" else "")
    predicted = f"{r['predicted_ms']:.2f}" if "predicted_ms" in r else ""
    return line(
        [
            name,
            *(f"{ms:.2f}" for ms in r["ms"].values()),
            r["auto"],
            r["fastest"],
            predicted,
            *(
                f"{r[what][which]:.{digits}f}"
                for what, digits in (("speedup", 2), ("share", 3))
                for which in (r["auto"], TCP)
            ),
            f"{r['ideal']:.2f}",
            mark(r["reached"]) if "reached" in r else "",
        ],
        13,
    )


HEAD = (
    "size",
    "psum ms",
    "two_shot ms",
    "one_shot ms",
    "ring ms",
    "Tcp ms",
    "auto",
    "fastest",
    "predicted",
    "speed-up",
    "Tcp",
    "share",
    "Tcp",
    "ideal",
    "goal",
)


def predicted(name, ranks, size, rate):
    """Returns the ms of a program of `gathers` by the planner's model, if a link moves `rate` bytes per second."""
    codec_name, schedule, mover = name.split(", ")
    codec = next(codec for codec in GATHERED if type(codec).__name__ == codec_name)
    kernels = machine.kernels(codec)
    network = cgx.Network(
        up=rate, mover=mover.lower(), sharing=ranks, encode=kernels.encode, decode=kernels.decode, reduce=kernels.reduce
    )
    load = costs.Load(ranks, size, codec.wire_bytes((size // 4,), jnp.float32))
    return round(costs.seconds(schedule, load, network).total * 1e3, 4)


def compare_gathers(args):
    """Measures `schedule="gather"` beside the other schedules on fast networks."""
    jax.config.update("jax_platforms", "cpu")
    kernels = {str(codec): machine.kernels(codec) for codec in GATHERED}
    speeds = {name: [round(x / 1e9, 3) for x in (k.encode, k.decode, k.reduce)] for name, k in kernels.items()}
    report = Report(args.command, args.repeats, rows=[], kernels_gbs=speeds)
    for name, (encode, decode, reduce) in speeds.items():
        report.show("", f"{name}: encode {encode:g} GB/s, decode {decode:g}, reduce {reduce:g}.")
    for network in FAST:
        if not re.search(args.networks or "", network.name) or (network.mbit and why_not()):
            continue
        network.sizes = args.size or network.sizes
        for r in measure(network, args.repeats, gather=True):
            size, times = int(r["size"] * 2**20), {name: median(ms) for name, ms in r["ms"].items()}
            rate = 2 * (network.processes - 1) / network.processes * size / times["psum"] * 1e3
            models = {name: predicted(name, network.processes, size, rate) for name in times if name != "psum"}
            report.data["rows"].append(
                dict(
                    network=network.name,
                    processes=network.processes,
                    size_bytes=size,
                    psum_gbit=round(rate * 8e-9, 3),
                    ms=times,
                    predicted_ms=models,
                    ms_of_repetitions={name: rounded(ms) for name, ms in r["ms"].items()},
                )
            )
            title = f"{network.name}, {megabytes(r['size'])}: psum {times['psum']:.2f} ms, {rate * 8e-9:.1f} Gbit/s."
            report.show("", title, "", *header("codec, transport", *GATHER_HEAD))
            for codec, mover in itertools.product(GATHERED, ("Gloo", "Tcp")):
                names = [f"{type(codec).__name__}, {schedule}, {mover}" for schedule in GATHER_SCHEDULES]
                fastest = min((*names, "psum"), key=times.get)
                known = min((*names, "psum"), key=lambda each: models.get(each, times["psum"]))
                said = [each.split(", ")[1] if ", " in each else each for each in (fastest, known)]
                figures = [f"{table[each]:.2f}" for table in (times, models) for each in names]
                report.show(line([f"{type(codec).__name__}, {mover}", *figures, *said]))
    report.show("", *GATHER_NOTES.splitlines())
    if args.out:
        report.write(args.out, "gather")


def parse():
    parser = argparse.ArgumentParser(description="compressed_psum against lax.psum between processes.")
    parser.add_argument("--networks", metavar="REGEX", help="only the networks whose names match")
    parser.add_argument("--repeats", type=int, default=7, metavar="N", help="repetitions (default: 7)")
    parser.add_argument(
        "--size", type=float, nargs="+", metavar="MIB", help="float32 input in MiB (default: 1/16 to 64)"
    )
    parser.add_argument("--gather", action="store_true", help='compare schedule="gather" on fast networks')
    parser.add_argument(
        "--out",
        type=pathlib.Path,
        metavar="DIR",
        help="where the results are written (default: benchmarks/results, but nowhere when other options are given)",
    )
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.repeats < 1 or min(args.size or [1]) <= 0:
        parser.error("--repeats and --size: expected positive numbers")
    given = []
    for name in "networks", "repeats", "size":
        value = getattr(args, name)
        if value != parser.get_default(name):
            given += [
                f"--{name}",
                *(f"{v:g}" if isinstance(v, float) else str(v) for v in (value if name == "size" else [value])),
            ]
    target = "make bench-gather" if args.gather else "make bench-collectives"
    given = ["--gather"] * (args.gather and bool(given)) + given
    args.command = shlex.join(["python", "benchmarks/collectives.py", *given]) if given else target
    args.out = args.out or (None if given else RESULTS)
    return args


def main():
    args = parse()
    if args.rank:
        run_rank(**json.loads(args.rank))
        return
    if args.gather:
        compare_gathers(args)
        return
    networks = [n for n in NETWORKS if re.search(args.networks or "", n.name)]
    if not networks:
        sys.exit(f"collectives.py: no network matches {args.networks!r}")
    report = Report(args.command, args.repeats, codec=str(CODEC), rows=[], parts=[], left_out={}, charts=CHARTS)
    for network in networks:
        if network.mbit and (why := why_not()):
            report.data["left_out"][network.name] = why
            report.show("", f"{network.name}: not measured, {why}.")
            continue
        network.sizes = args.size or network.sizes
        results = measure(network, args.repeats)
        report.show("", f"{network.name}, float32, {CODEC}.", "", *header(*HEAD, width=13))
        for r in results:
            if r["what"] != "parts":
                report.data["rows"].append(row(network, r["size"], r["what"], r["ms"]))
                report.show(row_line(report.data["rows"][-1]))
                continue
            report.show(
                "",
                f"Parts of an exchange of {megabytes(r['size'])}, all processes at it at once.",
                "",
                *header("part", "ms"),
            )
            for name, ms in r["ms"].items():
                report.data["parts"].append(
                    dict(
                        network=network.name,
                        name=name,
                        size_mib=r["size"],
                        ms=median(ms),
                        ms_of_repetitions=rounded(ms),
                    )
                )
                report.show(line([name, f"{median(ms):.2f}"]))
    report.show("", "Bandwidths in GB/s.", "", *bandwidth_lines(report.data["rows"]), "", *NOTES.splitlines())
    if args.out:
        report.write(args.out, "collectives")


if __name__ == "__main__":
    with signals_raise():
        main()
