"""Measures what it is worth that DGT ranks blocks: losses with ranked and with random blocks, over several seeds.

    python benchmarks/differential.py [--tasks REGEX] [--runs REGEX] [--seeds N] [--out DIR]

The ranks are virtual devices, because losses don't depend on the transport. Rows that the same command has already
written to the result file are not measured again, so a run that was interrupted continues. Remove the file to measure
all of them. The bytes of a task are counted again each time, because they need no training.
"""

import argparse
import functools
import itertools
import pathlib
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import training
import training_speed_data as data
from jax.sharding import AxisType
from report import RESULTS, Growing, header, line, mark
from training_speed_models import make_loss

import jaxcgx as cgx

SHAPE = 2, 2  # centers, ranks in each
AXES = "dc", "local"
MODEL = "transformer"
SETTING = data.MODELS[MODEL]
SIZES = 64, 1024, 1024, 10  # of the network for digits: pixels, two hidden layers, classes
K = 0.5
EVALUATE = 20  # steps from one measurement of the loss to the next
PLAN = {"dc": cgx.Raw(), "local": cgx.Raw()}
DENSE = "float32"


class Task(NamedTuple):
    """What the ranks train.

    Attributes:
      tables: the prefix of the names of its tables in the file of results.
      loss: a function of weights and a batch.
      weights: a function of a random generator that returns the first weights.
      batches: a function of a random generator, a shape and a number, which returns batches with examples of this
        shape, and a held-out batch with this number of examples.
      optimizer: the optimizer.
      batch: the number of examples per rank and step.
      held_out: the number of held-out examples.
      steps: the number of steps of a run.
      seeds: the number of seeds.
    """

    tables: str
    loss: Callable[..., Any]
    weights: Callable[..., Any]
    batches: Callable[..., Any]
    optimizer: optax.GradientTransformation
    batch: int
    held_out: int
    steps: int
    seeds: int


def begun(rng):
    make_weights, make_batches = data.MAKERS[MODEL]
    return data.begun(make_weights(rng), MODEL, make_batches(rng, (SETTING.begun, 2 * SETTING.batch), 1)[0])


def layers(rng):
    return [
        dict(w=(rng.standard_normal((m, n)) * (2 / m) ** 0.5).astype(np.float32), b=np.zeros(n, np.float32))
        for m, n in itertools.pairwise(SIZES)
    ]


def digits(rng, shape, held_out):
    """Returns batches of the training images, and some test images."""
    train, test = ((images.astype(np.float32), labels.astype(np.int32)) for images, labels in data.digits())
    chosen = rng.integers(0, len(train[0]), shape)
    return tuple(part[chosen] for part in train), tuple(part[:held_out] for part in test)


TASKS = {
    MODEL: Task(
        tables="",
        loss=make_loss(MODEL),
        weights=begun,
        batches=data.MAKERS[MODEL][1],
        optimizer=optax.adam(SETTING.rate),
        batch=SETTING.batch,
        held_out=data.HELD_OUT[MODEL],
        steps=80,
        seeds=5,
    ),
    "digits": Task(
        tables="digits_",
        loss=training.loss_fn,
        weights=layers,
        batches=digits,
        optimizer=optax.sgd(0.01, momentum=0.9),
        batch=32,
        held_out=450,
        steps=100,
        seeds=12,
    ),
}


class Run(NamedTuple):
    """A treatment of the blocks that are not important."""

    rest: str
    ranked: bool
    feedback: bool = True

    def exchange(self):
        return cgx.wan.Differential(PLAN, K, rest=self.rest, ranked=self.ranked, keep=self.feedback)


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
CHARTS = [
    dict(table=f"{task.tables}curves", title=f"Loss by step: {name}", x="steps", y=["loss"], by="run", panel="seed")
    for name, task in TASKS.items()
]
NOTES = f"""\
- transformer: a byte-level transformer of 3.3 million parameters, with {SETTING.batch} windows per rank and step, and
  Adam. All runs of a seed begin with the same weights, which {SETTING.begun} steps without compression made.
- digits: a network with two hidden layers, {" x ".join(map(str, SIZES))}, on images of 8 x 8 pixels, with
  {TASKS["digits"].batch} images per rank and step, and SGD with a rate of 0.01 and momentum 0.9.
- {SHAPE[0]} centers of {SHAPE[1]} ranks. All runs of a seed begin with the same weights and see the same batches. loss:
  on held-out data, after {TASKS[MODEL].steps} steps of the transformer and {TASKS["digits"].steps} of the digits.
- DGT with K = {K} between the centers, float32 in them. "random" chooses as many blocks at random. The runs of a pair
  send equally many bytes. "lost by the sender": the other blocks are dropped without feedback.
- MB/step: what a rank sends in each step after the first, which sends all blocks at once.
- below: the loss with random blocks minus the loss with ranked blocks, of the same seed: the mean over seeds, and its
  standard error. Goal: above 0 by two standard errors.
"""


@functools.cache  # a step compiles once for all seeds
def make_train(name, run):
    task, mesh = TASKS[name], jax.make_mesh(SHAPE, AXES, axis_types=(AxisType.Auto,) * 2)
    exchange = run.exchange() if run else PLAN
    return cgx.make_train_step(task.loss, task.optimizer, mesh, exchange, sharding=cgx.Sharding(AXES))


def explained(name, run=None):
    """Returns what `explain` reports of a step."""
    task, rng, train = TASKS[name], np.random.default_rng(0), make_train(name, run)
    weights = data.MAKERS[MODEL][0] if name == MODEL else task.weights
    state = train.init(weights(rng))
    batches, _ = task.batches(rng, (1, int(np.prod(SHAPE)) * task.batch), task.held_out)
    return cgx.explain(train.step, state, tuple(jnp.asarray(part[0]) for part in batches), show=False)


def count(name):
    """Returns {run: the bytes that a rank sends in a step after the first}.

    Every program has a branch that exchanges the other blocks in the first step. It is the same with every `rest`. With
    "drop", there is no other branch with exchanges.
    """
    pairs = {run.rest: explained(name, run) for run in RUNS.values() if run.ranked and run.feedback}
    first = sum(c.bytes * c.times for c in pairs["drop"].collectives if c.branch)
    return {DENSE: explained(name).bytes, **{each: pairs[run.rest].bytes - first for each, run in RUNS.items()}}


def curve(name, run, seed):
    """Returns [(steps, loss)] of a run."""
    task, rng = TASKS[name], np.random.default_rng(seed)
    weights = task.weights(rng)
    batches, held_out = task.batches(rng, (task.steps, int(np.prod(SHAPE)) * task.batch), task.held_out)
    train = make_train(name, run)
    state, evaluate, found = train.init(weights), jax.jit(task.loss), []
    for step in range(task.steps):
        batch = tuple(jnp.asarray(part[step]) for part in batches)
        state, _ = jax.block_until_ready(train.step(state, batch))
        if (step + 1) % EVALUATE == 0:
            found.append((step + 1, round(float(evaluate(state.params, held_out)), 4)))
    return found


def measure(report, name, args):
    """Trains the runs of a task that are missing in the report."""
    task = TASKS[name]
    rows, curves = f"{task.tables}rows", f"{task.tables}curves"
    for seed in range(args.seeds or task.seeds):
        for each, run in {DENSE: None, **RUNS}.items():
            if re.search(args.runs, each) and not report.has(rows, run=each, seed=seed):
                found = curve(name, run, seed)
                report.data[curves] += [dict(run=each, seed=seed, steps=step, loss=loss) for step, loss in found]
                report.add(rows, dict(run=each, seed=seed, loss=found[-1][1]))


def show(report, name):
    tables = TASKS[name].tables
    rows = {(row["run"], row["seed"]): row for row in report.data[f"{tables}rows"]}
    sent = {row["run"]: row["sent_bytes"] for row in report.data[f"{tables}bytes"]}
    losses = lambda run: {seed: row["loss"] for (name, seed), row in rows.items() if name == run}
    report.show("", *header(name, "loss", "of seeds", "MB/step", "below", "error", "goal"))
    for run in (DENSE, *RUNS):
        mine, chance = losses(run), losses(f"{run}, random")
        if not mine:
            continue
        cells = [run, f"{np.mean([*mine.values()]):.3f}", " ".join(f"{x:.3f}" for x in mine.values())]
        cells.append(f"{sent[run] / 1e6:.3f}")
        below = [chance[seed] - mine[seed] for seed in mine if seed in chance]
        if len(below) > 1:
            mean, error = np.mean(below), np.std(below, ddof=1) / len(below) ** 0.5
            cells += [f"{mean:+.4f}", f"{error:.4f}", mark(mean > 2 * error)]
        report.show(line([*cells, *[""] * (7 - len(cells))]))


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tasks", default="", metavar="REGEX", help="only matching ones of " + ", ".join(TASKS))
    parser.add_argument("--runs", default="", metavar="REGEX", help="only matching runs")
    parser.add_argument("--seeds", type=int, metavar="N", help="number of seeds (default: the task's)")
    parser.add_argument("--out", type=pathlib.Path, default=RESULTS, metavar="DIR", help="the folder of the results")
    args = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", int(np.prod(SHAPE)))
    tables = [f"{task.tables}{table}" for task in TASKS.values() for table in ("rows", "curves", "bytes")]
    report = Growing("make bench-differential", args.out / "differential.json", tables, charts=CHARTS)
    for name, task in TASKS.items():
        if re.search(args.tasks, name):
            measure(report, name, args)
            report.data[f"{task.tables}bytes"] = [dict(run=run, sent_bytes=n) for run, n in count(name).items()]
        if report.data[f"{task.tables}rows"]:
            show(report, name)
    report.show("", *NOTES.splitlines())
    report.write(args.out, "differential")


if __name__ == "__main__":
    main()
