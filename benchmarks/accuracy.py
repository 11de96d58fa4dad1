"""Measures what compressed gradients cost in accuracy or loss after equal steps, with feedback and without.

    python benchmarks/accuracy.py [--tasks REGEX] [--runs REGEX] [--seeds 3] [--out DIR]

The ranks are an axis of vmap, because compression errors don't depend on the transport. All runs of a seed start with
the same weights and see the same batches. Runs that are already in the result file are not measured again, so a
measurement that was interrupted continues. Remove the file to measure all of them.
"""

import argparse
import functools
import itertools
import pathlib
import re
import time
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import training_speed_data as data
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from report import RESULTS, Growing, header, line, mark
from training_speed_models import PREDICT

import jaxcgx as cgx

RANKS = 4
HIDDEN = 256, 128  # hidden layers of the network of the first task
DENSE = "float32"
WITH = {True: "with feedback", False: "without feedback"}
EPOCHS = 10  # in DGC's warm-up, which takes 4 of them
PART = 250  # held-out examples that are evaluated in one call
PROGRAMS = RESULTS.parents[1] / "build" / "accuracy"  # compiled programs, kept for the next seeds
CHARTS = [dict(table="rows", title="Lost against float32", x="run", y=["lost"], by="feedback", panel="task")]


class Task(NamedTuple):
    predict: Callable
    weights: Callable  # takes a generator of random numbers
    batches: Callable  # (generator, steps, batch, held_out) -> (an iterator of batches, held-out examples)
    steps: int
    batch: int  # over all ranks
    held_out: int
    rate: float  # the highest learning rate of a cosine schedule
    adam: bool  # instead of SGD with momentum
    most: dict  # {bits: the largest allowed loss with feedback}, in points of accuracy or in % of the loss
    begun: int = 0  # steps with float32 and Adam that made the first weights


class Run(NamedTuple):
    exchange: Callable  # options -> an exchange
    bits: int | None = None  # per element, for runs that have a goal
    momentum: bool = False  # whether the run has its own momentum
    warm: bool = False  # whether the run has a warm-up


def plan(codec):
    return functools.partial(cgx.Feedback, codec)


def layers(weights, images):
    x = images.reshape(len(images), -1)
    for i in range(len(HIDDEN)):
        x = jax.nn.relu(x @ weights[f"{i}_w"] + weights[f"{i}_bias"])
    return x @ weights["last_w"] + weights["last_bias"]


def layers_weights(rng):
    found, inputs = {}, data.normalized_images()[0][0][0].size
    for name, outputs in zip((*range(len(HIDDEN)), "last"), (*HIDDEN, data.CLASSES)):
        found[f"{name}_w"] = (rng.standard_normal((inputs, outputs)) * (2 / inputs) ** 0.5).astype(np.float32)
        found[f"{name}_bias"], inputs = np.zeros(outputs, np.float32), outputs
    return found


def image_batches(rng, steps, batch, held_out, side=None):
    """Adds dark pixels around each image, so that it is `side` pixels wide and high."""
    train, test = data.normalized_images()

    def padded(images):
        more = 0 if side is None else side - images.shape[1]
        around = more // 2, more - more // 2
        return np.pad(images, ((0, 0), around, around, (0, 0)), constant_values=train[0].min())

    def some():
        for chosen in rng.integers(0, len(train[0]), (steps, batch)):
            yield padded(train[0][chosen]), train[1][chosen]

    return some(), (padded(test[0][:held_out]), test[1][:held_out])


def text_batches(rng, steps, batch, held_out):
    batches, held = data.text(rng, (steps, batch), held_out)
    return zip(*batches), held


POINTS, PERCENT = {4: 0.3, 2: 1.0}, {4: 0.5, 2: 1.5}
TASKS = {
    "Fashion-MNIST": Task(layers, layers_weights, image_batches, 1880, 128, 10_000, 0.1, False, POINTS),
    "transformer": Task(
        PREDICT["transformer"], data.transformer_weights, text_batches, 400, 16, 128, 2e-3, True, PERCENT, 1000
    ),
    "ResNet-20": Task(
        PREDICT["ResNet-20"],
        data.resnet_weights,
        functools.partial(image_batches, side=32),
        300,
        32,
        10_000,
        0.02,
        False,
        POINTS,
        1200,
    ),
}
SPARSE = dict(threshold=0.01, size_bound=10_000)
RUNS = {
    DENSE: Run(plan(cgx.Raw())),
    "MaxMin, 4 bits": Run(plan(cgx.MaxMin(4)), 4),
    "MaxMin, 2 bits": Run(plan(cgx.MaxMin(2)), 2),
    "Eden, 4 bits": Run(plan(cgx.Eden(4)), 4),
    "Eden, 2 bits": Run(plan(cgx.Eden(2)), 2),
    "NVFP4": Run(plan(cgx.Micro("nvfp4")), 4),
    "ByteGrad": Run(plan(cgx.ByteGrad())),
    "PowerSGD, rank 4": Run(plan(cgx.PowerSGD(4))),
    "DGC, 0.1 %": Run(functools.partial(cgx.DGC, 0.001), momentum=True, warm=True),
    "BSC, 1 %": Run(functools.partial(cgx.BSC, **SPARSE), momentum=True),
    "MPQ, 1 %": Run(functools.partial(cgx.MPQ, **SPARSE), momentum=True),
    "Sign": Run(plan(cgx.Sign())),
    "Eden, 1 bit": Run(plan(cgx.Eden(1))),
    "MaxMin, 8 bits": Run(plan(cgx.MaxMin(8))),
    "bfloat16": Run(plan(cgx.Cast("bfloat16"))),
}


NOTES = f"""\
- A row without all seeds of float32 has no mean and no mark.
- lost: against float32 with the same seed, the mean over seeds: points of accuracy, or % of the loss. spread: the
  standard deviation over seeds. Goals are those of 4 bits (0.3 points, 0.5 %) and of 2 bits (1 point, 1.5 %) with
  feedback. They are for the mean, because single seeds scatter.
- The batch is divided among {RANKS} ranks, whose gradients are averaged.
- bytes/step: what a rank sends in all collectives of the compiled step, as jaxcgx.explain finds them. fewer: the bytes
  of float32 over these bytes.
- Tasks, rows and seeds that are missing have not been run, because they take hours. `make bench-accuracy` runs them.
- PowerSGD, DGC, BSC, MPQ and Sign have no goal. The transformer loses most with them, probably because Adam needs small
  errors relative to each element ([feedback](../../docs/feedback.md#before-adam)), and because 400 steps are few for
  elements that are sent rarely.
- DGC, BSC and MPQ have their own momentum, and the optimizer after them has none (Adam: b1=0). DGC's ratio decreases to
  0.1 % in the first 40 % of the steps. BSC and MPQ compress weights of more than 10,000 elements.
- Fashion-MNIST: a network with hidden layers of 256 and 128. transformer: byte-level, on the documentation that Python
  ships. ResNet-20 has group norms. It sees Fashion-MNIST as 32 x 32 images with dark pixels at the edges, because
  CIFAR-10 was not available. Results on CIFAR-10 may differ. The transformer and ResNet-20 start from weights that were
  trained for 1,000 and 1,200 steps with float32. How fast a network learns in its first steps is a matter of chance,
  which would hide the cost of compression. Trained weights hide a part of it, too: where few bits without feedback lose
  as little as with it, a mark says little.
"""
# (paper, method, what, float32, compressed)
PUBLISHED = [
    ("CGX, arXiv 2111.08617", "MaxMin, 4 bits", "ResNet-50", "75.8 %", "75.9 %"),
    ("", "in buckets of 1024", "ViT-B", "79.2 %", "78.6 %"),
    ("", "", "Transformer-XL, perplexity", "22.81", "22.9"),
    ("", "", "GPT-2, perplexity", "14.1", "13.9"),
    ("DGC, arXiv 1712.01887", "0.1 %", "ResNet-110, CIFAR-10", "93.75 %", "93.87 %"),
    ("", "", "ResNet-50", "75.96 %", "76.15 %"),
    ("", "", "LSTM, PTB, perplexity", "72.30", "72.24"),
    ("PowerSGD, arXiv 1905.13727", "rank 4", "ResNet-18, CIFAR-10", "94.3 %", "94.5 %"),
    ("", "", "LSTM, WikiText-2, perplexity", "91", "91"),
    ("DynamiQ, arXiv 2602.08923", "about 5 bits", "language models", "bfloat16", "99.9 % of it"),
]
UNPUBLISHED = "No such figure is known for ByteGrad, Eden, Sign, BSC, MPQ, and NVFP4 between ranks."


def optimizer_of(task, run):
    rate = optax.warmup_cosine_decay_schedule(0.0, task.rate, task.steps // 20, task.steps)
    if task.adam:
        return optax.adam(rate, b1=0.0 if run.momentum else 0.9)
    return optax.sgd(rate, momentum=None if run.momentum else 0.9)


def cross_entropy(logits, targets):
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


def sent_bytes(exchange, weights):
    """Returns the bytes that a rank sends in a step, as jaxcgx.explain finds them in the compiled exchange."""
    mesh = jax.make_mesh((RANKS,), ("data",), axis_types=(AxisType.Auto,))
    transformation = cgx.compress_gradients("data", exchange, axis_size=RANKS)
    state = jax.eval_shape(transformation.init, weights)
    specs = P(), cgx.state_specs(state, "data"), P()
    mapped = jax.shard_map(transformation.update, mesh=mesh, in_specs=specs, out_specs=specs[:2], check_vma=False)
    return cgx.explain(jax.jit(mapped), weights, state, weights, show=False).bytes


@functools.cache
def first_weights(name, seed):
    task, rng = TASKS[name], np.random.default_rng(1000 + seed)
    weights, optimizer = task.weights(rng), optax.adam(1e-3)
    state = optimizer.init(weights)

    @functools.partial(jax.jit, donate_argnums=1)
    def step(weights, state, batch):
        loss = lambda weights: cross_entropy(task.predict(weights, batch[0]), batch[1])
        updates, state = optimizer.update(jax.grad(loss)(weights), state)
        return optax.apply_updates(weights, updates), state

    for batch in task.batches(rng, task.begun, task.batch, 1)[0]:
        weights, state = step(weights, state, batch)
    return weights


def train(name, run, feedback, seed):
    """Returns the measurement on held-out data, and the bytes that a rank sends in a step after any warm-up."""
    task, rng = TASKS[name], np.random.default_rng(seed)
    # Masking is only for delayed elements.
    unmasked = dict(masking=False) if run.momentum and not feedback else {}
    exchange = functools.partial(run.exchange, keep=feedback, seed=seed, **unmasked)
    warm = dict(warm_up=cgx.WarmUp(4, task.steps // EPOCHS)) if run.warm else {}
    transformation, optimizer = cgx.compress_gradients("data", exchange(**warm)), optimizer_of(task, run)

    def loss_fn(weights, batch):
        return cross_entropy(task.predict(weights, batch[0]), batch[1])

    @functools.partial(jax.jit, donate_argnums=(0, 1, 2))
    def step(weights, state, kept, batch):
        def of_rank(kept, part):
            return transformation.update(jax.grad(loss_fn)(weights, part), kept, weights)

        parts = jax.tree.map(lambda x: x.reshape(RANKS, -1, *x.shape[1:]), batch)
        means, kept = jax.vmap(of_rank, axis_name="data")(kept, parts)
        updates, state = optimizer.update(jax.tree.map(lambda x: x[0], means), state, weights)
        return optax.apply_updates(weights, updates), state, kept

    weights = jax.tree.map(jnp.array, first_weights(name, seed))
    sent = sent_bytes(exchange(), weights)
    kept = jax.vmap(lambda _: transformation.init(weights), axis_name="data")(jnp.arange(RANKS))
    batches, (inputs, targets) = task.batches(rng, task.steps, task.batch, task.held_out)
    state = optimizer.init(weights)
    for batch in batches:
        weights, state, kept = step(weights, state, kept, batch)
    parts = np.split(inputs, len(inputs) // min(len(inputs), PART))
    logits = np.concatenate([jax.jit(task.predict)(weights, part) for part in parts])
    right = None if task.adam else round(100 * float((logits.argmax(-1) == targets).mean()), 4)
    return dict(loss=round(float(cross_entropy(logits, targets)), 6), accuracy=right, sent_bytes=sent)


def measure(report, args):
    """Trains the runs that are missing in the report."""
    for seed, name, run, feedback in itertools.product(range(args.seeds), TASKS, RUNS, (True, False)):
        where = dict(task=name, run=run, feedback=WITH[feedback], seed=seed)
        asked = re.search(args.tasks, name) and re.search(args.runs, f"{run} {WITH[feedback]}")
        if asked and not (run == DENSE and feedback) and not report.has("runs", **where):
            start = time.process_time()
            found = train(name, RUNS[run], feedback, seed)
            report.add("runs", where | found | dict(processor_seconds=round(time.process_time() - start, 1)))


def by_run(rows):
    """Returns {(task, run, feedback): {seed: row}}."""
    found = {}
    for row in sorted(rows, key=lambda row: row["seed"]):
        found.setdefault((row["task"], row["run"], row["feedback"] == WITH[True]), {})[row["seed"]] = row
    return found


def lost(name, found, key):
    """Returns the loss of a run against float32, by seed: points of accuracy, or % of the loss."""
    dense = found.get((name, DENSE, False), {})
    return {
        seed: 100 * (row["loss"] / dense[seed]["loss"] - 1)
        if TASKS[name].adam
        else dense[seed]["accuracy"] - row["accuracy"]
        for seed, row in found[key].items()
        if seed in dense
    }


def show(report):
    found = by_run(report.data["runs"])
    for name, task in TASKS.items():
        kind = "loss" if task.adam else "accuracy"
        keys = [key for key in found if key[0] == name and lost(name, found, key)]
        if not keys:
            report.show("", f"{name}: not measured yet.")
            continue
        size = sum(w.size for w in task.weights(np.random.default_rng(0)).values())
        report.show(
            "",
            f"{name}: {size:,} weights, {task.steps:,} steps of {task.batch} examples, "
            f"{'Adam' if task.adam else 'SGD with momentum 0.9'}, a rate of at most {task.rate:g}. "
            f"{'Loss' if task.adam else 'Accuracy in %'} of {task.held_out:,} held-out examples.",
            "",
            *header("gradients", "feedback", kind, "of seeds", "lost", "spread", "goal", "", "bytes/step", "fewer"),
        )
        dense = found[name, DENSE, False]
        raw = next(iter(dense.values()))["sent_bytes"]
        for key in sorted(keys, key=lambda key: (list(RUNS).index(key[1]), not key[2])):
            _, run, feedback = key
            rows, less = found[key], lost(name, found, key)
            mean, most = float(np.mean([*less.values()])), task.most.get(RUNS[run].bits) if feedback else None
            values, sent = [row[kind] for row in rows.values()], next(iter(rows.values()))["sent_bytes"]
            digits, whole = 3 if task.adam else 2, less.keys() == dense.keys()
            report.data["rows"].append(
                dict(
                    task=name,
                    run=run,
                    feedback=WITH[feedback],
                    lost=[round(value, 4) for value in less.values()],
                    sent_bytes=sent,
                )
            )
            cells = [
                run,
                "" if run == DENSE else "yes" if feedback else "no",
                f"{np.mean(values):.{digits}f}" if whole else "",
            ]
            cells += [
                " ".join(f"{value:.{digits}f}" for value in values),
                f"{mean:+.2f}",
                f"{np.std([*less.values()]):.2f}",
            ]
            cells += ["" if most is None else f"<= {most:g}", "" if most is None or not whole else mark(mean <= most)]
            report.show(line([*cells, f"{sent:,}", f"{raw / sent:.1f}"]))
    report.show("", *NOTES.splitlines(), "", "What papers say, of longer training of larger networks:", "")
    report.show(*header("paper", "method", "what", "float32", "compressed"), *map(line, PUBLISHED), "", UNPUBLISHED)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tasks", default="", metavar="REGEX", help="train only matching tasks of " + ", ".join(TASKS))
    parser.add_argument(
        "--runs", default="", metavar="REGEX", help="train only matching runs, such as 'Sign without feedback'"
    )
    parser.add_argument("--seeds", type=int, default=3, metavar="N", help="number of seeds (default: 3)")
    parser.add_argument("--out", type=pathlib.Path, default=RESULTS, metavar="DIR", help="the folder of the tables")
    args = parser.parse_args()
    if not data.FASHION.is_dir():
        parser.error(f"no {data.FASHION}: Debian and Ubuntu have it as the package dataset-fashion-mnist")
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", RANKS)
    jax.config.update("jax_compilation_cache_dir", str(PROGRAMS))
    report = Growing("make bench-accuracy", args.out / "accuracy.json", ["runs"], ranks=RANKS, rows=[], charts=CHARTS)
    measure(report, args)
    show(report)
    report.write(args.out, "accuracy")


if __name__ == "__main__":
    main()
