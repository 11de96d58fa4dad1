"""What compression costs in accuracy: plain psum against a few bits, with error feedback and without.

    python benchmarks/training.py [--data REGEX] [--seeds 3] [--devices 8] [--out DIR]

A small network learns digits (scikit-learn carries them) and Fashion-MNIST (Debian's package dataset-fashion-mnist), data-parallel on
virtual CPU devices. All runs of a seed begin with the same weights and see the same batches.
"""
import argparse
import gzip
import pathlib
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType

import jaxcgx as cgx
from report import RESULTS, Report, header, line, mark

FASHION = pathlib.Path("/usr/share/datasets/fashion-mnist")
HIDDEN = 256, 128
BATCH = 256

LEAST = 1.0  # points of accuracy that few bits without feedback lose where they matter
# name: the plan, whether there is feedback, and the points of accuracy that it may lose at most; None: it loses more than LEAST
RUNS = {
    "float32": (cgx.Raw(), False, 0.0),
    "4 bits, stochastic, feedback": (cgx.MaxMin(4, rounding="stochastic"), True, 0.3),
    "2 bits, feedback": (cgx.MaxMin(2), True, 1.0),
    "2 bits, no feedback": (cgx.MaxMin(2), False, None),
}


def digits():
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    data = load_digits()
    images, test_images, labels, test_labels = train_test_split(data.data / 16, data.target, test_size=0.25, random_state=0, stratify=data.target)
    return (images, labels), (test_images, test_labels)


def fashion_mnist():
    def read(name):
        with gzip.open(FASHION / name) as file:
            raw = file.read()
        dimensions = raw[3]
        return np.frombuffer(raw, np.uint8, offset=4 + 4 * dimensions)

    return tuple((read(f"{part}-images-idx3-ubyte.gz").reshape(-1, 784) / 255, read(f"{part}-labels-idx1-ubyte.gz")) for part in ("train", "t10k"))


# name: the data, epochs, learning rate, and whether they tell feedback from none
DATA = {"digits": (digits, 40, 0.1, False), "Fashion-MNIST": (fashion_mnist, 10, 0.1, True)}


def init_params(seed, inputs):
    sizes = inputs, *HIDDEN, 10
    keys = jax.random.split(jax.random.key(seed), len(sizes) - 1)
    return [dict(w=jax.random.normal(k, (m, n)) * (2 / m) ** 0.5, b=jnp.zeros(n)) for k, m, n in zip(keys, sizes, sizes[1:])]


def predict(params, images):
    for layer in params[:-1]:
        images = jax.nn.relu(images @ layer["w"] + layer["b"])
    return images @ params[-1]["w"] + params[-1]["b"]


def loss_fn(params, batch):
    images, labels = batch
    return optax.softmax_cross_entropy_with_integer_labels(predict(params, images), labels).mean()


def train(data, epochs, rate, plan, feedback, seed, mesh):
    """The test accuracy in percent, and bytes a rank sends in a step."""
    (images, labels), (test_images, test_labels) = data
    each = len(images) // BATCH
    optimizer = optax.sgd(optax.cosine_decay_schedule(rate, epochs * each), momentum=0.9)
    training = cgx.make_train_step(loss_fn, optimizer, mesh, plan=plan, feedback=feedback, seed=seed)
    params, state = training.init(init_params(seed, images.shape[1]))
    rng, sent = np.random.default_rng(seed), None
    for _ in range(epochs):
        order = rng.permutation(len(images))[: each * BATCH].reshape(each, BATCH)
        for chosen in order:
            batch = images[chosen], labels[chosen]
            if sent is None:
                sent = cgx.explain(training.step, params, state, batch, show=False).bytes
            params, state, _ = jax.block_until_ready(training.step(params, state, batch))
    return 100 * float((predict(params, test_images).argmax(-1) == test_labels).mean()), sent


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", default="", help="a regular expression: only these data sets")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--out", type=pathlib.Path, default=RESULTS)
    args = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", args.devices)
    mesh = jax.make_mesh((args.devices,), ("data",), axis_types=(AxisType.Auto,))
    report = Report("make bench-training", seeds=args.seeds, devices=args.devices, hidden=HIDDEN, batch=BATCH, rows=[])
    for name, (load, epochs, rate, tells) in DATA.items():
        if not re.search(args.data, name):
            continue
        if load is fashion_mnist and not FASHION.is_dir():
            report.show("", f"{name}: not there ({FASHION}; Debian and Ubuntu have it as the package dataset-fashion-mnist).")
            continue
        data = [(images.astype(np.float32), labels.astype(np.int32)) for images, labels in load()]
        report.show("", f"{name}: {len(data[0][0]):,} images, {epochs} epochs, batches of {BATCH} over {args.devices} devices, SGD with momentum 0.9 and a "
                    f"cosine from {rate:g}. Test accuracy in %.", "",
                    *header("gradients", *(f"seed {seed}" for seed in range(args.seeds)), "mean", "lost", "goal", "", "bytes/step"))
        plain = None
        for run, (plan, feedback, most) in RUNS.items():
            accuracies, sent = zip(*(train(data, epochs, rate, plan, feedback, seed, mesh) for seed in range(args.seeds)))
            mean = float(np.mean(accuracies))
            plain = mean if plain is None else plain
            lost = plain - mean
            report.data["rows"].append(dict(data=name, run=run, plan=repr(plan), feedback=feedback, accuracies=accuracies, lost=lost, bytes=sent[0]))
            goal, reached = "", ""
            if most is None and tells:
                goal, reached = f"> {LEAST:g}", mark(lost > LEAST)
            elif most:
                goal, reached = f"<= {most:g}", mark(lost <= most)
            report.show(line([run, *(f"{a:.2f}" for a in accuracies), f"{mean:.2f}", f"{lost:.2f}", goal, reached, f"{sent[0]:,}"]))
    report.show("", "- lost: points of accuracy against float32, of the means. Without feedback the same two bits show what feedback is for; digits don't "
                "tell them apart.",
                "- bytes/step: that a rank sends, by all collectives of the compiled step, as jaxcgx.explain finds them.")
    report.write(args.out, "training")


if __name__ == "__main__":
    sys.exit(main())
