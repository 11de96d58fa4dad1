"""Trains a pipeline of two stages, whose activations and cotangents cross the wire compressed.

Each device has half of the layers. While the second stage computes a micro-batch, the first one computes the next. With
differences, both keep the activations of each example, and only the change since the last epoch is sent. It trains on
scikit-learn's digits, and prints the mean loss of all steps and the bytes of a step. (pip install ".[examples]")
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import PartitionSpec as P
from sklearn.datasets import load_digits

import jaxcgx as cgx

STAGES, LAYERS, WIDTH, MICRO, EACH = 2, 2, 256, 8, 32  # micro-batches of a batch, and their examples


def init_params(seed=0):
    drawn = lambda i, *shape: jax.random.normal(jax.random.key(seed + i), shape) * (2 / shape[-2]) ** 0.5
    return {"in": drawn(0, 64, WIDTH), "stages": drawn(1, STAGES, LAYERS, WIDTH, WIDTH), "out": drawn(2, WIDTH, 10)}


def make_step(optimizer, mesh, forward, backward, differences=False):
    def loss_fn(params, kept, images, labels, rows):
        stage, last, pairs = lax.axis_index("stage"), STAGES - 1, [(i, i + 1) for i in range(STAGES - 1)]
        params |= lax.pcast({name: params[name] for name in ("in", "out")}, "stage", to="varying")

        def tick(state, t):
            (received, kept), (now, soon) = state, jnp.clip(t - stage + jnp.arange(2), 0, MICRO - 1)
            x = jnp.where(stage == 0, images[now] @ params["in"], received)
            for weights in params["stages"][0]:
                x = x + jax.nn.relu(x @ weights) / LAYERS
            loss = optax.softmax_cross_entropy_with_integer_labels(x @ params["out"], labels[now]).mean()
            which = cgx.Carry(sent=rows[now], received=rows[soon])  # the examples that this stage sends and receives
            old = jax.tree.map(lambda table, i: table[i], kept, which)
            x, new = cgx.compressed_ppermute(x, "stage", pairs, forward, carry=old, backward_plan=backward)
            if differences:
                kept = jax.tree.map(lambda table, i, rows: table.at[i].set(rows), kept, which, new)
            return (x, kept), jnp.where((stage == last) & (t >= last), loss, 0)

        start = lax.pcast(jnp.zeros((EACH, WIDTH)), "stage", to="varying"), jax.tree.map(lambda x: x[0], kept)
        (_, kept), losses = lax.scan(tick, start, jnp.arange(MICRO + last))
        return lax.psum(losses.sum() / MICRO, "stage"), jax.tree.map(lambda x: x[None], kept)

    specs = {"in": P(), "stages": P("stage"), "out": P()}, P("stage"), P(), P(), P()
    loss = jax.shard_map(loss_fn, mesh=mesh, in_specs=specs, out_specs=(P(), P("stage")))

    @jax.jit
    def step(params, state, kept, *batch):
        (value, kept), grads = jax.value_and_grad(loss, has_aux=True)(params, kept, *batch)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, kept, value

    return step


def main(steps=105):
    jax.config.update("jax_num_cpu_devices", STAGES)
    mesh = jax.make_mesh((STAGES,), ("stage",), axis_types=(jax.sharding.AxisType.Auto,))
    images, labels = (x[: 7 * MICRO * EACH] for x in load_digits(return_X_y=True))  # 7 batches are an epoch
    rows = np.concatenate([np.random.default_rng(epoch).permutation(len(images)) for epoch in range(steps)])
    none, four, zeros = cgx.Raw(), (cgx.MaxMin(4), cgx.MaxMin(8)), np.zeros((STAGES, len(images), WIDTH), np.float32)
    for name, *how in ("no compression", none, none), ("4 bits, 8 back", *four), ("with differences", *four, True):
        optimizer, params, losses, kept = optax.adam(1e-3), init_params(), [], cgx.Carry(sent=zeros, received=zeros)
        state, step = optimizer.init(params), make_step(optimizer, mesh, *how)
        for i in rows.reshape(-1, MICRO, EACH)[:steps]:
            batch = np.float32(images[i] / 16), labels[i], i
            params, state, kept, loss = step(params, state, kept, *batch)
            losses.append(float(loss))
        sent = cgx.explain(step, params, state, kept, *batch, show=False).bytes
        print(f"{name}: loss {np.mean(losses):.4f}, a stage sends {sent:,} bytes in a step")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
