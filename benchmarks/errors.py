"""Measures the error of every codec, next to published figures and the predictions of exchange/errors.py.

    python benchmarks/errors.py [--codecs REGEX] [--out DIR]

The ranks are an axis of vmap, because errors don't depend on the transport. A prediction for random numbers is made
from other random numbers of the same distribution. A prediction for gradients is made from the same gradients that are
summed, because their statistics change from step to step. So the comparison checks how errors of encodings add up, not
whether steps are alike.
"""

import argparse
import functools
import itertools
import math
import pathlib
import re
import shlex
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
from error_numbers import PART, RANDOM, STEPS, numbers
from report import RESULTS, Report, header, line
from sklearn.datasets import load_digits

import jaxcgx as cgx
from jaxcgx.codecs.base import spell
from jaxcgx.exchange.costs import SCHEDULES
from jaxcgx.exchange.errors import Losses, drawn

# Every codec, by its line in the picture. A codec that is added here appears in the table and in the picture.
FAMILIES = {
    "MaxMin": [cgx.MaxMin(bits) for bits in (2, 3, 4, 5, 6, 8)],
    "MaxMin, buckets of 128": [cgx.MaxMin(bits, 128) for bits in (2, 3, 4, 5)],
    "MaxMin, stochastic": [cgx.MaxMin(bits, rounding="stochastic") for bits in (2, 4, 8)],
    "MaxMin, correlated": [cgx.MaxMin(bits, rounding="correlated") for bits in (2, 4, 8)],
    "MaxMin, rotated": [cgx.MaxMin(bits, rotate=True) for bits in (2, 3, 4, 5)],
    "Eden": [cgx.Eden(bits) for bits in range(1, 7)],
    "AbsMax": [cgx.AbsMax(bits) for bits in (3, 4, 8)],
    "AbsMax, rotated": [cgx.AbsMax(bits, rotate=True) for bits in (3, 4, 8)],
    "ByteGrad": [cgx.ByteGrad()],
    "Float8": [cgx.Float8()],
    "Cast": [cgx.Cast("float16"), cgx.Cast("bfloat16")],
    "Sign": [cgx.Sign()],
    "TopK": [cgx.TopK(0.01), cgx.TopK(0.1)],
    "PowerSGD": [cgx.PowerSGD(rank) for rank in (1, 4)],
    "Micro": [cgx.Micro("nvfp4"), cgx.Micro("mxfp4"), cgx.Micro("mxfp8")],
    "Micro, stochastic": [cgx.Micro(name, "stochastic") for name in ("nvfp4", "mxfp4", "mxfp8")],
    "Micro, eden": [cgx.Micro("nvfp4", "eden")],
    "Lossless": [cgx.Lossless()],
}
KINDS = *RANDOM, *PART
CHOICES = *FAMILIES["Eden"], cgx.MaxMin(7), cgx.MaxMin(8)  # for each leaf, L-GreCo chooses one of these
BY_LEAF = "bits by leaf"
EXACT = 1e-12  # smaller errors are those of float32
MOST, TABLE_RANKS = 64, (2, 8, 64)  # ranks: the most of a mean, and the columns of the table
ONE = 8  # ranks that are averaged for the error of one encoding
# (bits per element, vNMSE of one encoding or of a mean). EDEN's figure is D / (1 - D), where D is the distortion of
# Lloyd and Max's levels. It is the same for all inputs. NVFP4's figure is for the format on normal numbers. DynamiQ's
# figures are for gradients of LLaMA-1B, Gemma-1B, BERT-large and LLaMA-1B on MMLU, and for a whole exchange.
PUBLISHED = {
    "EDEN": [(1, math.pi / 2 - 1), (2, 0.1331), (3, 0.0358), (4, 0.00959), (5, 0.00251), (6, 0.000644)],
    "NVFP4": [(4.5, 0.0090)],
    "DynamiQ, of a mean": [(5, 0.0015), (5, 0.0012), (5, 0.0022), (5, 0.00096)],
}

# The predictions
RANKS = 2, 8
NODE = 2  # ranks of a node in a hierarchy, in which each node sums uncompressed numbers
SIZE = 2**19  # random numbers per rank
SEEDS = 2  # sums of random numbers
TAKEN = 6  # sums of gradients
GOAL = 0.1
GRADIENTS = "gradients"
LAYERS = 64, 512, 512, 10  # sizes of the layers of the network whose gradients are summed
BATCH = 32  # per rank
PREDICTED = [
    cgx.MaxMin(2),
    cgx.MaxMin(4),
    cgx.MaxMin(4, rounding="stochastic"),
    cgx.MaxMin(4, rounding="correlated"),
    cgx.MaxMin(4, rotate=True),
    cgx.MaxMin(8),
    cgx.AbsMax(4),
    cgx.Eden(2),
    cgx.Eden(4),
    cgx.Micro("nvfp4"),
    cgx.Float8(),
    cgx.ByteGrad(),
    cgx.Sign(),
    cgx.TopK(0.01),
    cgx.PowerSGD(4),
]


def gradients(ranks, steps):
    """Returns gradients [steps, ranks, m, n] of the largest layer of a network that learns digits, a batch per rank."""
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


def samples(kind, ranks):
    """Returns the samples for predictions and the numbers to sum, each [sums, ranks, ...]."""
    if kind == GRADIENTS:
        found = gradients(ranks, TAKEN)
        return found, found
    of = lambda seed: drawn(kind, ranks, SIZE, seed=1000 * ranks + seed).reshape(ranks, 1024, -1)
    return [of(0)], [of(1 + seed) for seed in range(SEEDS)]


def predict(found, codec, schedule, node=1):
    """Returns the vNMSE over all samples, for nodes of `node` ranks."""
    nodes = len(found[0]) // node
    if codec.low_rank:  # per matrix
        powers = [np.square(sample.sum(0)).sum() for sample in found]
        errors = [Losses(sample, codec).error(schedule, nodes, each=node) for sample in found]
        return float(np.average(errors, weights=powers))
    cut = len(found) * node * (1 if schedule == "one_shot" else nodes)
    return Losses(np.concatenate(found, 1), codec, cut=cut).error(schedule, nodes, each=node)


@functools.lru_cache
def program(codec, schedule, node=1):
    """Returns compressed_pmean of leaves [ranks, ...], as the first rank gets it, for nodes of `node` ranks."""

    def mean(leaves, key):
        key = key if codec.stochastic else None
        if node == 1:
            return cgx.compressed_pmean(leaves, "node", cgx.Plan.every(codec, schedule=schedule), key=key)
        codecs, schedules = {"node": codec, "local": cgx.Raw()}, {"node": schedule, "local": "auto"}
        plan = cgx.Plan.every(codecs, schedule=schedules)
        return cgx.compressed_pmean(leaves, ("node", "local"), plan, key=key)

    of_ranks = jax.vmap(jax.vmap(mean, in_axes=(0, None), axis_name="local"), in_axes=(0, None), axis_name="node")
    rows = lambda x: x.reshape(-1, node, *x.shape[1:])
    return jax.jit(lambda leaves, key: [x[0, 0] for x in of_ranks(list(map(rows, leaves)), key)])


def error(results, exact):
    """Returns the vNMSE over all arrays."""
    lost = sum(np.square(result - x, dtype=np.float64).sum() for result, x in zip(results, exact, strict=True))
    return float(lost / sum(np.square(x, dtype=np.float64).sum() for x in exact))


def measure(codec, schedule, sums, node=1):
    """Returns the vNMSE of compressed_pmean over all sums, for nodes of `node` ranks. A sum has leaves [ranks, ...]."""
    results, exact = [], []
    for seed, leaves in enumerate(sums):
        results += map(
            np.asarray, program(codec, schedule, node)([jnp.asarray(x) for x in leaves], jax.random.key(seed))
        )
        exact += [x.mean(0, dtype=np.float64) for x in leaves]
    return error(results, exact)


def measure_encoding(codec, leaves):
    """Returns the vNMSE of one encoding of leaves [ranks, ...]."""

    def decode(x, rank):
        return cgx.roundtrip(x, codec, jax.random.fold_in(jax.random.key(0), rank) if codec.stochastic else None)

    return error([np.asarray(jax.jit(jax.vmap(decode))(x, jnp.arange(ONE))) for x in leaves], leaves)


def measure_all(codecs, leaves):
    """Returns the errors for leaves [ranks, ...], each with its codec: of one encoding, and of means."""
    groups = {codec: [x for other, x in zip(codecs, leaves) if other == codec] for codec in codecs}

    def together(measured, ranks, exact):
        """Returns the errors of leaves with different codecs, which are exchanged one codec after another."""
        parts = [(codec, [x[:ranks] for x in group]) for codec, group in groups.items()]
        powers = [sum(np.square(exact(x), dtype=np.float64).sum() for x in group) for _, group in parts]
        return float(np.average([measured(codec, group) for codec, group in parts], weights=powers))

    def mean(codec, group):
        return measure(codec, "auto" if codec.low_rank else "two_shot", [group])

    found = {"one": together(measure_encoding, ONE, lambda x: x)}
    return found | {f"mean of {n}": together(mean, n, lambda x: x.mean(0, dtype=np.float64)) for n in TABLE_RANKS}


def by_leaf(reference, leaves):
    """Returns the codec of each leaf with the least total error, for no more bytes than `reference` for all leaves."""

    @jax.jit
    @functools.partial(jax.vmap, axis_name="data", out_axes=None)
    def measured(grads):
        return cgx.gradient_statistics(grads, "data", CHOICES, key=jax.random.key(0))

    tree = {f"{i:02}": x[:ONE] for i, x in enumerate(leaves)}
    plan = cgx.Plan(reference, skip_1d=False, min_size=0).adapt(measured(tree), budget="bytes")
    rows = plan.explain({name: jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for name, x in tree.items()}, ONE).rows
    return [row.codec for row in rows]


def bits(codecs, leaves):
    """Returns the bits per element, with metadata."""
    sent = sum(codec.wire_bytes(x.shape[1:], x.dtype) for codec, x in zip(codecs, leaves))
    return 8 * sent / sum(x[0].size for x in leaves)


def compare_codecs(report, wanted):
    """Shows the table of all codecs, and returns the points to draw."""
    names = ["one", *(f"mean of {ranks}" for ranks in TABLE_RANKS)]
    for kind in KINDS:
        leaves = numbers(kind, MOST)
        rows = [(family, spell(c), [c] * len(leaves)) for family, members in FAMILIES.items() for c in members]
        if len(leaves) > 1:
            rows += [(BY_LEAF, f"{BY_LEAF}, as {spell(c)}", by_leaf(c, leaves)) for c in FAMILIES["Eden"]]
        report.show("", f"{kind}:", "", *header("codec", "bits", *names))
        for family, name, codecs in rows:
            if re.search(wanted, name):
                row = dict(family=family, codec=name, numbers=kind, bits=round(bits(codecs, leaves), 3))
                row |= measure_all(codecs, leaves)
                report.data["codecs"].append(row)
                report.show(line([name, f"{row['bits']:.3g}", *(f"{row[name]:.3g}" for name in names)]))
    report.show("", "Published:", "", *header("", "bits", "vNMSE"))
    for name, points in PUBLISHED.items():
        for n, lost in points:
            report.data["published"].append(dict(name=name, bits=n, vnmse=lost))
            report.show(line([name, f"{n:.3g}", f"{lost:.3g}"]))


def draw(path, rows):
    """Draws error against bits: a row of plots for one encoding, and one for the mean of 8 ranks."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4 * len(KINDS), 9), layout="constrained")
    grid = figure.subplots(2, len(KINDS), sharex=True, sharey=True)
    found = {}  # legend entries
    for axes, measured in zip(grid, ("one", "mean of 8")):
        for ax, kind in zip(axes, KINDS):
            for color, family in enumerate([*FAMILIES, BY_LEAF]):
                points = [(r["bits"], r[measured]) for r in rows if (r["family"], r["numbers"]) == (family, kind)]
                # Lossless codecs have no place on the axis: their sums lose only what float32 rounds.
                points = sorted((n, lost) for n, lost in points if lost > EXACT)
                if points:
                    style = dict(marker="o", markersize=4, linewidth=1, color=colormaps["tab20"](color))
                    found[family] = ax.plot(*zip(*points), **style)[0]
            for marker, (name, points) in zip("x+1", PUBLISHED.items()):
                if name.endswith("mean") == (measured != "one"):
                    style = dict(marker=marker, markersize=9, linestyle="", color="black")
                    found[f"{name} (published)"] = ax.plot(*zip(*points), **style)[0]
            ax.set(title=f"{kind}: {measured}{' encoding' * (measured == 'one')}", xscale="log", yscale="log")
            ax.set_xticks([0.25, 0.5, 1, 2, 4, 8, 16], ["1/4", "1/2", 1, 2, 4, 8, 16])
            ax.minorticks_off()
            ax.grid(alpha=0.3)
            ax.label_outer()
    for ax in grid[1]:
        ax.set_xlabel("bits of an element")
    for ax in grid[:, 0]:
        ax.set_ylabel("vNMSE")
    figure.legend(found.values(), found, loc="outside lower center", ncols=7)
    figure.savefig(path, dpi=80)


def schedules(codec):
    if codec.low_rank:
        return ["auto"]
    return [name for name in SCHEDULES if not (name == "ring" and codec.sums_grow)]


def parse():
    parser = argparse.ArgumentParser(description="What codecs lose, measured and predicted.")
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
The tables of codecs:

- Errors are vNMSE: |result - exact|^2 / |exact|^2, without feedback. one: the error of one encoding. mean of N: the
  error of compressed_pmean over N ranks, with two_shot, which encodes twice. Bits include the metadata. Those of
  Lossless are the most that it needs; over Tcp, it sends about 27.
- normal, laplace, student (3 degrees of freedom): independent numbers. transformer, ResNet-20: gradients of the models
  of training_speed.py after {STEPS} steps, with a batch per rank, for the leaves that plans compress (of the
  transformer only those of one block). [errors.png](errors.png) draws all of this.
- bits by leaf, as Eden(n): each leaf has Eden of 1 to 6 bits or MaxMin of 7 or 8. L-GreCo chooses them
  (`Plan.adapt(budget="bytes")`) for the least total error, with no more bytes than Eden(n) for all leaves.
- Errors of a mean of gradients are relative to the mean, which is smaller than the ranks' gradients.

The predictions:

- Errors are those of one compressed_pmean, over {SEEDS} sums, or {TAKEN} of gradients.
- normal, laplace, student (3 degrees of freedom): {SIZE:,} independent numbers of each rank, of variance 1, 2 and 3.
- {GRADIENTS}: gradients of the largest layer of a network that learns scikit-learn's digits, after {STEPS} steps.
- 4 x {NODE} ranks: a hierarchy of 4 nodes. The ranks of a node sum uncompressed numbers, and the nodes exchange
  compressed sums by the schedule.
- off: the prediction over the measurement, minus 1. Predictions are made from other random numbers, or from the same
  gradients.
- Errors near 1 and above mean that the result has little to do with the mean. Such sums need feedback.
"""


def main():
    args = parse()
    warnings.simplefilter("ignore")  # about keys that a codec doesn't need
    report = Report(args.command or "make bench-errors", goal=GOAL, codecs=[], published=[], rows=[])
    compare_codecs(report, args.codecs or "")
    report.show(
        "", "Predictions:", "", *header("codec", "numbers", "ranks", "schedule", "measured", "predicted", "off")
    )
    for kind in (GRADIENTS, "normal", "laplace", "student"):
        for ranks in RANKS:
            found, sums = samples(kind, ranks)
            for codec in PREDICTED:
                if not re.search(args.codecs or "", spell(codec)):
                    continue
                for schedule, node in itertools.product(schedules(codec), (1, NODE) if ranks > NODE else (1,)):
                    exact = measure(codec, schedule, [[x] for x in sums], node)
                    row = dict(
                        codec=spell(codec),
                        numbers=kind,
                        ranks=ranks,
                        node=node,
                        schedule=schedule,
                        measured=exact,
                        predicted=predict(found, codec, schedule, node),
                    )
                    row["off"] = round(row["predicted"] / exact - 1, 4)
                    report.data["rows"].append(row)
                    off = f"{100 * row['off']:+.1f} %" + ("" if abs(row["off"]) <= GOAL else " ✗")
                    report.show(
                        line(
                            [
                                row["codec"],
                                kind,
                                ranks if node == 1 else f"{ranks // node} x {node}",
                                schedule,
                                f"{exact:.3g}",
                                f"{row['predicted']:.3g}",
                                off,
                            ]
                        )
                    )
    summary(report)
    report.show("", *NOTES.splitlines())
    if args.out:
        report.write(args.out, "errors")
        draw(args.out / "errors.png", report.data["codecs"])


def summary(report):
    report.show("", *header("numbers", "sums", "within 10 %", "median off", "largest off"))
    for kind in dict.fromkeys(row["numbers"] for row in report.data["rows"]):
        off = [abs(row["off"]) for row in report.data["rows"] if row["numbers"] == kind]
        within = sum(x <= GOAL for x in off)
        report.show(line([kind, len(off), within, f"{100 * np.median(off):.1f} %", f"{100 * max(off):.1f} %"]))


if __name__ == "__main__":
    main()
