"""python -m jaxcgx lab: runs a command in every host of a virtual network, and reports the traffic on the links."""

import contextlib
import time
from collections.abc import Sequence

from jaxcgx.lab import Lab, Link, signals_raise
from jaxcgx.lab.counters import Counters, History, busiest
from jaxcgx.lab.files import Change
from jaxcgx.report.results import Data
from jaxcgx.text import spell_rate, table

TICK = 0.1  # the seconds between two readings of the counters
POINTS = 400  # the most points of a line in the chart


def run(links: Sequence[Link], changes: Sequence[Change], words: Sequence[str]) -> tuple[int, Data]:
    """Runs a command in all hosts at the same time. Returns (worst exit status, results from the kernel's counters)."""
    # In the words of the command, {rank} becomes the number of the host, {hosts} the number of hosts, and {address} the
    # address of host 0. Links change while it runs. The changes are in the order of their times.
    with signals_raise(), Lab(len(links), links) as lab, Counters(lab) as counters:
        for rank in range(lab.hosts):
            known = {"{rank}": str(rank), "{hosts}": str(lab.hosts), "{address}": lab.address(0)}
            filled = list(words)
            for name, value in known.items():
                filled = [word.replace(name, value) for word in filled]
            lab.start(rank, filled)
        waiting, done = list(changes), list[tuple[float, Change]]()
        with contextlib.suppress(KeyboardInterrupt):  # Ctrl-C also ends the command in the hosts
            while any(process.poll() is None for process in lab.running):
                time.sleep(TICK)
                counters.note()
                while waiting and waiting[0].at <= counters.history[-1][0]:
                    done.append((counters.history[-1][0], waiting[0]))
                    waiting.pop(0).apply(lab)
                    counters.note()
        counters.note()
        return max(abs(process.wait()) for process in lab.running), describe(links, done, counters.history)


def describe(links: Sequence[Link], changes: Sequence[tuple[float, Change]], history: History) -> Data:
    """Returns the counts of these `links`, with `changes` (seconds, change), as results with tables and a chart."""
    times = [seconds for seconds, _ in history]
    rows: list[Data] = []
    samples: list[Data] = []
    shown = sorted({round(i * (len(times) - 1) / POINTS) for i in range(POINTS + 1)})
    for host, link in enumerate(links):
        row: Data = dict(host=host, delay_ms=link.delay * 1e3)
        lines: list[Data] = [dict(host=host, seconds=round(times[last], 3)) for last in shown[1:]]
        for which, (name, rate) in enumerate({"up": link.up, "down": link.down}.items()):
            fastest = max([rate, *(c.rates[name] for _, c in changes if host in c.hosts and name in c.rates)])
            counts = [counted[host][which].bytes for _, counted in history]
            most = busiest(times, counts) * 8e-6
            total = history[-1][1][host][which]
            row[name] = dict(
                rate_mbit=fastest / 1e6,
                bytes=total.bytes,
                packets=total.packets,
                dropped=total.dropped,
                busiest_mbit=round(most, 3),
                share=round(most / fastest * 1e6, 3),
            )
            for first, last, line in zip(shown, shown[1:], lines):
                line[f"{name}_mbit"] = round((counts[last] - counts[first]) * 8e-6 / (times[last] - times[first]), 3)
        rows.append(row)
        samples += lines
    happened = [
        dict(at_seconds=round(at, 3), hosts=", ".join(map(str, c.hosts)), cut=c.cut)
        | {f"{name}_mbit": c.rates[name] / 1e6 for name in c.rates}
        for at, c in changes
    ]
    chart = dict(table="samples", title="What the links carried", x="seconds", y=["up_mbit", "down_mbit"], by="host")
    return dict(rows=rows, changes=happened, samples=samples, charts=[chart])


def spell(data: Data) -> str:
    head = ["host", "direction", "rate", "bytes", "packets", "dropped", "busiest second", "share of the rate"]
    lines = [
        [
            str(row["host"]),
            name,
            spell_rate(row[name]["rate_mbit"] * 1e6),
            *(f"{row[name][key]:,}" for key in ("bytes", "packets", "dropped")),
            f"{row[name]['busiest_mbit']:.1f} Mbit/s",
            f"{row[name]['share']:.3f}",
        ]
        for row in data["rows"]
        for name in ("up", "down")
    ]
    return table(head, lines)
