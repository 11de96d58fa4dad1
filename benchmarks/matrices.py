"""Measures training with matrix optimizers and compressed exchanges: final losses and bytes of Adam, Muon and Dion.

    python benchmarks/matrices.py [--runs REGEX] [--seeds 3] [--steps 200] [--out DIR]

Rows that the same command has already written to the result file are not measured again.
"""

import argparse
import itertools
import pathlib
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import training_speed_data as data
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from report import RESULTS, Growing, header, line
from training_speed_models import make_loss

import jaxcgx as cgx

data.WIDTH, data.LAYERS = 64, 2  # a smaller transformer than that of training_speed.py
RANKS, BATCH = 2, 4  # windows per rank
HELD_OUT = 256  # windows
RANK = 4
RATE = 3e-3  # Adam's largest learning rate, also for what Muon and Dion leave to Adam
RATES = 0.0025, 0.005, 0.01, 0.02, 0.04  # those that are tried for matrices at equal bytes, with a seed of their own
SEARCHED = "Muon, PowerSGD", "Dion"
OTHERS = "embed|position|head"  # matrices that are Adam's in every run
RULES = [(OTHERS, cgx.MaxMin(4))]


class Run(NamedTuple):
    """A row: the optimizer of matrices, its largest learning rate, the exchange, and how ZeRO-1 divides its state."""

    optimizer: Callable[[Any], Any]
    rate: float
    exchange: Any
    zero: Any = None  # None, "shards" or "stacks"
    gather: Any = cgx.Raw()


def labels(params):
    return {name: "matrix" if x.ndim > 1 and not re.match(OTHERS, name) else "other" for name, x in params.items()}


def muon(rate):
    last = lambda x: optax.contrib.MuonDimensionNumbers(x.ndim - 2, x.ndim - 1)
    return optax.contrib.muon(rate, muon_weight_dimension_numbers=lambda params: jax.tree.map(last, params))


LOW_RANK = cgx.Plan(cgx.PowerSGD(RANK), RULES)
RUNS = {
    "Adam, float32": Run(optax.adam, RATE, cgx.Raw()),
    "Muon, float32": Run(muon, 0.02, cgx.Raw()),
    "Adam, 4 bits": Run(optax.adam, RATE, cgx.Plan(cgx.MaxMin(4))),
    "Muon, 4 bits": Run(muon, 0.02, cgx.Plan(cgx.MaxMin(4))),
    "Muon, 4 bits, ZeRO-1": Run(muon, 0.02, cgx.Plan(cgx.MaxMin(4)), "stacks", cgx.MaxMin(8)),
    "Adam, PowerSGD": Run(optax.adam, RATE, LOW_RANK),
    "Muon, PowerSGD": Run(muon, 0.01, LOW_RANK),
    "Dion": Run(optax.sgd, 0.0025, cgx.Dion(RANK, rules=RULES)),
}
CHARTS = [dict(table="rows", title="Final loss", x="run", y=["loss"])]
NOTES = f"""\
- A byte-level transformer (width {data.WIDTH}, {data.LAYERS} layers) learns the documentation that Python ships, on
  {RANKS} ranks with {BATCH} windows each. All runs of a seed have the same weights and batches. loss: on held-out text,
  after the last step, the mean over seeds. Learning rates rise for a tenth of the
  steps, and then fall to 0 (a cosine).
- bytes: what a rank sends in a step, as jaxcgx.explain finds it in the compiled program.
- In every run, Adam updates the embedding, the positions, the head and all vectors. The last three rows send factors of
  rank {RANK} for the other matrices, and 4 bits for an element of the embedding, the positions and the head.
- ZeRO-1: cgx.Stacks, with gather=MaxMin(8).
- rates: final losses of the last two rows with other rates for matrices, with a seed of their own. The rows have the
  best rate. All other rates weren't searched.
"""


def mesh():
    return jax.make_mesh((RANKS,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:RANKS])


def step_of(run, steps, params):
    """Returns (a training step, its first parameters, the function that makes the model's parameters of its own)."""
    rate = lambda most: optax.warmup_cosine_decay_schedule(0.0, most, steps // 10, steps)
    optimizer = optax.partition({"matrix": run.optimizer(rate(run.rate)), "other": optax.adam(rate(RATE))}, labels)
    stacks = cgx.Stacks(params, ranks=RANKS, leave=OTHERS)
    given, whole = (stacks.stack(params), stacks.unstack) if run.zero == "stacks" else (params, lambda params: params)
    specs = cgx.shard_specs(given, mesh()) if run.zero else None
    if run.zero == "stacks":
        specs |= dict.fromkeys(stacks.names, P("data"))
    loss = make_loss("transformer")
    sharding = cgx.Sharding(optimizer=specs, gather=run.gather)
    step = cgx.make_train_step(
        lambda p, batch: loss(whole(p), batch), optimizer, mesh(), run.exchange, sharding=sharding
    )
    return step, given, whole


def batches_of(rng, steps):
    return data.text(rng, (steps, RANKS * BATCH), HELD_OUT)


def bytes_of(run, steps):
    """Returns the bytes that a rank sends in a step."""
    rng = np.random.default_rng(0)
    train, params, _ = step_of(run, steps, data.transformer_weights(rng))
    batch = tuple(jnp.asarray(each[0]) for each in batches_of(rng, 1)[0])
    return cgx.explain(train.step, train.init(params), batch, show=False).bytes


def measure(run, seeds, steps):
    """Yields (the seed, the final loss)."""
    evaluate = jax.jit(make_loss("transformer"))
    for seed in seeds:
        rng = np.random.default_rng(seed)
        train, params, whole = step_of(run, steps, data.transformer_weights(rng))
        state = train.init(params)
        batches, held_out = batches_of(rng, steps)
        for t in range(steps):
            batch = tuple(jnp.asarray(each[t]) for each in batches)
            state, _ = jax.block_until_ready(train.step(state, batch))
        yield seed, round(float(evaluate(whole(state.params), held_out)), 4)


def show(report):
    rows = report.data["rows"]
    report.show("", *header("run", "loss", "of seeds", "bytes", "fewer"))
    dense = next(row["sent_bytes"] for row in rows if row["run"] == next(iter(RUNS)))
    for name in RUNS:
        if mine := [row for row in rows if row["run"] == name]:
            losses, sent = [row["loss"] for row in mine], mine[0]["sent_bytes"]
            each = " ".join(f"{loss:.3f}" for loss in losses)
            report.show(line([name, f"{np.mean(losses):.3f}", each, f"{sent:,}", f"{dense / sent:.1f}"]))
    report.show("", *header("rates", *map(str, RATES)))
    losses = {(row["run"], row["rate"]): row["loss"] for row in report.data["rates"]}
    for name in SEARCHED:
        report.show(line([name, *(f"{losses[name, rate]:.3f}" if (name, rate) in losses else "" for rate in RATES)]))
    report.show("", *header("Muon's state, float32", "bytes"))
    for row in report.data["forms"]:
        report.show(line([row["form"] or "whole", f"{row['sent_bytes']:,}"]))
    report.show("", *NOTES.splitlines())


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", default="", metavar="REGEX", help="only matching rows")
    parser.add_argument("--seeds", type=int, default=3, metavar="N", help="seeds (default: 3)")
    parser.add_argument("--steps", type=int, default=200, metavar="N", help="steps (default: 200)")
    parser.add_argument("--out", type=pathlib.Path, default=RESULTS, metavar="DIR", help="the folder of the results")
    args = parser.parse_args()
    chosen = {name: n for name in ("seeds", "steps") if (n := getattr(args, name)) != parser.get_default(name)}
    command = " ".join(["make bench-matrices", *(f"--{name} {n}" for name, n in chosen.items())])
    if chosen and args.out == RESULTS:
        parser.error("with other seeds or steps than the committed results' pass --out")
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", RANKS)
    report = Growing(
        command, args.out / "matrices.json", ["rows", "rates", "forms"], ranks=RANKS, steps=args.steps, charts=CHARTS
    )
    names = list(filter(re.compile(args.runs).search, RUNS))
    for name, rate in itertools.product(filter(names.__contains__, SEARCHED), RATES):
        if not report.has("rates", run=name, rate=rate):
            ((_, loss),) = measure(RUNS[name]._replace(rate=rate), [args.seeds], args.steps)
            report.add("rates", dict(run=name, rate=rate, loss=loss))
    for name in names:
        missing = [seed for seed in range(args.seeds) if not report.has("rows", run=name, seed=seed)]
        sent = bytes_of(RUNS[name], args.steps) if missing else None
        for seed, loss in measure(RUNS[name], missing, args.steps):
            report.add("rows", dict(run=name, seed=seed, loss=loss, sent_bytes=sent))
    for form in None, "shards", "stacks":
        if not report.has("forms", form=form):
            run = RUNS["Muon, float32"]._replace(zero=form)
            report.add("forms", dict(form=form, sent_bytes=bytes_of(run, args.steps)))
    show(report)
    report.write(args.out, "matrices")


if __name__ == "__main__":
    main()
