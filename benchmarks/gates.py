"""Compares speeds, as ratios of times that are measured in turn, with a committed band.

    python benchmarks/gates.py [--write]

A ratio below its band fails: something has become slower. The ratios are those of kernels.py and collectives.py.
`--write` makes the band anew.
"""

import argparse
import os
import sys

import collectives
import jax
import kernels
import numpy as np
from report import RESULTS, Report, header, line, mark, median, rounded

from jaxcgx.report import results

SIZE, REPEATS = 64, 15  # MiB
ROWS = "encode MaxMin 4", "encode MaxMin 8", "encode MaxMin 4 stochastic", "decode MaxMin 4", "reduce MaxMin 4"
BAND = 0.6, 1.6  # of the committed ratio
CHARTS = [dict(table="gates", title="Gates", x="name", y=["best", "low", "high"])]
NOTES = f"""\
- encode, decode, reduce: the time in which a memcpy moves their bytes, over their time (`kernels.py`). Tcp: the time of
  `lax.psum` over Gloo, over that of `compressed_psum` with 4 bits over Tcp, between two processes on loopback
  (`collectives.py`). {SIZE} MiB of float32.
- best: the ratio of the shortest times of {REPEATS} repetitions, which other programs disturb least. median: of the
  ratios.
- low, high: the band, {BAND[0]:g} and {BAND[1]:g} of the best ratio. `make gates` fails below it. If a ratio is above,
  `make bench-gates` makes the band anew.
"""


def measured():
    """Yields (name, ms of what is compared with, ms), both of the repetitions."""
    # first, because the processes of collectives.py use all processors, too
    network = collectives.Network("loopback, 2 processes", 2, None, [SIZE])
    ms = next(each["ms"] for each in collectives.measure(network, REPEATS) if each["what"] == "loop")
    yield "Tcp against psum", np.array(ms["psum"]), np.array(ms[collectives.TCP])
    memcpy = kernels.Memcpy(SIZE << 20, len(os.sched_getaffinity(0)))
    for row in (row for row in kernels.all_rows() if row.name in ROWS):
        found = row.run(SIZE << 20, memcpy, REPEATS)
        bound = found["bytes"] / (2 * SIZE << 20) * np.array(found["memcpy_ms_of_repetitions"])
        yield row.name, bound, np.array(found["ms_of_repetitions"])


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="write the band anew")
    write = parser.parse_args().write
    jax.config.update("jax_platforms", "cpu")
    report = Report("make bench-gates" if write else "make gates", REPEATS, size_mib=SIZE, gates=[], charts=CHARTS)
    band = report.data if write else results.read(RESULTS / "gates.json")
    kernels_of = lambda data: data["native"]["kernels"]
    if kernels_of(band) != kernels_of(report.data):
        sys.exit(f"gates: the band is of {kernels_of(band)} kernels: run `make bench-gates` first, without your change")
    committed = {row["name"]: row for row in band["gates"]}
    report.show("", *header("ratio", "best", "median", "low", "high", "reached"))
    for name, other, ms in measured():
        best = round(float(min(other) / min(ms)), 4)
        low, high = (round(share * committed.get(name, {}).get("best", best), 4) for share in BAND)
        row = dict(name=name, best=best, median=median(other / ms), low=low, high=high)
        report.data["gates"].append(row | dict(ratio_of_repetitions=rounded(other / ms)))
        reached = mark(best >= low) + " above" * (best > high)
        report.show(line([name, *(f"{row[key]:.3f}" for key in ("best", "median", "low", "high")), reached]))
    report.show("", NOTES.rstrip())
    if write:
        report.write(RESULTS, "gates")
    sys.exit(any(row["best"] < row["low"] for row in report.data["gates"]))


if __name__ == "__main__":
    main()
