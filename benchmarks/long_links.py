"""Measures exchanges over Tcp between two hosts on long links, with several connections and with a pace.

    python benchmarks/long_links.py [--only links|pace] [--out DIR]

The hosts are network namespaces, which need root.
"""

import argparse
import json
import os
import pathlib
import shlex
import subprocess
import sys
import time

import jax
import numpy as np
from collectives import Mesh
from report import RESULTS, Report, free_port, header, line, mark, median, rounded

import jaxcgx as cgx
from jaxcgx.lab import Lab, Link, signals_raise, why_not
from jaxcgx.text import parse_rate, parse_time
from jaxcgx.transports.network import PAYLOAD

CODEC = cgx.MaxMin(8)
LINKS = [  # up, down, delay, elements of an exchange
    ("100mbit", "100mbit", "20ms", 1 << 22),
    ("110mbit", "500mbit", "20ms", 1 << 22),
    ("1gbit", "1gbit", "20ms", 1 << 24),
    ("1gbit", "1gbit", "50ms", 1 << 24),
]
CONNECTIONS = 1, 4, 8
SLOWER = 0.9  # the pace over the rate of the link
PACES = [("100mbit", 1 << 22), ("400mbit", 1 << 24)]
PACED = "10gbit"  # the links of the rows with a pace
REPEATS = 7
PAUSE = 1.0  # seconds, after which the kernel measures again how fast a link is
NEAR = 0.05  # goal: the difference between a pace and the sent bytes per second
LIMIT = 300  # seconds

CHARTS = [
    dict(table="links", title="Share of the ideal", x="link", y=["share_of_repetitions"], by="connections"),
    dict(
        table="links", title="Share after a pause", x="link", y=["share_after_a_pause_of_repetitions"], by="connections"
    ),
]

NOTES = f"""\
- An exchange is a compressed_psum in 8 bits (MaxMin), two_shot, of 4 Mi elements on the slow links, and of 16 Mi on the
  fast ones. ideal: the time of the bytes of each host at {PAYLOAD * 8:.3f} of the rate of its slowest link, plus twice
  the one-way delay, because sums are sent back. share: the ideal over the median of {REPEATS} exchanges, one right
  after the other, or each after a pause of {PAUSE:g} s. It may exceed 1, because the pieces of a message overlap.
- The delay applies to everything that each host sends. A round trip takes twice as long.
- paced: a pace of {SLOWER:g} of the rate, on {CONNECTIONS[-1]} connections.
- Pace: the bytes that each host sends in an exchange over its time, compared with the pace, on links of {PACED}. Goal:
  they differ by at most {NEAR:.0%}.
"""


# In a host


def run_rank(address, rank, elements, pauses, links):
    """Prints the bytes of an exchange, and the seconds of each exchange."""
    jax.config.update("jax_num_cpu_devices", 1)
    jax.distributed.initialize(address, 2, rank)
    mesh, axis = Mesh(2), cgx.Tcp("data", **links)
    x = mesh.array(np.random.default_rng(rank).standard_normal(elements, np.float32))
    program = mesh.compiled(lambda x: cgx.compressed_psum(x, axis, cgx.Plan.every(CODEC, schedule="two_shot")), x)
    jax.block_until_ready(program(x))
    found = []
    for pause in pauses:
        for _ in range(REPEATS):
            time.sleep(pause)
            start = time.perf_counter()
            jax.block_until_ready(program(x))
            found.append(time.perf_counter() - start)
    print("FOUND", json.dumps([cgx.explain(program, show=False).bytes, found]), flush=True)


# In the process that starts the others


def measure(link, elements, pauses, **links):
    """Returns the bytes that a host sends in an exchange, and {pause: [seconds of each exchange]}."""
    with Lab(2, link) as lab:
        address = f"{lab.address(0)}:{free_port()}"
        script = [sys.executable, pathlib.Path(__file__).resolve()]
        environment = os.environ | {"JAX_PLATFORMS": "cpu"}
        running = [
            lab.start(
                rank,
                [*script, "--rank", json.dumps([address, rank, elements, pauses, links])],
                stdout=subprocess.PIPE,
                text=True,
                env=environment,
            )
            for rank in range(2)
        ]
        lines = running[0].communicate(timeout=LIMIT)[0].splitlines()
    size, times = json.loads(next(text for text in lines if text.startswith("FOUND")).removeprefix("FOUND"))
    return size, [times[i : i + REPEATS] for i in range(0, len(times), REPEATS)]


def on_links(report):
    report.show("", *header("link", "connections", "ideal ms", "ms", "share", "after a pause ms", "share"))
    for up, down, delay, elements in LINKS:
        rate, seconds = parse_rate("LINKS", up), parse_time("LINKS", delay)
        link = Link(rate, parse_rate("LINKS", down), seconds)
        name = f"{up} up, {down} down, {delay}" if up != down else f"{up}, {delay}"
        for connections, pace in [*((n, None) for n in CONNECTIONS), (CONNECTIONS[-1], SLOWER * rate / 8)]:
            size, times = measure(link, elements, [0, PAUSE], connections=connections, pace=pace)
            ideal = size / (rate * PAYLOAD) + 2 * seconds
            shares = [rounded(ideal / t for t in each) for each in times]
            spelled = f"{connections}{' paced' if pace else ''}"
            report.data["links"].append(
                dict(
                    link=name,
                    connections=spelled,
                    bytes=size,
                    ideal_ms=round(ideal * 1e3, 2),
                    ms=median(np.multiply(times[0], 1e3)),
                    ms_after_a_pause=median(np.multiply(times[1], 1e3)),
                    share_of_repetitions=shares[0],
                    share_after_a_pause_of_repetitions=shares[1],
                )
            )
            row = report.data["links"][-1]
            cells = [
                f"{value:.1f}" if i % 2 == 0 else f"{value:.3f}"
                for i, value in enumerate([row["ms"], median(shares[0]), row["ms_after_a_pause"], median(shares[1])])
            ]
            report.show(line([name, spelled, f"{row['ideal_ms']:.1f}", *cells]))


def paced(report):
    report.show("", *header("pace", "connections", "MB sent", "ms", "of the pace", "goal"))
    for pace, elements in PACES:
        for connections in (1, 4):
            size, (times,) = measure(PACED, elements, [0], connections=connections, pace=pace)
            reached = [size / t / (parse_rate("PACES", pace) / 8) for t in times]
            near = abs(median(reached) - 1) <= NEAR
            report.data["pace"].append(
                dict(
                    pace=pace,
                    connections=connections,
                    bytes=size,
                    ms=median(np.multiply(times, 1e3)),
                    of_the_pace=median(reached),
                    reached=near,
                )
            )
            cells = [f"{size / 1e6:.2f}", f"{1e3 * median(times):.1f}", f"{median(reached):.3f}", mark(near)]
            report.show(line([pace, connections, *cells]))


def parse():
    parser = argparse.ArgumentParser(description="Exchanges over Tcp on long links.")
    parser.add_argument("--only", choices=("links", "pace"), help="one part")
    parser.add_argument(
        "--out",
        type=pathlib.Path,
        metavar="DIR",
        help="where the results are written (default: benchmarks/results, but nowhere with --only)",
    )
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    args = parser.parse_args()
    given = ["--only", args.only] if args.only else []
    args.command = shlex.join(["python", "benchmarks/long_links.py", *given]) if given else "make bench-long-links"
    args.out = args.out or (None if given else RESULTS)
    return args


def main():
    args = parse()
    if args.rank:
        *given, links = json.loads(args.rank)
        run_rank(*given, links=links)
        return
    if why := why_not():
        sys.exit(f"long_links.py: not measured, {why}")
    load = round(os.getloadavg()[0], 1)
    report = Report(args.command, REPEATS, load=load, links=[], pace=[], charts=CHARTS)
    report.show("", f"Load average when it began: {load:g}.")
    if args.only != "pace":
        on_links(report)
    if args.only != "links":
        paced(report)
    report.show("", *NOTES.splitlines())
    if args.out:
        report.write(args.out, "long-links")


if __name__ == "__main__":
    with signals_raise():
        main()
