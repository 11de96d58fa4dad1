"""Trains a pipeline of two stages, whose activations and cotangents cross the wire compressed.

Each device has half of the layers. A batch is cut into micro-batches. While the second stage computes one of them, the
first stage computes the next one. The script trains on scikit-learn's handwritten digits, first without compression and
then with it, and prints the bytes that a device sends in a step.

    pip install ".[examples]"
    python examples/pipeline.py
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from sklearn.datasets import load_digits

import jaxcgx as cgx

STAGES, LAYERS, WIDTH, MICRO, EACH = 2, 2, 256, 8, 32  # micro-batches of a batch, and their examples
NEXT = [(stage, stage + 1) for stage in range(STAGES - 1)]


def init_params(seed=0):
    drawn = lambda i, *shape: jax.random.normal(jax.random.key(seed + i), shape) * (2 / shape[-2]) ** 0.5
    return {"in": drawn(0, 64, WIDTH), "stages": drawn(1, STAGES, LAYERS, WIDTH, WIDTH), "out": drawn(2, WIDTH, 10)}


def make_step(optimizer, mesh, forward, backward):
    """Returns a training step whose stages send activations with one codec, and cotangents with another."""

    def loss_fn(params, images, labels):
        stage, last = lax.axis_index("stage"), STAGES - 1
        params |= lax.pcast({name: params[name] for name in ("in", "out")}, "stage", to="varying")

        def tick(received, t):
            x = jnp.where(stage == 0, images[jnp.minimum(t, MICRO - 1)] @ params["in"], received)
            for weights in params["stages"][0]:
                x = x + jax.nn.relu(x @ weights) / LAYERS
            number = t - last  # of the micro-batch in the last stage
            losses = optax.softmax_cross_entropy_with_integer_labels(x @ params["out"], labels[jnp.maximum(number, 0)])
            loss = jnp.where((stage == last) & (number >= 0), losses.mean(), 0)
            return cgx.compressed_ppermute(x, "stage", NEXT, forward, backward_plan=backward), loss

        first = lax.pcast(jnp.zeros((EACH, WIDTH)), "stage", to="varying")
        return lax.psum(lax.scan(tick, first, jnp.arange(MICRO + last))[1].sum() / MICRO, "stage")

    specs = {"in": P(), "stages": P("stage"), "out": P()}, P(), P()
    loss = jax.shard_map(loss_fn, mesh=mesh, in_specs=specs, out_specs=P())

    @jax.jit
    def step(params, state, *batch):
        value, grads = jax.value_and_grad(loss)(params, *batch)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    return step


def main(steps=100):
    jax.config.update("jax_num_cpu_devices", STAGES)
    mesh = jax.make_mesh((STAGES,), ("stage",), axis_types=(AxisType.Auto,))
    images, labels = (np.asarray(x, np.float32) for x in load_digits(return_X_y=True))
    rows = np.random.default_rng(0).integers(0, len(images), (steps, MICRO, EACH))
    for name, *plans in ("no compression", cgx.Raw(), cgx.Raw()), ("4 bits, 8 back", cgx.MaxMin(4), cgx.MaxMin(8)):
        optimizer, params, losses = optax.adam(1e-3), init_params(), []
        state, step = optimizer.init(params), make_step(optimizer, mesh, *plans)
        for batch in ((images[i] / 16, labels[i].astype(np.int32)) for i in rows):
            params, state, loss = step(params, state, *batch)
            losses.append(float(loss))
        sent = sum(c.bytes * c.times for c in cgx.explain(step, params, state, *batch, show=False).collectives)
        print(f"{name}: loss {np.mean(losses[-10:]):.4f}, a stage sends {sent:,} bytes in a step")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
