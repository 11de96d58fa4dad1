"""Measures what it is worth that DGT ranks blocks: losses with ranked and with random blocks, over several seeds.

    python benchmarks/differential.py [--runs REGEX] [--seeds 5] [--out DIR]

The ranks are virtual devices, because losses don't depend on the transport. Rows that the same command has already
written to the result file are not measured again, so a run that was interrupted continues. Remove the file to measure
all of them. Bytes are counted again each time, because they need no training.
"""

import argparse
import pathlib
import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import training_speed_data as data
from jax.sharding import AxisType
from report import RESULTS, Growing, header, line, mark
from training_speed_models import make_loss

import jaxcgx as cgx

SHAPE = 2, 2  # centers, ranks in each
AXES = "dc", "local"
MODEL = "transformer"
SETTING = data.MODELS[MODEL]
K = 0.5
STEPS = 80  # of a run
EVALUATE = 20  # steps from one measurement of the loss to the next
PLAN = {"dc": cgx.Raw(), "local": cgx.Raw()}
DENSE = "float32"


class Run(NamedTuple):
    """A treatment of the blocks that are not important."""

    rest: str
    ranked: bool
    feedback: bool = True

    def options(self):
        return dict(compress=cgx.wan.Differential(k=K, rest=self.rest, ranked=self.ranked), feedback=self.feedback)


RUNS = {
    "defer": Run("defer", True),
    "defer, random": Run("defer", False),
    "quantize": Run("quantize", True),
    "quantize, random": Run("quantize", False),
    "drop": Run("drop", True),
    "drop, random": Run("drop", False),
    "lost by the sender": Run("drop", True, feedback=False),
    "lost by the sender, random": Run("drop", False, feedback=False),
}
CHARTS = [dict(table="curves", title="Loss by step", x="steps", y=["loss"], by="run", panel="seed")]
NOTES = f"""\
- A byte-level transformer of 3.3 million parameters in {SHAPE[0]} centers of {SHAPE[1]} ranks, with
  {SETTING.batch} windows per rank and step, and Adam. All runs of a seed begin with the same weights, which
  {SETTING.begun} steps without compression made, and see the same batches. loss: on held-out text.
- DGT with K = {K} between the centers, float32 in them. "random" chooses as many blocks at random. The runs of a pair
  send equally many bytes. "lost by the sender": the other blocks are dropped without feedback.
- MB/step: what a rank sends in each step after the first, which sends all blocks at once.
- below: the loss with random blocks minus the loss with ranked blocks, of the same seed: the mean over seeds, and its
  standard error. Goal: above 0 by two standard errors.
"""


def make_train(options):
    mesh = jax.make_mesh(SHAPE, AXES, axis_types=(AxisType.Auto,) * 2)
    optimizer = optax.adam(SETTING.rate)
    return cgx.make_train_step(make_loss(MODEL), optimizer, mesh, data_axis=AXES, plan=PLAN, **options)


def explained(options):
    """Returns what `explain` reports of a step."""
    make_weights, make_batches = data.MAKERS[MODEL]
    rng, train = np.random.default_rng(0), make_train(options)
    state = train.init(make_weights(rng))
    batches, _ = make_batches(rng, (1, int(np.prod(SHAPE)) * SETTING.batch), data.HELD_OUT[MODEL])
    return cgx.explain(train.step, *state, tuple(jnp.asarray(part[0]) for part in batches), show=False)


def count():
    """Returns {run: the bytes that a rank sends in a step after the first}.

    Every program has a branch that exchanges the other blocks in the first step. It is the same with every `rest`. With
    "drop", there is no other branch with exchanges.
    """
    pairs = {name: explained(run.options()) for name, run in RUNS.items() if run.ranked and run.feedback}
    first = sum(c.bytes * c.times for c in pairs["drop"].collectives if c.branch)
    ranked = {run.rest: pairs[name].bytes - first for name, run in RUNS.items() if name in pairs}
    return {DENSE: explained({}).bytes, **{name: ranked[run.rest] for name, run in RUNS.items()}}


def curve(options, seed):
    """Returns [(steps, loss)] of a run."""
    make_weights, make_batches = data.MAKERS[MODEL]
    rng = np.random.default_rng(seed)
    weights = data.begun(make_weights(rng), MODEL, make_batches(rng, (SETTING.begun, 2 * SETTING.batch), 1)[0])
    batches, held_out = make_batches(rng, (STEPS, int(np.prod(SHAPE)) * SETTING.batch), data.HELD_OUT[MODEL])
    train = make_train(options)
    state, evaluate, found = train.init(weights), jax.jit(make_loss(MODEL)), []
    for step in range(STEPS):
        batch = tuple(jnp.asarray(part[step]) for part in batches)
        *state, _ = jax.block_until_ready(train.step(*state, batch))
        if (step + 1) % EVALUATE == 0:
            found.append((step + 1, round(float(evaluate(state[0], held_out)), 4)))
    return found


def measure(report, args):
    """Trains the runs that are missing in the report."""
    for seed in range(args.seeds):
        for name, options in {DENSE: {}, **{name: run.options() for name, run in RUNS.items()}}.items():
            if re.search(args.runs, name) and not report.has("rows", run=name, seed=seed):
                found = curve(options, seed)
                report.data["curves"] += [dict(run=name, seed=seed, steps=step, loss=loss) for step, loss in found]
                report.add("rows", dict(run=name, seed=seed, loss=found[-1][1]))


def show(report):
    rows = {(row["run"], row["seed"]): row for row in report.data["rows"]}
    sent = {row["run"]: row["sent_bytes"] for row in report.data["bytes"]}
    losses = lambda name: {seed: row["loss"] for (run, seed), row in rows.items() if run == name}
    report.show("", *header("run", "loss", "of seeds", "MB/step", "below", "error", "goal"))
    for name in (DENSE, *RUNS):
        mine, chance = losses(name), losses(f"{name}, random")
        if not mine:
            continue
        cells = [name, f"{np.mean([*mine.values()]):.3f}", " ".join(f"{x:.3f}" for x in mine.values())]
        cells.append(f"{sent[name] / 1e6:.3f}")
        below = [chance[seed] - mine[seed] for seed in mine if seed in chance]
        if len(below) > 1:
            mean, error = np.mean(below), np.std(below, ddof=1) / len(below) ** 0.5
            cells += [f"{mean:+.4f}", f"{error:.4f}", mark(mean > 2 * error)]
        report.show(line([*cells, *[""] * (7 - len(cells))]))
    report.show("", *NOTES.splitlines())


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", default="", metavar="REGEX", help="only matching runs")
    parser.add_argument("--seeds", type=int, default=5, metavar="N", help="number of seeds (default: 5)")
    parser.add_argument("--out", type=pathlib.Path, default=RESULTS, metavar="DIR", help="the folder of the results")
    args = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", int(np.prod(SHAPE)))
    report = Growing("make bench-differential", args.out / "differential.json", ["rows", "curves"], charts=CHARTS)
    measure(report, args)
    report.data["bytes"] = [dict(run=name, sent_bytes=sent) for name, sent in count().items()]
    show(report)
    report.write(args.out, "differential")


if __name__ == "__main__":
    main()
