"""The common code of the wide-area demonstrations: two data centers, a network to train, a table and a plot.

A demonstration is a dict of functions, each of which makes a training step. `demonstrate` starts two hosts, each behind
a link with a limited rate (`python -m jaxcgx lab`). Each host is a data center with two ranks. The ranks train a small
convolutional network with one technique after the other, from the same weights and on the same batches of handwritten
digits.
"""

import argparse
import itertools
import os
import pathlib
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from sklearn.datasets import load_digits
from tqdm import tqdm

import jaxcgx as cgx
from jaxcgx.lab import why_not

CENTERS, LOCAL = 2, 2  # data centers, ranks in each
AXES = "dc", "local"
RAW = cgx.Plan({"dc": cgx.Raw(), "local": cgx.Raw()})
SIDE = 8  # pixels
CHANNELS = 1, 16, 32  # of the image and of two layers of convolutions, each of which halves the sides
# Pixels and channels, two hidden layers, digits: 1,196,746 parameters with the convolutions.
SIZES = 128, 1024, 1024, 10
EVALUATE_EVERY = 10  # steps
PORT = 23456
SEED = 0


def init_params():
    convolutions = [(3, 3, m, n) for m, n in itertools.pairwise(CHANNELS)]
    shapes = [*convolutions, *itertools.pairwise(SIZES)]
    keys = jax.random.split(jax.random.key(SEED), len(shapes))
    scale = lambda shape: (2 / np.prod(shape[:-1])) ** 0.5
    return [dict(w=jax.random.normal(k, s) * scale(s), b=jnp.zeros(s[-1])) for k, s in zip(keys, shapes)]


def loss_fn(params, batch):
    x, labels = batch
    x = x.reshape(-1, SIDE, SIDE, CHANNELS[0])
    for layer in params[:-1]:
        if layer["w"].ndim == 4:
            x = jax.lax.conv_general_dilated(x, layer["w"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
            x = jax.nn.relu(x + layer["b"])
            x = x.reshape(-1, x.shape[1] // 2, 2, x.shape[2] // 2, 2, x.shape[3]).max((2, 4))
        else:
            x = jax.nn.relu(x.reshape(-1, len(layer["w"])) @ layer["w"] + layer["b"])
    logits = x @ params[-1]["w"] + params[-1]["b"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def batches(images, labels, size):
    """Yields the batches of one shuffled epoch after another."""
    rng = np.random.default_rng(SEED)
    while True:
        order = rng.permutation(len(images))
        for chosen in np.split(order[: len(order) // size * size], len(order) // size):
            yield images[chosen], labels[chosen]


def bytes_sent():
    """Returns the bytes that this host has sent over its link, from the counters of its kernel."""
    lines = [line.split(":") for line in pathlib.Path("/proc/net/dev").read_text().splitlines()[2:]]
    return sum(int(counts.split()[8]) for name, counts in lines if name.strip() != "lo")


def train(name, make, mesh, sharding, args):
    """Trains with one technique. Returns {"seconds": [...], "loss": [...], "bytes": ...}.

    The seconds of training and the loss are lists with an element every few steps. The bytes are the bytes that this
    host sends in a step.
    """
    digits = load_digits()
    images, labels = (digits.data / 16).astype(np.float32), digits.target.astype(np.int32)
    evaluate = jax.jit(lambda params: loss_fn(params, (images, labels)))
    size, placed = args.bs * mesh.size, NamedSharding(mesh, P(AXES))
    steps = args.epoch * (len(images) // size)
    training = make(mesh, sharding, args)
    state = training.init(init_params())
    found = dict(seconds=[], loss=[], bytes=0)
    elapsed, first = 0.0, 0
    # Two steps compile, and are not measured: the first step, and the first that receives an earlier step's data.
    numbers = tqdm(range(-1, steps + 1), desc=name, unit="step", disable=jax.process_index() > 0)
    for number, arrays in zip(numbers, batches(images, labels, size)):
        batch = [jax.make_array_from_callback(x.shape, placed, lambda place, x=x: x[place]) for x in arrays]
        start = time.perf_counter()
        state, _ = training.step(state, tuple(batch))
        evaluated = number % EVALUATE_EVERY == 0 or number == steps
        if evaluated:
            state = training.finish(state)
        jax.block_until_ready(state)
        if number <= 0:
            first = bytes_sent()
            continue
        elapsed += time.perf_counter() - start
        if evaluated:
            found["seconds"].append(elapsed)
            found["loss"].append(float(evaluate(state.params)))
    found["bytes"] = (bytes_sent() - first) / steps
    found["step"] = elapsed / steps
    return found


def show(runs, local):
    if local:  # there is no link to measure
        print(*(f"{name:<28}loss at end {run['loss'][-1]:.4f}" for name, run in runs.items()), sep="\n")
        return
    row = "{:<28}{:>14}{:>12}{:>14}".format
    print(row("\ntechnique", "MB per step", "s per step", "loss at end"))
    for name, run in runs.items():
        print(row(name, f"{run['bytes'] / 1e6:.2f}", f"{run['step']:.3f}", f"{run['loss'][-1]:.4f}"))
    print("\nMB per step: what a data center sends over its link, as its kernel counts it.")


def plot(runs, title, path):
    import matplotlib

    matplotlib.use("Agg")  # writes files and needs no display
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    for name, run in runs.items():
        axes.plot(run["seconds"], run["loss"], label=name)
    axes.set(yscale="log", xlabel="seconds", ylabel="loss", title=title)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)


def run(techniques, axes, args):
    """Trains with every technique on all devices. Process 0 prints the table and writes the plot."""
    if args.gpu and jax.default_backend() == "cpu" and jax.config.jax_platforms != "cpu":
        sys.exit("--gpu: JAX finds no GPU: see docs/install.md, or leave out --gpu")
    if jax.device_count() < CENTERS * LOCAL:
        sys.exit(
            f"--local --gpu: expected {CENTERS * LOCAL} GPUs, got {jax.device_count()}; leave out --local or --gpu"
        )
    cgx.keep_pages()
    mesh = jax.make_mesh((CENTERS, LOCAL), AXES, axis_types=(AxisType.Auto,) * 2)
    runs = {name: train(name, make, mesh, cgx.Sharding(axes), args) for name, make in techniques.items()}
    if jax.process_index() == 0:
        show(runs, args.local)
        path = args.out / f"{pathlib.Path(sys.argv[0]).stem}.png"
        plot(runs, f"Two data centers, {'no network' if args.local else args.rate}", path)
        print(f"The curves are in {path.resolve()}", flush=True)


def take_gpu(rank):
    """Leaves one GPU of this machine to this process, if there is any. Several ranks may share a GPU."""
    gpus = [str(i) for i, _ in enumerate(pathlib.Path("/proc/driver/nvidia/gpus").glob("*"))]
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(gpus)).split(",")
    share = 0.8 * len(gpus) / max(len(gpus), CENTERS * LOCAL)
    os.environ |= dict(CUDA_VISIBLE_DEVICES=gpus[rank % len(gpus)], XLA_PYTHON_CLIENT_MEM_FRACTION=f"{share:.2f}")
    if len(gpus) < CENTERS * LOCAL:  # NCCL takes ranks with different NCCL_HOSTID for hosts, which may share a GPU
        os.environ |= dict(NCCL_HOSTID=f"rank{rank}", NCCL_SOCKET_IFNAME="eth0", NCCL_IB_DISABLE="1", NCCL_MAX_CTAS="4")


def demonstrate(doc, techniques, lr=0.02, ratio=None):
    """Parses the command line of a demonstration, and runs the demonstration.

    Args:
      doc: the docstring of the demonstration. Its first line is shown by --help.
      techniques: {name: function (mesh, sharding, args) that returns a TrainStep}. `sharding` has its axes: that of the
        data centers, which may be a `Tcp`, and that of the ranks in a data center. `args` has `lr` and `ratio`.
      lr: the default of --lr.
      ratio: the default of --ratio, the share of the gradient that travels. None: the techniques have no such share.
    """
    parser = argparse.ArgumentParser(description=doc.partition("\n")[0])
    parser.add_argument("--rate", default="100mbit", help="of the link of each data center (default: 100mbit)")
    parser.add_argument("--delay", default="5ms", help="from one data center to the other (default: 5ms)")
    parser.add_argument("--lr", type=float, default=lr, help=f"the learning rate (default: {lr})")
    parser.add_argument("--bs", type=int, default=32, help="examples per rank and step (default: 32)")
    parser.add_argument("--epoch", type=int, default=3, help="how often to train on every image (default: 3)")
    if ratio is not None:
        says = f"the share of a gradient that travels, or travels at once (default: {ratio})"
        parser.add_argument("--ratio", type=float, default=ratio, help=says)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path(), metavar="DIR", help="where the plot goes")
    parser.add_argument(
        "--local", action="store_true", help="four devices of one process in place of hosts; needs no root"
    )
    parser.add_argument("--gpu", action="store_true", help="compute on GPUs; several ranks may share one between hosts")
    parser.add_argument("--host", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--place", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--address", help=argparse.SUPPRESS)
    args = parser.parse_args()
    most = len(load_digits().target) // (CENTERS * LOCAL)
    if args.epoch < 1 or not 1 <= args.bs <= most:
        parser.error(f"--epoch: expected at least 1, got {args.epoch}; --bs: expected 1 to {most}, got {args.bs}")
    try:
        args.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--out: {error}")
    if not args.gpu:
        jax.config.update("jax_platforms", "cpu")
    if args.local:
        jax.config.update("jax_num_cpu_devices", CENTERS * LOCAL)
        run(techniques, AXES, args)
    elif args.host is None:  # the user's command: start this program on every host of a lab
        if why := why_not():
            sys.exit(f"{why}; --local needs no hosts")
        own = [sys.executable, *sys.argv, "--host", "{rank}", "--address", "{address}"]
        lab = [sys.executable, "-m", "jaxcgx", "lab", "--hosts", str(CENTERS), "--rate", args.rate]
        os.execv(sys.executable, [*lab, "--delay", args.delay, "--", *own])
    elif args.place is None:  # a host: start its ranks
        ranks = [subprocess.Popen([sys.executable, *sys.argv, "--place", str(i)]) for i in range(LOCAL)]
        sys.exit(max(abs(rank.wait()) for rank in ranks))
    else:
        jax.config.update("jax_num_cpu_devices", 1)
        rank = LOCAL * args.host + args.place
        if args.gpu:
            take_gpu(rank)
        jax.distributed.initialize(f"{args.address}:{PORT}", CENTERS * LOCAL, rank)
        run(techniques, (cgx.Tcp("dc"), "local"), args)
