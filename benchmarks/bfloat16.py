"""Simulates sums of bfloat16 gradients over many ranks in NumPy: with a plain psum, and with cgx.Cast("bfloat16").

    python benchmarks/bfloat16.py [--out DIR]

There is no network and no device: every addition is one of NumPy, rounded to bfloat16 where the sum is.
"""

import argparse
import functools
import pathlib

import jax.numpy as jnp
import numpy as np
from report import RESULTS, Report, header, line

SIZE = 2**14
RANKS = 8, 64, 512
NUMBERS = {  # (the rank's own part, the part that all ranks share)
    "noise": (1.0, 0.0),
    "half noise": (1.0, 1.0),
    "equal": (0.0, 1.0),
}
NOTES = """\
- noise: normally distributed, independent on every rank. half noise: half of a gradient's squared norm is the same on
  all ranks. equal: all ranks have the same gradient.
- ring: a psum in bfloat16 that adds one rank after another, and rounds after every addition. tree: one that adds pairs.
- Cast: the ranks' numbers in bfloat16, added in float32, and rounded once.
- error: |sum - exact|^2 / |exact|^2, where exact is the sum of the float32 numbers in float64. length: the part of the
  exact sum that the result has, <sum, exact> / |exact|^2.
"""


def add(a, b):
    """Returns the sum of two arrays of bfloat16, in bfloat16."""
    return (a.astype(np.float32) + b.astype(np.float32)).astype(jnp.bfloat16)


def tree(x):
    while len(x) > 1:
        x = add(x[0::2], x[1::2])
    return x[0]


SUMS = {
    "ring": lambda x: functools.reduce(add, x),
    "tree": tree,
    "Cast": lambda x: functools.reduce(np.add, x.astype(np.float32)).astype(jnp.bfloat16),
}


def losses(numbers, ranks):
    """Returns {sum: (error, length)}."""
    own, shared = NUMBERS[numbers]
    rng = np.random.default_rng(0)
    x = own * rng.standard_normal((ranks, SIZE), np.float32) + shared * rng.standard_normal(SIZE, np.float32)
    exact = x.sum(0, dtype=np.float64)
    found = {name: np.float64(run(x.astype(jnp.bfloat16))) for name, run in SUMS.items()}
    square = exact @ exact
    return {name: (np.square(got - exact).sum() / square, got @ exact / square) for name, got in found.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=pathlib.Path, default=RESULTS, metavar="DIR", help="the folder of the table")
    args = parser.parse_args()
    report = Report("make bench-cast", size=SIZE, rows=[])
    report.show("", *header("gradients", "ranks", *(f"{name} {what}" for name in SUMS for what in ("error", "length"))))
    for numbers in NUMBERS:
        for ranks in RANKS:
            found = losses(numbers, ranks)
            row = {
                f"{name} {what}": float(f"{x:.4g}")
                for name in SUMS
                for what, x in zip(("error", "length"), found[name])
            }
            report.data["rows"].append(dict(gradients=numbers, ranks=ranks) | row)
            report.show(line([numbers, ranks, *(f"{x:.3g}" for x in row.values())]))
    report.show("", *NOTES.splitlines())
    report.write(args.out, "bfloat16")


if __name__ == "__main__":
    main()
