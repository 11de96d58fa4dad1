"""Compares training with plain and with compressed gradients over a slow link.

Two processes on this machine learn to read handwritten digits (scikit-learn has 1797 of them, 8x8 pixels). jaxcgx's
connections between the processes are paced: each process sends at most 100 Mbit/s, as over a slow link. The same
network is trained four times, from the same weights and on the same batches: with float32 gradients, with 8 bits per
element (ByteGrad), with 4 bits, and with the largest 1 % of the elements (Deep Gradient Compression). The script prints
its progress and a table, and plots the test accuracy against time.

    pip install ".[examples]"
    python examples/digits.py
"""

import argparse
import itertools
import os
import pathlib
import shutil
import socket
import statistics
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from tqdm import tqdm

import jaxcgx as cgx

PROCESSES = 2
SIZES = 64, 1024, 1024, 10  # pixels, two hidden layers, digits: 1.1 million parameters
BATCH = 64  # examples per process and step
EVALUATE_EVERY = 5  # steps
ENOUGH = 0.95  # the table shows the seconds until this test accuracy
SEED = 0

OPTIMIZER = optax.sgd(0.05, momentum=0.9, nesterov=True)
WAYS = {
    "float32": (OPTIMIZER, cgx.Raw()),
    "ByteGrad": (OPTIMIZER, cgx.ByteGrad()),
    "4 bits": (OPTIMIZER, cgx.MaxMin(4)),
    # DGC applies the momentum, so the optimizer has none.
    "DGC, 1 %": (optax.sgd(0.05), cgx.DGC(0.01, nesterov=True)),
}


def init_params():
    numbers = np.random.default_rng(SEED)  # jax.random would be compiled for each shape, which takes seconds
    return [
        dict(w=jnp.asarray(numbers.normal(0, (2 / m) ** 0.5, (m, n)), jnp.float32), b=jnp.zeros(n))
        for m, n in itertools.pairwise(SIZES)
    ]


def predict(params, images):
    for layer in params[:-1]:
        images = jax.nn.relu(images @ layer["w"] + layer["b"])
    return images @ params[-1]["w"] + params[-1]["b"]


def loss_fn(params, batch):
    images, labels = batch
    return optax.softmax_cross_entropy_with_integer_labels(predict(params, images), labels).mean()


@jax.jit
def evaluate(params, data):
    images, test_images, labels, test_labels = data
    return loss_fn(params, (images, labels)), (predict(params, test_images).argmax(-1) == test_labels).mean()


def train(name, mesh, axis, steps):
    """Trains in one of the WAYS.

    Returns a dict: the "seconds", "losses" and "accuracies" every few steps, the "times" of all steps in seconds, and
    "sent", the bytes that a process sends in a step.
    """
    digits = load_digits()
    data = images, _, labels, _ = train_test_split(
        digits.data.astype(np.float32) / 16, digits.target, test_size=0.25, random_state=SEED, stratify=digits.target
    )
    training = cgx.make_train_step(loss_fn, WAYS[name][0], mesh, WAYS[name][1], sharding=cgx.Sharding(axis))
    state = training.init(init_params())
    found = dict(seconds=[], losses=[], accuracies=[], times=[])
    numbers, mine, sharding = np.random.default_rng(SEED), jax.process_index(), NamedSharding(mesh, P("data"))
    for step in tqdm(range(steps), desc=f"{name:<9}", unit="step", disable=mine > 0):
        chosen = numbers.choice(len(images), (PROCESSES, BATCH), replace=False)[mine]
        batch = tuple(jax.make_array_from_process_local_data(sharding, x[chosen]) for x in (images, labels))
        if step == 0:
            compiled = training.step.lower(state, batch).compile()
            found["sent"] = cgx.explain(compiled, show=False).bytes
        start = time.perf_counter()
        state, _ = jax.block_until_ready(compiled(state, batch))
        found["times"].append(time.perf_counter() - start)
        if (step + 1) % EVALUATE_EVERY == 0 or step + 1 == steps:
            loss, accuracy = evaluate(jax.tree.map(lambda w: w.addressable_data(0), state.params), data)
            found["losses"].append(float(loss))
            found["accuracies"].append(float(accuracy))
            # In the first step, a process may wait for the other one's compiler: the median counts in its place.
            found["seconds"].append(sum(found["times"][1:]) + statistics.median(found["times"]))
    return found


def seconds_to_enough(run):
    """Returns the seconds until the accuracy is ENOUGH, or None."""
    return next((s for s, accuracy in zip(run["seconds"], run["accuracies"]) if accuracy >= ENOUGH), None)


def show(runs, rate):
    enough = f"seconds to {ENOUGH:.0%}"
    row = "{:<10}{:>14}{:>14}{:>10}{:>16}{:>17}".format
    print("\n" + row("gradients", "MB of a step", "ms of a step", "loss", "test accuracy", enough))
    for name, run in runs.items():
        reached = seconds_to_enough(run)
        print(
            row(
                name,
                f"{run['sent'] / 1e6:.3f}",
                f"{1e3 * statistics.median(run['times']):.1f}",
                f"{run['losses'][-1]:.4f}",
                f"{run['accuracies'][-1]:.1%}",
                "not reached" if reached is None else f"{reached:.1f}",
            )
        )
    print(
        f"\nThe connections are paced: each process sends at most {rate}. MB: what a process sends in a step, as\n"
        "jaxcgx.explain finds it in the compiled program."
    )


def plot(runs, rate, path):
    matplotlib.use("Agg")  # writes files and needs no display
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    for name, run in runs.items():
        accuracies = [100 * accuracy for accuracy in run["accuracies"]]
        axes.plot(run["seconds"], accuracies, label=f"{name}: {run['sent'] / 1e6:.2f} MB a step")
    axes.set(xlabel="seconds", ylabel="test accuracy, %", title=f"Two processes, paced to {rate}", xlim=0)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(title="gradients", frameon=False)
    figure.savefig(path, dpi=150)


def run(rank, port, args):
    """Runs one of the processes. Returns what `train` returns for each of the WAYS.

    Process 0, which the user started, prints the table and writes the plot.
    """
    cgx.keep_pages()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 1)
    jax.distributed.initialize(f"127.0.0.1:{port}", PROCESSES, rank)
    mesh = jax.make_mesh((PROCESSES,), ("data",), axis_types=(AxisType.Auto,))
    runs = {name: train(name, mesh, cgx.Tcp("data", pace=args.rate), args.steps) for name in WAYS}
    if rank == 0:
        show(runs, args.rate)
        plot(runs, args.rate, args.plot)
        print(f"The curves are in {args.plot.resolve()}")
        python = "python" if shutil.which("python") == sys.executable else os.path.relpath(sys.executable)
        plan = "plan resnet50 --link 1gbit --world 8 --compute-ms 100"
        print(f"What would your network gain? {python} -m jaxcgx {plan}", flush=True)
    jax.distributed.shutdown()  # waits for the other process
    return runs


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rate", default="100mbit", help="of each process (default: 100mbit)")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--plot", type=pathlib.Path, default="digits.png", metavar="PATH")
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)  # of process 0, for process 1
    args = parser.parse_args()
    if args.port:
        run(1, args.port, args)
        return None
    if args.steps < 1:
        parser.error("expected at least 1 step")
    if not args.plot.resolve().parent.is_dir():
        parser.error(f"--plot: there is no folder {args.plot.resolve().parent}")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    other = subprocess.Popen([sys.executable, *sys.argv, "--port", port])
    try:
        return run(0, port, args)
    finally:  # after an error, it would wait for this process
        other.kill()


if __name__ == "__main__":
    main()
