"""Compares the errors that exchange/errors.py predicts with those of sums.

    python benchmarks/errors.py [--codecs REGEX] [--out DIR]

The ranks are virtual devices of this process: errors don't depend on who moves the bytes. A prediction for random
numbers is made from other ones of the same distribution. One for gradients is made from the gradients that are summed,
as their statistics change from step to step: the comparison checks how encodings add up, not whether steps are alike.
"""

import argparse
import functools
import pathlib
import re
import shlex
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, PartitionSpec
from report import RESULTS, Report, header, line
from sklearn.datasets import load_digits

import jaxcgx as cgx
from jaxcgx.codecs.spelling import spell
from jaxcgx.exchange.costs import SCHEDULES
from jaxcgx.exchange.errors import Losses, drawn

RANKS = 2, 8
jax.config.update("jax_num_cpu_devices", max(RANKS))  # before anything starts JAX's backend
SIZE = 2**19  # elements of a rank, of random numbers
SEEDS = 2  # sums of random numbers
TAKEN = 6  # sums of gradients
GOAL = 0.1
GRADIENTS = "gradients"
LAYERS = 64, 512, 512, 10  # of the network whose gradients are summed
STEPS, BATCH = 40, 32  # before the gradients are taken; of a rank
STOCHASTIC = "stochastic"
CODECS = [
    cgx.MaxMin(2),
    cgx.MaxMin(4),
    cgx.MaxMin(4, rounding=STOCHASTIC),
    cgx.MaxMin(8),
    cgx.Float8(),
    cgx.ByteGrad(),
    cgx.Sign(),
    cgx.TopK(0.01),
    cgx.PowerSGD(4),
]


def gradients(ranks, steps):
    """[steps, ranks, m, n]: the gradients of the largest layer of a network that learns digits, one batch a rank."""
    digits = load_digits()
    images, labels = digits.data.astype(np.float32) / 16, digits.target
    keys = jax.random.split(jax.random.key(0), len(LAYERS) - 1)
    params = [jax.random.normal(k, (m, n)) * (2 / m) ** 0.5 for k, m, n in zip(keys, LAYERS, LAYERS[1:])]
    optimizer = optax.adam(1e-3)
    state = optimizer.init(params)

    def loss(params, x, y):
        for w in params[:-1]:
            x = jax.nn.relu(x @ w)
        return optax.softmax_cross_entropy_with_integer_labels(x @ params[-1], y).mean()

    of_ranks = jax.jit(jax.vmap(jax.grad(loss), (None, 0, 0)))
    rng, found = np.random.default_rng(0), []
    for step in range(STEPS + steps):
        chosen = rng.choice(len(images), (ranks, BATCH))
        grads = of_ranks(params, images[chosen], labels[chosen])
        if step >= STEPS:
            found.append(np.asarray(grads[1]))
        updates, state = optimizer.update(jax.tree.map(lambda g: g.mean(0), grads), state)
        params = optax.apply_updates(params, updates)
    return np.stack(found)


def numbers(kind, ranks):
    """(samples for predictions, what is summed), each [sums, ranks, ...]."""
    if kind == GRADIENTS:
        found = gradients(ranks, TAKEN)
        return found, found
    of = lambda seed: drawn(kind, ranks, SIZE, seed=1000 * ranks + seed).reshape(ranks, 1024, -1)
    return [of(0)], [of(1 + seed) for seed in range(SEEDS)]


def predict(samples, codec, schedule):
    """The vNMSE of all samples together."""
    ranks = len(samples[0])
    if codec.low_rank:  # of each matrix
        powers = [np.square(sample.sum(0)).sum() for sample in samples]
        return float(np.average([Losses(sample, codec).error(schedule, ranks) for sample in samples], weights=powers))
    cut = len(samples) * (1 if schedule == "one_shot" else ranks)
    return Losses(np.concatenate(samples, 1), codec, cut=cut).error(schedule, ranks)


@functools.lru_cache
def program(codec, schedule, ranks):
    """compressed_pmean of [ranks, ...], with a key."""
    mesh = jax.make_mesh((ranks,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:ranks])
    spec = PartitionSpec("data")

    def mean(x, key):
        key = key if codec.stochastic else None
        return cgx.compressed_pmean(x[0], "data", codec, schedule=schedule, key=key)[None]

    return jax.jit(jax.shard_map(mean, mesh=mesh, in_specs=(spec, PartitionSpec()), out_specs=spec, check_vma=False))


def measure(codec, schedule, sums):
    """The vNMSE of compressed_pmean, of all sums together."""
    lost, power = 0.0, 0.0
    for seed, x in enumerate(sums):
        result = np.asarray(program(codec, schedule, len(x))(jnp.asarray(x), jax.random.key(seed)))[0]
        exact = x.mean(0, dtype=np.float64)
        lost, power = lost + np.square(result - exact).sum(), power + np.square(exact).sum()
    return float(lost / power)


def schedules(codec):
    if codec.low_rank:
        return ["auto"]
    return [name for name in SCHEDULES if not (name == "ring" and codec.sums_grow)]


def parse():
    parser = argparse.ArgumentParser(description="Predicted errors of sums against measured ones.")
    parser.add_argument("--codecs", metavar="REGEX", help="only the codecs whose names match")
    parser.add_argument(
        "--out",
        type=pathlib.Path,
        metavar="DIR",
        help="where the results are written (default: benchmarks/results, but nowhere when --codecs is given)",
    )
    args = parser.parse_args()
    args.command = shlex.join(["python", "benchmarks/errors.py", "--codecs", args.codecs]) if args.codecs else ""
    args.out = args.out or (None if args.codecs else RESULTS)
    return args


NOTES = f"""\
- Errors are vNMSE of one compressed_pmean without feedback, |result - mean|^2 / |mean|^2, over {SEEDS} sums, or {TAKEN}
  of gradients.
- normal, laplace, student (3 degrees of freedom): {SIZE:,} independent numbers of each rank, of variance 1, 2 and 3.
- {GRADIENTS}: those of the largest layer of a network that learns scikit-learn's digits, after {STEPS} steps.
- off: the prediction over the measurement, minus 1. It is made from other random numbers, or from the same gradients.
- Errors near 1 and above mean that the result has little to do with the mean. Such sums need feedback.
"""


def main():
    args = parse()
    warnings.simplefilter("ignore")  # of keys that a codec doesn't need
    report = Report(args.command or "make bench-errors", goal=GOAL, rows=[])
    report.show("", *header("codec", "numbers", "ranks", "schedule", "measured", "predicted", "off"))
    for kind in (GRADIENTS, "normal", "laplace", "student"):
        for ranks in RANKS:
            samples, sums = numbers(kind, ranks)
            for codec in CODECS:
                if not re.search(args.codecs or "", spell(codec)):
                    continue
                for schedule in schedules(codec):
                    exact = measure(codec, schedule, sums)
                    row = dict(
                        codec=spell(codec),
                        numbers=kind,
                        ranks=ranks,
                        schedule=schedule,
                        measured=exact,
                        predicted=predict(samples, codec, schedule),
                    )
                    row["off"] = round(row["predicted"] / exact - 1, 4)
                    report.data["rows"].append(row)
                    off = f"{100 * row['off']:+.1f} %" + ("" if abs(row["off"]) <= GOAL else " ✗")
                    report.show(
                        line([row["codec"], kind, ranks, schedule, f"{exact:.3g}", f"{row['predicted']:.3g}", off])
                    )
    summary(report)
    report.show("", *NOTES.splitlines())
    if args.out:
        report.write(args.out, "errors")


def summary(report):
    report.show("", *header("numbers", "sums", "within 10 %", "median off", "largest off"))
    for kind in dict.fromkeys(row["numbers"] for row in report.data["rows"]):
        off = [abs(row["off"]) for row in report.data["rows"] if row["numbers"] == kind]
        within = sum(x <= GOAL for x in off)
        report.show(line([kind, len(off), within, f"{100 * np.median(off):.1f} %", f"{100 * max(off):.1f} %"]))


if __name__ == "__main__":
    main()
