"""Measures the accuracy that few bits or few elements cost against a plain psum, with feedback and without.

    python benchmarks/training.py [--tables REGEX] [--data REGEX] [--seeds 3] [--devices 8] [--out DIR]

A small network learns digits (from scikit-learn) and Fashion-MNIST (Debian's package dataset-fashion-mnist),
data-parallel on virtual CPU devices. All runs of a seed start with the same weights and see the same batches.
"""

import argparse
import functools
import pathlib
import re
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType
from report import RESULTS, Report, header, line, mark
from training_speed_data import FASHION, digits, fashion_mnist

import jaxcgx as cgx

HIDDEN = 256, 128
LEAST = 1.0  # the least points of accuracy that few bits without feedback lose, on data that shows the effect
CHARTS = [dict(table="rows", title="Accuracy in percent", x="run", y=["accuracies"], panel="data")]
WARM = 0.4  # the part of the epochs in which DGC's ratio decreases
MOMENTUM = functools.partial(optax.sgd, momentum=0.9)
RAW = functools.partial(cgx.Feedback, cgx.Raw(), keep=False)


class Run(NamedTuple):
    optimizer: Any
    exchange: Callable  # options -> an exchange
    most: float | None = 0.0  # the most points of accuracy that it may lose; None: it must lose more than LEAST
    against: str = "float32"
    rate: float = 0.1  # the first value of the cosine
    warm: bool = False  # whether the run has a warm-up


class Table(NamedTuple):
    data: tuple
    batch: int
    runs: dict
    notes: str


TABLES = {
    "training": Table(
        ("digits", "Fashion-MNIST"),
        256,
        {
            "float32": Run(MOMENTUM, RAW),
            "4 bits, stochastic, feedback": Run(
                MOMENTUM, functools.partial(cgx.Feedback, cgx.MaxMin(4, rounding="stochastic")), 0.3
            ),
            "2 bits, feedback": Run(MOMENTUM, functools.partial(cgx.Feedback, cgx.MaxMin(2)), 1.0),
            "2 bits, no feedback": Run(MOMENTUM, functools.partial(cgx.Feedback, cgx.MaxMin(2), keep=False), None),
        },
        "- lost: points of accuracy against float32, of the means. The row of 2 bits without feedback shows the effect "
        "of feedback. Digits don't show it.",
    ),
    # An element is sent rarely, so training needs more steps and smaller batches. Digits has too few examples for this.
    "training-sparse": Table(
        ("Fashion-MNIST",),
        64,
        {
            "float32": Run(MOMENTUM, RAW, rate=0.05),
            "DGC, 0.1 %": Run(optax.sgd, functools.partial(cgx.DGC, 0.001), 0.5, rate=0.05, warm=True),
            "float32, Adam": Run(optax.adam, RAW, against="float32, Adam", rate=1e-3),
            "BSC, 1 %, Adam": Run(
                functools.partial(optax.adam, b1=0.0),
                functools.partial(cgx.BSC, 0.01, 10_000, select="exact"),
                0.5,
                "float32, Adam",
                rate=1e-3,
            ),
        },
        "- lost: points of accuracy against float32 with the same optimizer, of the means.\n"
        "- DGC has its own momentum, and SGD after it has none. In the first "
        f"{WARM:.0%} of the epochs its ratio decreases to 0.1 %. Bytes are those after them.\n"
        "- BSC has its own momentum, too, and Adam after it has none (b1=0). BSC takes weights of more than 10,000 "
        "elements. The others, and biases, travel raw.",
    ),
}


# {name: (data, epochs, whether the accuracy shows a difference between feedback and no feedback)}
DATA = {"digits": (digits, 40, False), "Fashion-MNIST": (fashion_mnist, 10, True)}


def init_params(seed, inputs):
    sizes = inputs, *HIDDEN, 10
    keys = jax.random.split(jax.random.key(seed), len(sizes) - 1)
    return [
        dict(w=jax.random.normal(k, (m, n)) * (2 / m) ** 0.5, b=jnp.zeros(n)) for k, m, n in zip(keys, sizes, sizes[1:])
    ]


def predict(params, images):
    for layer in params[:-1]:
        images = jax.nn.relu(images @ layer["w"] + layer["b"])
    return images @ params[-1]["w"] + params[-1]["b"]


def loss_fn(params, batch):
    images, labels = batch
    return optax.softmax_cross_entropy_with_integer_labels(predict(params, images), labels).mean()


def train(data, epochs, batch_size, run, seed, mesh):
    """Returns the test accuracy in percent, and the bytes that a rank sends in a step after any warm-up."""
    (images, labels), (test_images, test_labels) = data
    each = len(images) // batch_size
    optimizer = run.optimizer(optax.cosine_decay_schedule(run.rate, epochs * each))
    make = lambda **options: cgx.make_train_step(loss_fn, optimizer, mesh, run.exchange(seed=seed, **options))
    training = make(warm_up=cgx.WarmUp(int(WARM * epochs), each)) if run.warm else make()
    state = training.init(init_params(seed, images.shape[1]))
    rng, sent = np.random.default_rng(seed), None
    for _ in range(epochs):
        order = rng.permutation(len(images))[: each * batch_size].reshape(each, batch_size)
        for chosen in order:
            batch = images[chosen], labels[chosen]
            if sent is None:
                sent = cgx.explain(make().step, state, batch, show=False).bytes
            state, _ = jax.block_until_ready(training.step(state, batch))
    return 100 * float((predict(state.params, test_images).argmax(-1) == test_labels).mean()), sent


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tables", default="", help="a regular expression: only matching ones of " + ", ".join(TABLES))
    parser.add_argument("--data", default="", help="a regular expression: only matching data sets")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--out", type=pathlib.Path, default=RESULTS)
    args = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", args.devices)
    mesh = jax.make_mesh((args.devices,), ("data",), axis_types=(AxisType.Auto,))
    for name, table in TABLES.items():
        if re.search(args.tables, name):
            measure(name, table, args, mesh)


def measure(called, table, args, mesh):
    report = Report(
        "make bench-training",
        seeds=args.seeds,
        devices=args.devices,
        hidden=HIDDEN,
        batch=table.batch,
        rows=[],
        charts=CHARTS,
    )
    for name in table.data:
        load, epochs, tells = DATA[name]
        if not re.search(args.data, name):
            continue
        if load is fashion_mnist and not FASHION.is_dir():
            report.show(
                "", f"{name}: not found in {FASHION} (Debian and Ubuntu have it as the package dataset-fashion-mnist)."
            )
            continue
        data = [(images.astype(np.float32), labels.astype(np.int32)) for images, labels in load()]
        report.show(
            "",
            f"{name}: {len(data[0][0]):,} images, {epochs} epochs, batches of {table.batch} over {args.devices} "
            "devices, SGD with momentum 0.9 or Adam, with a rate that follows a cosine. Test accuracy in %.",
            "",
            *header(
                "gradients",
                "rate",
                *(f"seed {seed}" for seed in range(args.seeds)),
                "mean",
                "lost",
                "goal",
                "",
                "bytes/step",
            ),
        )
        means = {}
        for title, run in table.runs.items():
            accuracies, sent = zip(*(train(data, epochs, table.batch, run, seed, mesh) for seed in range(args.seeds)))
            means[title] = float(np.mean(accuracies))
            lost, most = means[run.against] - means[title], run.most
            report.data["rows"].append(
                dict(
                    data=name,
                    run=title,
                    exchange=repr(run.exchange()),
                    rate=run.rate,
                    accuracies=accuracies,
                    lost=lost,
                    bytes=sent[0],
                )
            )
            goal, reached = "", ""
            if most is None and tells:
                goal, reached = f"> {LEAST:g}", mark(lost > LEAST)
            elif most:
                goal, reached = f"<= {most:g}", mark(lost <= most)
            report.show(
                line(
                    [
                        title,
                        f"{run.rate:g}",
                        *(f"{a:.2f}" for a in accuracies),
                        f"{means[title]:.2f}",
                        f"{lost:.2f}",
                        goal,
                        reached,
                        f"{sent[0]:,}",
                    ]
                )
            )
    report.show(
        "",
        table.notes,
        "- bytes/step: what a rank sends in all collectives of the compiled step, as jaxcgx.explain finds them.",
    )
    report.write(args.out, called)


if __name__ == "__main__":
    sys.exit(main())
