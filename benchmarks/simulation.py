"""Draws where each technique is fastest, by the model of `python -m jaxcgx plan`, for 2 to 65,536 ranks.

    python benchmarks/simulation.py [--out DIR]

Nothing is measured here. docs/simulation.md lists the assumptions. prediction.py compares the model with measurements.
"""

import argparse
import dataclasses
import json
import math
import pathlib

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np

import jaxcgx as cgx
from jaxcgx.report.advise import GAIN, Case, step_seconds
from jaxcgx.transports.network import PAYLOAD, Network

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.colors import ListedColormap

OUT = pathlib.Path(__file__).parent.parent / "docs/plots"
MESSAGES = 32  # messages per model
# Assumptions: GPUs of 150 TFLOP/s, 8192 tokens per rank and step, 8 GPUs per node with 1.6 Tbit/s between them, and
# kernels that process float32 at 500 GB/s.
FLOPS, TOKENS, EACH, INSIDE = 150e12, 8192, 8, 1.6e12
KERNELS = dict(encode=500e9, decode=500e9, reduce=1000e9)
LATENCY, WAN_LATENCY = 20e-6, 20e-3
MODELS = {"25M": 25e6, "1B": 1e9, "8B": 8e9}
RATES = np.logspace(7, 12, 41)  # bit/s of a node's link
RANKS = 2 ** np.arange(1, 17)
EVERY = 50  # steps between exchanges, for DiLoCo
TECHNIQUES = {
    "float32": (cgx.Raw(), "psum"),
    "bfloat16": (cgx.Cast(), "two_shot"),
    "8 bits": (cgx.MaxMin(8), "two_shot"),
    "4 bits": (cgx.MaxMin(4), "two_shot"),
    "1 % of elements": (cgx.TopK(0.01, pull="top"), "two_shot"),
    "rank 4": (cgx.PowerSGD(4), "psum"),
}
SAFE = "float32", "bfloat16", "8 bits", "4 bits"  # techniques without feedback
COLORS = ["#9aa0a6", "#c6dbef", "#6baed6", "#08519c", "#fd8d3c", "#a63603"]


def tree(parameters):
    """Returns matrices, each of which is a message."""
    side = round((parameters / MESSAGES) ** 0.5)
    return [jax.ShapeDtypeStruct((side, side), jnp.float32)] * MESSAGES


def compute_of(parameters):
    return 6 * parameters * TOKENS / FLOPS


def case(parameters, ranks, overlap):
    each = min(EACH, int(ranks) // 2)
    return Case(
        tree=tree(parameters),
        nodes=int(ranks) // each,
        each=each,
        compute=compute_of(parameters),
        overlap=overlap,
        fusion_mb=2**-20,
        inner=Network(up=INSIDE * PAYLOAD, mover="duplex", latency=5e-6),
    )


def local_steps(compute, exchange, every, overlap):
    """Returns the seconds of a step if ranks exchange once after `every` local steps, as with DiLoCo.

    With `overlap`, the exchange continues during the next `every` steps.
    """
    computed = every * compute
    return (max(computed, exchange) if overlap else computed + exchange) / every


def slowest(compute, ranks, spread):
    """Returns the time of the slowest rank's computation, for which all other ranks wait.

    It is about the expected maximum of normally distributed times. `spread` is their standard deviation divided by
    their mean.
    """
    return compute * (1 + spread * math.sqrt(2 * math.log(ranks)))


def network(rate, each, latency=LATENCY):
    return Network(up=rate * PAYLOAD / each, latency=latency, mover="duplex", **KERNELS)


def step(found, technique, rate, latency=LATENCY):
    """Returns the seconds of a step."""
    codec, schedule = TECHNIQUES[technique]
    times = found.times(codec, schedule, network=network(rate, found.each, latency))
    return step_seconds(found.compute, times, overlap=found.overlap)


def exchange(found, technique, rate, latency):
    """Returns the seconds of all messages."""
    codec, schedule = TECHNIQUES[technique]
    return sum(time.total for _, time in found.times(codec, schedule, network=network(rate, found.each, latency)))


def grid(parameters, names, overlap):
    """Returns the seconds of a step, float[ranks, rates, names]."""
    found = np.empty((len(RANKS), len(RATES), len(names)))
    for i, ranks in enumerate(RANKS):
        one = case(parameters, ranks, overlap)
        for j, rate in enumerate(RATES):
            found[i, j] = [step(one, name, rate) for name in names]
    return found


def maps(data, names, title, path, overlap):
    """Chooses the most exact technique among those that are at most 5 % slower than the fastest one."""
    figure, axes = plt.subplots(1, len(MODELS), figsize=(12, 4), layout="constrained", sharey=True)
    for ax, (model, parameters) in zip(axes, MODELS.items()):
        seconds = grid(parameters, names, overlap)
        best = (seconds <= seconds.min(-1, keepdims=True) / GAIN).argmax(-1)
        colors = ListedColormap(COLORS[: len(names)])
        ax.pcolormesh(RATES, RANKS, best, cmap=colors, vmin=-0.5, vmax=len(names) - 0.5)
        ax.set(xscale="log", yscale="log", xlabel="link of a node, bit/s", title=f"{model} parameters")
        ax.set_yscale("log", base=2)
        data[f"{path.stem}, {model}"] = {name: round(float((best == k).mean()), 3) for k, name in enumerate(names)}
    axes[0].set_ylabel("ranks, 8 in a node")
    handles = [plt.Rectangle((0, 0), 1, 1, color=color) for color in COLORS[: len(names)]]
    figure.legend(handles, names, loc="outside lower center", ncols=len(names))
    figure.suptitle(title)
    save(figure, path)


def save(figure, path):
    figure.savefig(path, dpi=80, metadata={"Software": None})
    plt.close(figure)


def gains(path):
    """Draws the time of a float32 step over that of a 4-bit step, with and without overlap."""
    figure, axes = plt.subplots(1, 2, figsize=(10, 4), layout="constrained", sharey=True)
    for ax, overlap in zip(axes, (False, True)):
        for model, parameters in MODELS.items():
            one = case(parameters, 64, overlap)
            ratio = [step(one, "float32", rate) / step(one, "4 bits", rate) for rate in RATES]
            ax.plot(RATES, ratio, label=f"{model} parameters")
        ax.axhline(1, color="black", lw=0.5)
        ax.set(xscale="log", xlabel="link of a node, bit/s", title="overlap" if overlap else "no overlap")
    axes[0].set_ylabel("times as fast with 4 bits")
    axes[0].legend()
    figure.suptitle("What 4 bits gain on 64 ranks in 8 nodes")
    save(figure, path)


def wide_area(path):
    """Draws steps with several steps between exchanges, over a wide-area network with one rank per site."""
    figure, axes = plt.subplots(1, 2, figsize=(10, 4), layout="constrained", sharey=True)
    every = 2 ** np.arange(11)
    for ax, ranks in zip(axes, (8, 64)):
        one = dataclasses.replace(case(1e9, ranks, False), nodes=ranks, each=1)
        for name, style in (("float32", "-"), ("4 bits", "--"), ("1 % of elements", ":")):
            for overlap, color in ((False, "#1f4e8c"), (True, "#f5a962")):
                seconds = exchange(one, name, 100e6, WAN_LATENCY)
                found = [local_steps(one.compute, seconds, int(n), overlap) / one.compute for n in every]
                ax.plot(every, found, style, color=color, label=f"{name}, {'delayed' if overlap else 'waiting'}")
        ax.set(xscale="log", yscale="log", xlabel="steps between exchanges", title=f"{ranks} sites")
    axes[0].set_ylabel("time of a step over its computation")
    axes[0].legend(fontsize="small")
    figure.suptitle("1B parameters, sites with 100 Mbit/s and 20 ms")
    save(figure, path)


def stragglers(path):
    """Draws ranks that differ in computation, and one slow link."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for name in SAFE:
        for ax, xs, of in (
            (
                left,
                np.linspace(0, 0.5, 26),
                lambda x, found: (dataclasses.replace(found, compute=slowest(found.compute, 64, x)), 10e9),
            ),
            (right, np.logspace(-2, 0, 25), lambda x, found: (found, 10e9 * x)),
        ):
            found = case(1e9, 64, True)
            ax.plot(xs, [step(changed, name, rate) for changed, rate in (of(x, found) for x in xs)], label=name)
    left.set(xlabel="standard deviation of the ranks' computation / mean", ylabel="seconds of a step")
    right.set(xscale="log", yscale="log", xlabel="rate of the slowest link / 10 Gbit/s")
    left.legend()
    figure.suptitle("1B parameters, 64 ranks, 10 Gbit/s, overlap: stragglers, and one slow link")
    save(figure, path)


def main():
    parser = argparse.ArgumentParser(description="Where each technique wins, by the planner's model.")
    parser.add_argument("--out", type=pathlib.Path, default=OUT, metavar="DIR", help="where the plots go (docs/plots)")
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    data = {}
    maps(data, SAFE, "The shortest step without feedback, no overlap", out / "rounding.png", overlap=False)
    maps(data, SAFE, "The shortest step without feedback, with overlap", out / "rounding-overlap.png", overlap=True)
    names = tuple(TECHNIQUES)
    maps(data, names, "The shortest step with feedback, with overlap", out / "feedback-overlap.png", overlap=True)
    gains(out / "gains.png")
    wide_area(out / "wide-area.png")
    stragglers(out / "stragglers.png")
    (out / "shares.json").write_text(json.dumps(data, indent=1) + "\n")
    print(json.dumps(data, indent=1))


if __name__ == "__main__":
    main()
