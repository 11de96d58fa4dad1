"""Measures sums over Tcp between two hosts, each with one process of one or two devices.

    python benchmarks/devices.py [--repeats 7] [--mbit 1000] [--out DIR]

The hosts (jaxcgx.lab) need root.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from report import Report, between_hosts, free_port, header, line, mark, median, rounded

import jaxcgx as cgx
from jaxcgx.lab import Lab, signals_raise

CODEC, MIB, LEAVES = cgx.MaxMin(4), 64, 16
SHARE = 0.9  # goal: the share of the ideal time with the best plan of two devices
LIMIT = 900  # seconds
TCP, LOCAL = cgx.Tcp("data"), cgx.Tcp("local")


def by_axis(codec, local=LOCAL, **fields):
    return (TCP, local), cgx.Plan.every({"data": codec, "local": cgx.Raw()}, **fields)


# {name: (devices of a process, axes, plan or None for lax.psum)}.
PROGRAMS = {
    "lax.psum": (1, "data", None),
    "Raw()": (1, TCP, cgx.Raw()),
    "4 bits": (1, TCP, CODEC),
    "2 devices, lax.psum": (2, ("data", "local"), None),
    "2 devices, Raw(), by axis, messages of 8 MiB": (2, *by_axis(cgx.Raw(), fusion_mb=8)),
    "2 devices, 4 bits, over all ranks": (2, (TCP, "local"), cgx.Plan.every(CODEC)),
    "2 devices, 4 bits, by axis": (2, *by_axis(CODEC)),
    "2 devices, 4 bits, by axis, local by Gloo": (2, *by_axis(CODEC, local="local")),
    "2 devices, 4 bits, by axis, messages of 16 MiB": (2, *by_axis(CODEC, fusion_mb=16)),
    "2 devices, 4 bits, by axis, messages of 8 MiB": (2, *by_axis(CODEC, fusion_mb=8)),
}
KEPT = "4 bits", "2 devices, 4 bits, by axis", "2 devices, 4 bits, by axis, messages of 8 MiB"
PAGES_KEPT = ", pages kept"  # the programs in KEPT are measured once more, with the memory of freed arrays kept

NOTES = f"""\
- A sum of {LEAVES} float32 arrays, {MIB} MiB in all, on every device; each sum is a call of a compiled program. ms: in
  the first process, the time of a call. Programs take turns.
- ideal: the bytes that must cross the link between the hosts in each direction, over its rate. Two hosts exchange their
  sums as owners of halves, so these are the bytes of a whole encoded sum, however many devices a host has. The headers
  of TCP, IP and Ethernet are 4 % more. share: the ideal over the time. Goal: {SHARE:.2f} with two devices.
- by axis: Raw() inside a host, so its devices add their leaves in memory before they encode them. pages kept: with
  jaxcgx.keep_pages(large=True). Otherwise the system clears fresh pages for the results of each call.
- Both hosts and all of their devices share the processors of one machine.
"""


def run_rank(address, rank, repeats, devices, keep):
    """Measures the programs of this number of devices together with the other rank, and prints the times."""
    if keep:
        cgx.keep_pages(large=True)
    jax.config.update("jax_num_cpu_devices", devices)
    jax.distributed.initialize(address, 2, rank)
    mesh = jax.make_mesh((2, devices), ("data", "local"), axis_types=(AxisType.Auto,) * 2)
    spec = PartitionSpec(("data", "local"))
    rows = np.random.default_rng(rank).standard_normal((devices, MIB * 2**18 // LEAVES), np.float32)
    x = {str(i): jax.make_array_from_process_local_data(NamedSharding(mesh, spec), rows) for i in range(LEAVES)}

    def compiled(axes, plan):
        total = lambda x: lax.psum(x, axes) if plan is None else cgx.compressed_psum(x, axes, plan)
        return jax.jit(jax.shard_map(total, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))

    together = jax.jit(
        jax.shard_map(
            lambda x: lax.psum(x, "data"),
            mesh=mesh,
            in_specs=PartitionSpec(),
            out_specs=PartitionSpec(),
            check_vma=False,
        )
    )
    mine = {name: rest for name, (n, *rest) in PROGRAMS.items() if n == devices and (name in KEPT or not keep)}
    programs = {name + PAGES_KEPT * keep: compiled(*rest) for name, rest in mine.items()}
    times = {name: [] for name in programs}
    for turn in range(repeats + 1):
        for name, program in programs.items():
            jax.block_until_ready(together(jnp.ones(())))
            start = time.perf_counter()
            jax.block_until_ready(program(x))
            if turn:
                times[name].append((time.perf_counter() - start) * 1e3)
    print("RESULTS", json.dumps(times), flush=True)


def measure(mbit, repeats, **asked):
    """Returns {program: ms of every repetition}."""
    with Lab(2, f"{mbit}mbit") as lab:
        worker = dict(address=f"{lab.address(0)}:{free_port()}", repeats=repeats, **asked)
        script, env = str(pathlib.Path(__file__).resolve()), os.environ | {"JAX_PLATFORMS": "cpu"}
        command = lambda rank: [sys.executable, script, "--rank", json.dumps(worker | dict(rank=rank))]
        out = subprocess.PIPE, subprocess.DEVNULL
        ranks = [lab.start(rank, command(rank), stdout=out[rank], text=True, env=env) for rank in range(2)]
        try:
            output, _ = ranks[0].communicate(timeout=LIMIT)
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
    return json.loads(output.split("RESULTS ", 1)[1].splitlines()[0])


def main():
    parser = argparse.ArgumentParser(description="Sums over Tcp between hosts of one and of two devices.")
    parser.add_argument("--repeats", type=int, default=7, metavar="N", help="repetitions (default: 7)")
    parser.add_argument("--mbit", type=int, default=1000, metavar="RATE", help="Mbit/s of each link (default: 1000)")
    args, command, out = between_hosts(parser, "make bench-devices", run_rank)
    times = {}
    for devices, keep in (1, False), (2, False), (1, True), (2, True):
        times |= measure(args.mbit, args.repeats, devices=devices, keep=keep)
    report = Report(command, args.repeats, codec=str(CODEC), mbit=args.mbit, rows=[])
    report.show(
        "",
        f"{args.mbit} Mbit/s, {MIB} MiB of float32.",
        "",
        *header("program", "ms", "ideal", "share", "goal", width=60),
    )
    elements = MIB * 2**18 // LEAVES
    kept = {name + PAGES_KEPT: PROGRAMS[name] for name in KEPT}
    for name, (devices, _, plan) in (PROGRAMS | kept).items():
        codec = cgx.Raw() if plan is None or "Raw()" in name else CODEC
        ideal = LEAVES * codec.wire_bytes((elements,), jnp.float32) * 8 / args.mbit / 1e3
        share = ideal / median(times[name])
        report.data["rows"].append(
            dict(program=name, devices=devices, ms=rounded(times[name]), ideal_ms=ideal, share=share)
        )
        goal = mark(share >= SHARE) if devices == 2 and plan is not None else ""
        report.show(line([name, f"{median(times[name]):.1f}", f"{ideal:.1f}", f"{share:.3f}", goal], 60))
    report.show("", *NOTES.splitlines())
    if out:
        report.write(out, "devices")


if __name__ == "__main__":
    with signals_raise():
        main()
