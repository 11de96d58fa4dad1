"""Measures how far Adam's update from compressed gradients is from the update from their true mean, leaf by leaf.

    python benchmarks/adam.py [--out DIR]

The gradients come from a transformer that trains in float32. Every codec gets the same gradients.
"""

import argparse
import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import training_speed_data as data
from report import RESULTS, Report, header, line
from training_speed_models import make_loss

import jaxcgx as cgx
from jaxcgx.codecs.base import spell

RANKS, BATCH = 4, 2  # windows per rank
STEPS, COUNTED = 60, 20  # only the last ones are averaged
RATE = 1e-3
LEAVES = {"embed": "embedding", "position": "positions", "1_qkv_w": "attention", "1_up_w": "hidden", "head": "head"}
CODECS = [
    cgx.ByteGrad(),
    cgx.Micro("nvfp4"),
    cgx.MaxMin(4, 128),
    cgx.MaxMin(4),
    cgx.MaxMin(4, rotate=True),
    cgx.Eden(4),
    cgx.MaxMin(2),
    cgx.Eden(2),
]
NOTES = f"""\
- gradient: |mean that ranks get - true mean|² / |true mean|². update: the same for Adam's updates, which depend on all
  means so far. The figures are means over the last {COUNTED} of {STEPS} steps.
- length: the length of the update over that of the update from the true means.
- An embedding has a row for each byte. Rows of frequent bytes have large gradients, others
  small ones or none. The head has columns for bytes.
"""


def gradients():
    """Returns {leaf: [steps, ranks, ...]}."""
    rng = np.random.default_rng(0)
    weights = data.transformer_weights(rng)
    (inputs, targets), _ = data.text(rng, (STEPS, RANKS, BATCH), 1)
    gradient, optimizer = jax.grad(make_loss("transformer")), optax.adam(RATE)

    @jax.jit
    def step(weights, state, batch):
        grads = jax.vmap(lambda part: gradient(weights, part))(batch)
        updates, state = optimizer.update(jax.tree.map(lambda g: g.mean(0), grads), state)
        return optax.apply_updates(weights, updates), state, {name: grads[name] for name in LEAVES}

    state, found = optimizer.init(weights), []
    for batch in zip(inputs, targets):
        weights, state, grads = step(weights, state, batch)
        found.append(grads)
    return jax.tree.map(lambda *steps: jnp.stack(steps), *found)


@functools.partial(jax.jit, static_argnums=(0, 1))
def losses(codec, feedback, grads):
    """Returns {leaf: [error of the mean, error of the update, length of the update]}."""
    optimizer = optax.scale_by_adam()
    exchange = cgx.compress_gradients("ranks", cgx.Feedback(cgx.Plan(codec, min_size=0), keep=feedback))

    def step(carry, grads):
        kept, true_state, state = carry
        means, kept = jax.vmap(exchange.update, axis_name="ranks")(grads, kept)
        mean, true = (jax.tree.map(f, x) for f, x in ((lambda x: x[0], means), (lambda x: x.mean(0), grads)))
        update, state = optimizer.update(mean, state)
        true_update, true_state = optimizer.update(true, true_state)
        norm = lambda x: jnp.sum(jnp.square(x))
        found = jax.tree.map(
            lambda g, t, u, v: jnp.stack([norm(g - t) / norm(t), norm(u - v) / norm(v), (norm(u) / norm(v)) ** 0.5]),
            *(mean, true, update, true_update),
        )
        return (kept, true_state, state), found

    first = jax.tree.map(lambda g: g[0, 0], grads)
    kept = jax.vmap(lambda _: exchange.init(first), axis_name="ranks")(jnp.arange(RANKS))
    _, found = jax.lax.scan(step, (kept, optimizer.init(first), optimizer.init(first)), grads)
    return jax.tree.map(lambda x: x[-COUNTED:].mean(0), found)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=pathlib.Path, default=RESULTS, metavar="DIR", help="the folder of the table")
    args = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    report = Report("make bench-adam", ranks=RANKS, steps=STEPS, rows=[])
    grads = gradients()
    names = [f"{leaf} {what}" for leaf in LEAVES.values() for what in ("gradient", "update", "length")]
    report.show("", *header("codec", "feedback", *names))
    for codec in CODECS:
        for feedback in (True, False):
            found = losses(codec, feedback, grads)
            values = [round(float(x), 4) for leaf in LEAVES for x in found[leaf]]
            report.data["rows"].append(dict(codec=spell(codec), feedback=feedback, **dict(zip(names, values))))
            report.show(line([f"`{spell(codec)}`", "yes" if feedback else "no", *(f"{x:.3f}" for x in values)]))
    report.show("", *NOTES.splitlines())
    report.write(args.out, "adam")


if __name__ == "__main__":
    main()
