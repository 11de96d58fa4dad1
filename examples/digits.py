"""Trains with plain and with compressed gradients, data-parallel, side by side.

A small network learns to read handwritten digits (scikit-learn has 1797 of them, 8x8 pixels) on a few virtual CPU
devices. It is trained twice, from the same weights and on the same batches. In one run the devices average their
gradients in float32, in the other they exchange a few bits per element. The script shows a progress bar, a table and a
plot.

    pip install ".[examples]"
    python examples/digits.py [--bits 4] [--devices 4] [--steps 400] [--plot digits.png]
"""

import argparse
import pathlib
import statistics
import time

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import optax
from jax.sharding import AxisType
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from tqdm import tqdm

import jaxcgx as cgx

SIZES = 64, 256, 64, 10  # pixels, two hidden layers, digits
BATCH_PER_DEVICE = 32
EVALUATE_EVERY = 10  # steps
SEED = 0


def init_params():
    keys = jax.random.split(jax.random.key(SEED), len(SIZES) - 1)
    return [
        dict(w=jax.random.normal(k, (m, n)) * (2 / m) ** 0.5, b=jnp.zeros(n)) for k, m, n in zip(keys, SIZES, SIZES[1:])
    ]


def predict(params, images):
    for layer in params[:-1]:
        images = jax.nn.relu(images @ layer["w"] + layer["b"])
    return images @ params[-1]["w"] + params[-1]["b"]


def loss_fn(params, batch):
    images, labels = batch
    return optax.softmax_cross_entropy_with_integer_labels(predict(params, images), labels).mean()


def largest_difference(params):
    """The largest difference between any two devices' copies of the parameters."""
    copies = [np.stack([shard.data for shard in leaf.addressable_shards]) for leaf in jax.tree.leaves(params)]
    return max(float(np.ptp(c, axis=0).max()) for c in copies)


def train(plans, optimizer, mesh, num_steps):
    """Trains with each of `plans` ({name: plan}) and returns for each the curves, times and parameters."""
    digits = load_digits()
    images, test_images, labels, test_labels = train_test_split(
        digits.data.astype(np.float32) / 16, digits.target, test_size=0.25, random_state=SEED, stratify=digits.target
    )
    accuracy = jax.jit(lambda params: (predict(params, test_images).argmax(-1) == test_labels).mean())
    runs = {}
    for name, plan in plans.items():
        training = cgx.make_train_step(loss_fn, optimizer, mesh, plan=plan)
        params, state = training.init(init_params())
        runs[name] = dict(step=training.step, params=params, state=state, losses=[], accuracies=[], times=[])
    rng = np.random.default_rng(SEED)
    bar = tqdm(range(num_steps), unit="step")
    for number in bar:
        chosen = rng.choice(len(images), mesh.size * BATCH_PER_DEVICE, replace=False)
        batch = images[chosen], labels[chosen]
        for run in runs.values():  # in turns, so that both get the same batches and the same load of the machine
            if number == 0:
                run["sent"] = cgx.explain(run["step"], run["params"], run["state"], batch, show=False).bytes
            start = time.perf_counter()
            run["params"], run["state"], metrics = jax.block_until_ready(
                run["step"](run["params"], run["state"], batch)
            )
            run["times"].append(time.perf_counter() - start)
            run["losses"].append(float(metrics.loss))
            if (number + 1) % EVALUATE_EVERY == 0 or number + 1 == num_steps:
                run["accuracies"].append((number + 1, float(accuracy(run["params"]))))
        bar.set_postfix({f"loss {name}": f"{run['losses'][-1]:.3f}" for name, run in runs.items()}, refresh=False)
    return runs


def plot(runs, title, path):
    matplotlib.use("Agg")  # draws into files, and needs no screen
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    # A wide pale line below a thin dark one: both are visible where they agree.
    for (name, run), style in zip(runs.items(), [dict(color="#f5a962", lw=5), dict(color="#1f4e8c", lw=1.5)]):
        window = min(EVALUATE_EVERY, len(run["losses"]))
        smooth = np.convolve(run["losses"], np.ones(window) / window, "valid")
        left.plot(np.arange(window, len(run["losses"]) + 1), smooth, label=name, **style)
        right.plot(
            *np.transpose(run["accuracies"]) * [[1], [100]], label=f"{name}: {run['accuracies'][-1][1]:.1%}", **style
        )
    left.set(yscale="log", xlabel="step", ylabel=f"training loss, mean of {window} steps")
    right.set(xlabel="step", ylabel="test accuracy in %")
    for axes in left, right:
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(title="gradients", frameon=False)
    figure.suptitle(title)
    figure.savefig(path, dpi=150)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--bits", type=int, default=4, choices=range(1, 9), help="bits of a compressed gradient element"
    )
    parser.add_argument("--devices", type=int, default=4, help="virtual CPU devices, 2 to 32")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--plot", type=pathlib.Path, default="digits.png", metavar="PATH")
    args = parser.parse_args()
    if not 2 <= args.devices <= 32 or args.steps < 1:
        parser.error("expected 2 to 32 devices and at least 1 step")
    if not args.plot.resolve().parent.is_dir():
        parser.error(f"--plot: there is no folder {args.plot.resolve().parent}")
    jax.config.update("jax_platforms", "cpu")
    cgx.keep_pages()
    jax.config.update("jax_num_cpu_devices", args.devices)

    codec = cgx.MaxMin(bits=args.bits)  # error feedback sends in the next step what it loses
    optimizer = optax.sgd(0.05, momentum=0.9)
    mesh = jax.make_mesh((args.devices,), ("data",), axis_types=(AxisType.Auto,))
    compressed = f"{args.bits}-bit"
    runs = train({"float32": cgx.Raw(), compressed: codec}, optimizer, mesh, args.steps)

    size, n = sum(leaf.size for leaf in jax.tree.leaves(runs["float32"]["params"])), args.devices
    print(f"\n{size:,} parameters, {n} devices, {args.steps} steps, {codec}\n")
    row = "{:<10}{:>15}{:>26}{:>14}{:>21}".format
    print(row("gradients", "test accuracy", "sent per rank and step", "median step", "replicas differ by"))
    for name, run in runs.items():
        print(
            row(
                name,
                f"{run['accuracies'][-1][1]:.1%}",
                f"{run['sent']:,} bytes",
                f"{1e3 * statistics.median(run['times']):.2f} ms",
                f"{largest_difference(run['params']):g}",
            )
        )
    print(
        "\nSent: the bytes of every collective of the compiled step, as jaxcgx.explain finds them.\n"
        "Between devices of one process the bytes cross memory, not a network. So the step time shows the cost of\n"
        "encoding and decoding, and none of the gain."
    )
    sent = {name: f"{run['sent']:,}" for name, run in runs.items()}
    plot(runs, f"Each of {n} devices sends {sent[compressed]} bytes per step instead of {sent['float32']}", args.plot)
    print(f"\nThe curves are in {args.plot.resolve()}")


if __name__ == "__main__":
    main()
