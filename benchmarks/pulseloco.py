"""Measures fine-tuning with few and sparse exchanges (cgx.wan.PULSELoCo): losses and bytes, beside dense ones.

    python benchmarks/pulseloco.py [--rates 1e-6] [--seeds 3] [--steps 240] [--out DIR]

Rows that the same command has already written to the result file are not measured again, so a run that was interrupted
continues. Remove the file to measure all of them.
"""

import argparse
import functools
import pathlib
import shlex
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import training_speed_data as data
from jax import lax
from jax.sharding import AxisType
from report import RESULTS, Growing, header, line, mark
from training_speed_models import make_loss

import jaxcgx as cgx

CENTERS, BATCH = 2, 4  # windows per center and step
EVERY = 8
FIRST, BEGUN = RESULTS.parents[1] / "build" / "pulseloco.npz", 1000  # the first weights; steps that made them
HELD_OUT, EVALUATE = 256, 8  # windows; the loss on them is measured after each of these parts of a run
GAIN = 0.95  # goal: the part of what DiLoCo learns
DENSE, GOOD = "DiLoCo, float32", "PULSELoCo, up to 25 %"
RUNS = {
    DENSE: cgx.wan.Diloco(cgx.Raw(), EVERY),
    "PULSELoCo": cgx.wan.PULSELoCo(every=EVERY),
    GOOD: cgx.wan.PULSELoCo(cgx.TopK(0.25), EVERY),
}
NOTES = f"""\
- A byte-level transformer of 3.3 million parameters has learned the documentation that Python ships, in {BEGUN:,}
  steps. It is fine-tuned to the sources of Python's library, in {CENTERS} centers, with Adam at a constant rate. The
  forward pass rounds the float32 weights to bfloat16. All runs begin with the same weights. Seeds differ in the
  batches.
- Both forms exchange every {EVERY} steps, with Nesterov's momentum 0.9 and an outer rate of 0.7.
- PULSELoCo's messages have room for 5 % of the elements, its default, or for 25 %.
- loss: of the outer parameters on held-out sources, after the last step, the mean over seeds. learned: how much lower
  it is than before the first step, over the same for {DENSE}. The least and the largest of the seeds follow.
  Goal of {GOOD}: at least {GAIN} with each seed. A run without all seeds isn't complete.
- bytes: what a center sends in a step on average, as jaxcgx.explain finds it in the compiled program. seen: the share
  of the elements whose bfloat16 an exchange changes, the mean over exchanges. Momentum moves some that aren't sent.
"""


def loss(weights, batch):
    """Returns the loss of a forward pass with the weights in bfloat16."""
    return make_loss("transformer")(jax.tree.map(lambda w: lax.reduce_precision(w, 8, 7), weights), batch)


@functools.cache
def first_weights():
    if not FIRST.exists():
        rng = np.random.default_rng(0)
        weights = data.transformer_weights(rng)
        FIRST.parent.mkdir(parents=True, exist_ok=True)
        batches = data.text(rng, (BEGUN, CENTERS * BATCH), 1)[0]
        np.savez(FIRST, **data.begun(weights, "transformer", batches))
    with np.load(FIRST) as file:
        return dict(file)


@jax.jit
def changed(before, after):
    """Returns the share of the elements whose bfloat16 differs."""
    bits = lambda x: lax.bitcast_convert_type(x.astype(jnp.bfloat16), jnp.uint16)
    differ = jax.tree.leaves(jax.tree.map(lambda x, y: jnp.sum(bits(x) != bits(y)), before, after))
    return sum(differ) / sum(x.size for x in jax.tree.leaves(before))


@functools.cache
def trainer(run, rate):
    mesh = jax.make_mesh((CENTERS,), ("dc",), axis_types=(AxisType.Auto,))
    return cgx.make_train_step(loss, optax.adam(rate), mesh, RUNS[run], sharding=cgx.Sharding("dc"))


@functools.cache
def sent_bytes(run, rate):
    """Returns the bytes of a step."""
    train, windows = trainer(run, rate), jnp.zeros((CENTERS * BATCH, data.CONTEXT), jnp.int32)
    found = cgx.explain(train.step, train.init(first_weights()), (windows, windows), show=False)
    return round(found.bytes / EVERY)  # it counts every branch of a conditional: an exchange of everything


def tuned(run, rate, seed, steps):
    """Returns the losses of a run, the bytes of a step, and the share of the elements that an exchange changes."""
    batches, held_out = data.text(np.random.default_rng(seed), (steps, CENTERS * BATCH), HELD_OUT, data.sources)
    train, evaluate = trainer(run, rate), jax.jit(loss)
    state = train.init(first_weights())
    lost = lambda params: round(float(evaluate(params, held_out)), 5)
    losses, shares, before = [lost(state.params)], [], jax.device_get(state.params)
    for t in range(1, steps + 1):
        state, _ = train.step(state, tuple(jnp.asarray(x[t - 1]) for x in batches))
        if t % EVERY == 0:
            after = jax.device_get(state.params)
            shares.append(float(changed(before, after)))
            before = after
        if t % (steps // EVALUATE) == 0:
            losses.append(lost(state.params))
    seen = round(100 * float(np.mean(shares)), 2)
    return dict(losses=losses, sent_bytes=sent_bytes(run, rate), seen_percent=seen)


def show(report, rates):
    rows = {(row["rate"], row["run"], row["seed"]): row for row in report.data["rows"]}
    learned = lambda row: row["losses"][0] - row["losses"][-1]
    names = "seeds", "first", "loss", "learned", "of seeds", "bytes", "fewer", "seen (%)", ""
    report.show("", *header("rate, run", *names))
    for rate, run in dict.fromkeys((rate, run) for rate, run, _ in rows if rate in rates):
        mine = [row for key, row in rows.items() if key[:2] == (rate, run)]
        dense = [rows[rate, DENSE, row["seed"]] for row in mine]
        shares = [learned(row) / learned(other) for row, other in zip(mine, dense)]
        cells = len(mine), f"{mine[0]['losses'][0]:.4f}", f"{np.mean([x['losses'][-1] for x in mine]):.4f}"
        cells += f"{np.mean(shares):.3f}", f"{min(shares):.2f} to {max(shares):.2f}", f"{mine[0]['sent_bytes']:,}"
        seen = np.mean([row["seen_percent"] for row in mine])
        cells += f"{dense[0]['sent_bytes'] / mine[0]['sent_bytes']:.1f}", f"{seen:.1f}"
        report.show(line([f"{rate:g}, {run}", *cells, mark(min(shares) >= GAIN) * (run == GOOD)]))
    report.show("", *NOTES.splitlines())


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-6], metavar="RATE", help="of Adam")
    parser.add_argument("--seeds", type=int, default=3, metavar="N", help="(default: 3)")
    parser.add_argument("--steps", type=int, default=240, metavar="N", help="of a run (default: 240)")
    parser.add_argument("--out", type=pathlib.Path, default=RESULTS, metavar="DIR", help="the folder of the results")
    args = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", CENTERS)
    given = sys.argv[1:]
    command = shlex.join(["python", "benchmarks/pulseloco.py", *given]) if given else "make bench-pulseloco"
    report = Growing(command, args.out / "pulseloco.json", ["rows"], steps=args.steps, goal=GAIN)
    for rate in args.rates:
        for seed in range(args.seeds):
            for run in RUNS:
                if not report.has("rows", rate=rate, run=run, seed=seed):
                    found = tuned(run, rate, seed, args.steps)
                    report.add("rows", dict(rate=rate, run=run, seed=seed) | found)
    show(report, args.rates)
    report.write(args.out, "pulseloco")


if __name__ == "__main__":
    main()
