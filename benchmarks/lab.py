"""Measures the lab itself: the rates of its links, and the bytes that `explain` predicts against the kernel's counters.

    python benchmarks/lab.py [--only control|bytes] [--out DIR]

Needs root.
"""

import argparse
import contextlib
import itertools
import json
import os
import pathlib
import shlex
import socket
import subprocess
import sys
import threading
import time
from typing import NamedTuple

import jax
import numpy as np
from collectives import Mesh
from jax import lax
from jax.sharding import PartitionSpec
from report import RESULTS, Report, free_port, header, line, mark, median, rounded

import jaxcgx as cgx
from jaxcgx.codecs.base import spell
from jaxcgx.lab import Lab, Link, signals_raise, why_not
from jaxcgx.lab.counters import ETHERNET, IP, TCP, Counters
from jaxcgx.report import advise
from jaxcgx.text import parse_rate, parse_time

CONTROL = [("100mbit", "0ms"), ("1gbit", "0ms"), ("10gbit", "0ms"), ("100mbit", "20ms"), ("1gbit", "5ms")]
WARM_UP, WINDOW, REPEATS = 1.0, 1.0, 5  # seconds
TRIPS = 21
SHARE = 0.95  # goal: share of the set rate
HOSTS = 2, 4
ELEMENTS = 1 << 22  # per exchange
SHAPE = 2048, ELEMENTS // 2048
CALLS = 4
DIFFERENCE = 0.02  # goal: between explain's and the planner's bytes and the kernel's
ROWS = {
    "compressed_psum_scatter": {},
    "compressed_all_gather": {},
    "compressed_all_to_all": dict(split_axis=0, concat_axis=0),
}
CODECS = [
    cgx.MaxMin(4),
    cgx.ByteGrad(),
    cgx.AbsMax(8),
    cgx.Float8(),
    cgx.Sign(),
    cgx.Cast("bfloat16"),
    cgx.Eden(4),
    cgx.Micro("nvfp4"),
    cgx.MaxMin(4, rotate=True),
    cgx.Lossless(),
    cgx.TopK(0.01),
    cgx.Raw(),
]
SCHEDULES = "two_shot", "one_shot", "ring", "tree"
LOW_RANK = cgx.PowerSGD(16)

CHARTS = [dict(table="control", title="Share of the set rate", x="link", y=["share_of_repetitions"], by="ways")]

NOTES = f"""\
- Control: host 1 sends to host 0 over one TCP connection of plain sockets. With "both ways", each also sends to the
  other at the same time. The kernel's token bucket counts the bytes on the link, with their headers. The first
  {WARM_UP} s don't count. share: the median of {REPEATS} windows of {WINDOW} s over the set rate. Goal: {SHARE}.
  Other programs on the machine slow down the fast links.
- round trip: that of one byte, before the transfer begins. The relay delays everything that each host sends.
- Bytes: explain has the bytes that a rank sends in a call, according to `cgx.explain`. planner has the same according
  to `cgx.advise`, which counts sums only. kernel has the bytes that the kernel counted on the link of the host that
  sent most, the mean of {CALLS} calls. framing has the headers among them: {ETHERNET} bytes of Ethernet, {IP} of IP and
  {TCP} of TCP with timestamps for each packet, including acknowledgements. payload is the rest.
- difference: that of payload from explain or from the planner, the larger one. Goal: at most {DIFFERENCE:.0%}. The size
  of Lossless depends on the numbers. Over Tcp, only the used bytes travel, and explain has their bound, so there
  payload is compared with the planner alone. Each exchange also has 0.05 to 4 kB of the transport's own messages, which
  are not in explain. With very small messages this is more than the goal.
"""


# In a host


def transfer(rank, address, both):
    """Sends zeros from host 1, or from both hosts, to the other one until the lab ends it.

    First it prints the round trip of a byte.
    """
    with contextlib.suppress(ConnectionError):  # the lab ends the other host first
        if rank == 0:
            with socket.create_server((address, 5000)) as server:
                peer, _ = server.accept()
        else:
            while not (peer := connect(address)):
                time.sleep(0.02)
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        trips = []
        for _ in range(TRIPS):
            start = time.perf_counter()
            if rank:
                peer.sendall(b"x")
            assert peer.recv(1)
            if not rank:
                peer.sendall(b"x")
            trips.append(time.perf_counter() - start)
        print(median(np.multiply(trips, 1e3)), flush=True)
        if rank or both:
            threading.Thread(target=flood, args=[peer], daemon=True).start()
        place = bytearray(1 << 20)
        while peer.recv_into(place):
            pass


def flood(peer):
    """Sends zeros until the other host ends."""
    zeros = bytes(1 << 20)
    with contextlib.suppress(ConnectionError):
        while True:
            peer.sendall(zeros)


def connect(address):
    """Returns a connection to host 0, or None if it doesn't listen yet."""
    with contextlib.suppress(ConnectionRefusedError):
        return socket.create_connection((address, 5000))


class Exchange(NamedTuple):
    """An exchange whose bytes are compared."""

    what: str
    over: str = "Gloo"
    codec: cgx.Codec | None = None
    schedule: str = ""

    @property
    def axis(self):
        return cgx.Tcp("data") if self.over == "Tcp" else "data"

    def run(self, x):
        """The exchange of one array."""
        if self.codec is None:
            return lax.psum(x, self.axis)
        key = jax.random.key(0) if self.codec.stochastic else None
        if self.what in ROWS:
            return getattr(cgx, self.what)(x, self.axis, plan=self.codec, key=key, tiled=True, **ROWS[self.what])
        plan = cgx.Plan.every(self.codec, schedule=self.schedule or "auto")
        return cgx.compressed_psum(x.reshape(SHAPE), self.axis, plan, key=key).reshape(-1)

    def planned(self, hosts):
        """The bytes that the planner counts for a sum. None: the planner counts sums alone."""
        if self.what in ROWS:
            return None
        codec = self.codec or cgx.Raw()
        leaf = jax.ShapeDtypeStruct(SHAPE, np.float32)
        case = advise.Case([leaf], nodes=hosts, each=1, compute=0.0, overlap=False, fusion_mb=64, inner=cgx.Network())
        return case.sent(codec, self.schedule or "psum", mover=self.over.lower())


def exchanges():
    """All of them, in the order in which every rank runs them."""
    found = [Exchange("lax.psum")]
    for over in ("Gloo", "Tcp"):
        for codec, schedule in itertools.product(CODECS, SCHEDULES):
            # A tree over Gloo sends padding, too, and sums that grow travel neither along rings nor along trees.
            if not (schedule == "tree" and over == "Gloo") and not (schedule in ("ring", "tree") and codec.sums_grow):
                found.append(Exchange("compressed_psum", over, codec, schedule))
        found.append(Exchange("compressed_psum", over, LOW_RANK))
        found += [Exchange(what, over, CODECS[0]) for what in ROWS]
    return found


def run_rank(address, rank, processes):
    """Runs each exchange once, and CALLS more times when the lab asks for it."""
    jax.config.update("jax_num_cpu_devices", 1)
    jax.distributed.initialize(address, processes, rank)
    mesh, spec = Mesh(processes), PartitionSpec("data")
    x = mesh.array(np.random.default_rng(rank).standard_normal(ELEMENTS, np.float32))
    for exchange in exchanges():
        mapped = jax.shard_map(exchange.run, mesh=mesh.mesh, in_specs=spec, out_specs=spec, check_vma=False)
        lowered = jax.jit(mapped).lower(x)
        program = lowered.compile()
        jax.block_until_ready(program(x))
        print("READY", cgx.explain(program, show=False).bytes, flush=True)
        sys.stdin.readline()
        for _ in range(CALLS):
            jax.block_until_ready(program(x))
        print("DONE", flush=True)
        sys.stdin.readline()


# In the process that starts the others


def hear(running, word):
    """Returns what each process prints after a word. Gloo also prints lines."""
    found = [next((text for text in process.stdout if text.startswith(word)), None) for process in running]
    if None in found:
        raise RuntimeError("lab.py: a process ended")
    return [text.removeprefix(word).strip() for text in found]


def tell(running):
    for process in running:
        process.stdin.write("\n")
        process.stdin.flush()


def control(rate, delay, both):
    """Returns a row: the share of the set rate that plain sockets reach."""
    bits, seconds = parse_rate("CONTROL", rate), parse_time("CONTROL", delay)
    with Lab(2, Link(bits, bits, seconds)) as lab, Counters(lab) as counters:
        program = [sys.executable, pathlib.Path(__file__).resolve(), "--transfer"]
        running = [
            lab.start(host, [*program, json.dumps([host, lab.address(0), both])], stdout=subprocess.PIPE, text=True)
            for host in range(2)
        ]
        trip = float(running[1].stdout.readline())
        time.sleep(WARM_UP)
        shares = []  # shares of the rate, of the slower sender
        for _ in range(REPEATS):
            counters.note()
            time.sleep(WINDOW)
            counters.note()
            (start, before), (end, after) = counters.history[-2:]
            sent = [after[host][0].bytes - before[host][0].bytes for host in range(2)]
            shares.append((min(sent) if both else sent[1]) * 8 / (end - start) / bits)
        return dict(
            link=f"{rate}, {delay}",
            rate_mbit=bits / 1e6,
            delay_ms=seconds * 1e3,
            ways="both ways" if both else "one way",
            round_trip_ms=trip,
            share=median(shares),
            reached=median(shares) >= SHARE,
            share_of_repetitions=rounded(shares),
        )


def compare(processes):
    """Returns rows: for every exchange, the bytes of explain and those of the kernel."""
    with Lab(processes, "1gbit") as lab, Counters(lab) as counters, contextlib.ExitStack() as stack:
        address = f"{lab.address(0)}:{free_port()}"
        running = []
        for rank in range(processes):
            words = [sys.executable, pathlib.Path(__file__).resolve(), "--rank", json.dumps([address, rank, processes])]
            options = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            running.append(lab.start(rank, words, env=os.environ | {"JAX_PLATFORMS": "cpu"}, **options))
            stack.callback(running[-1].wait)
            stack.callback(running[-1].kill)
        for exchange in exchanges():
            explained = max(map(int, hear(running, "READY")))
            before = counters.read()
            tell(running)
            hear(running, "DONE")
            sent = max((after[0] - first[0] for first, after in zip(before, counters.read())), key=lambda t: t.bytes)
            tell(running)
            payload, planned = sent.payload / CALLS, exchange.planned(processes)
            bound = exchange.over == "Tcp" and isinstance(exchange.codec, cgx.Lossless)  # explain has the bound alone
            differences = [payload / bytes - 1 for bytes in (None if bound else explained, planned) if bytes]
            yield dict(
                hosts=processes,
                what=exchange.what,
                over=exchange.over,
                codec=spell(exchange.codec) if exchange.codec else "",
                schedule=exchange.schedule,
                explain_bytes=explained,
                planner_bytes=planned,
                kernel_bytes=round(sent.bytes / CALLS),
                packets=sent.packets / CALLS,
                framing_bytes=round((sent.bytes - sent.payload) / CALLS),
                payload_bytes=round(payload),
                difference=round(max(differences, key=abs), 5),
                reached=max(map(abs, differences)) <= DIFFERENCE,
            )


def parse():
    parser = argparse.ArgumentParser(description="The lab's rates, and explain's bytes against the kernel's.")
    parser.add_argument("--only", choices=("control", "bytes"), help="one part")
    parser.add_argument(
        "--out",
        type=pathlib.Path,
        metavar="DIR",
        help="where the results are written (default: benchmarks/results, but nowhere with --only)",
    )
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    parser.add_argument("--transfer", help=argparse.SUPPRESS)
    args = parser.parse_args()
    given = ["--only", args.only] if args.only else []
    args.command = shlex.join(["python", "benchmarks/lab.py", *given]) if given else "make bench-lab"
    args.out = args.out or (None if given else RESULTS)
    return args


def main():
    args = parse()
    if args.transfer:
        transfer(*json.loads(args.transfer))
    if args.rank:
        run_rank(*json.loads(args.rank))
        return
    if why := why_not():
        sys.exit(f"lab.py: not measured, {why}")
    load = round(os.getloadavg()[0], 1)
    report = Report(args.command, load=load, control=[], bytes=[], charts=CHARTS)
    report.show("", f"Load average when it began: {load:g}.")
    if args.only != "bytes":
        report.show(
            "", "Plain TCP between two hosts.", "", *header("rate", "delay ms", "ways", "round trip", "share", "goal")
        )
        for rate, delay in CONTROL:
            for both in (False, True):
                row = control(rate, delay, both)
                report.data["control"].append(row)
                report.show(
                    line(
                        [
                            rate,
                            f"{row['delay_ms']:g}",
                            row["ways"],
                            f"{row['round_trip_ms']:.2f}",
                            f"{row['share']:.3f}",
                            mark(row["reached"]),
                        ]
                    )
                )
    if args.only != "control":
        for hosts in HOSTS:
            report.show(
                "",
                f"An exchange of {ELEMENTS:,} float32, {hosts} hosts.",
                "",
                *header(
                    "exchange",
                    "over",
                    "schedule",
                    "explain",
                    "planner",
                    "kernel",
                    "packets",
                    "framing",
                    "payload",
                    "difference",
                    "goal",
                    width=60,
                ),
            )
            for row in compare(hosts):
                report.data["bytes"].append(row)
                figures = [
                    "" if row[name] is None else f"{row[name]:,.0f}"
                    for name in (
                        "explain_bytes",
                        "planner_bytes",
                        "kernel_bytes",
                        "packets",
                        "framing_bytes",
                        "payload_bytes",
                    )
                ]
                report.show(
                    line(
                        [
                            f"{row['what']} {row['codec']}".strip(),
                            row["over"],
                            row["schedule"],
                            *figures,
                            f"{row['difference']:+.3%}",
                            mark(row["reached"]),
                        ],
                        60,
                    )
                )
    report.show("", *NOTES.splitlines())
    if args.out:
        report.write(args.out, "lab")


if __name__ == "__main__":
    with signals_raise():
        main()
