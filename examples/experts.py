"""Trains a mixture of experts, whose tokens and cotangents cross the wire compressed.

Each device has one expert and a share of the batch. A router chooses the expert of each token. The script trains on
scikit-learn's digits, whose rows are tokens, and prints the bytes of tokens of a step. (pip install ".[examples]")
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

EXPERTS, WIDTH, HIDDEN, EACH = 4, 128, 256, 32  # images of a device, each of 8 tokens
MOST = 3 * EACH  # the tokens that an expert takes from a device; on average, there are 2 * EACH
SHARDED = dict(embed=P(), router=P(), up=P("expert"), down=P("expert"), out=P())


def init_params(seed=0):
    drawn = lambda i, *shape: jax.random.normal(jax.random.key(seed + i), shape) * (2 / shape[-2]) ** 0.5
    params = dict(embed=drawn(0, 8, WIDTH), router=drawn(1, WIDTH, EXPERTS), out=drawn(2, 8 * WIDTH, 10))
    return params | dict(up=drawn(3, EXPERTS, WIDTH, HIDDEN), down=drawn(4, EXPERTS, HIDDEN, WIDTH))


def mixture(x, params, plan):
    """Returns the tokens plus what their experts make of them. Tokens that an expert can't take stay."""
    swap = lambda numbers: lax.all_to_all(numbers, "expert", 0, 0, tiled=True)
    move = lambda *args: cgx.compressed_ragged_all_to_all(*args, axis_name="expert", plan=plan, capacity=MOST)
    gates = jax.nn.softmax(x @ params["router"])
    chosen = jax.nn.one_hot(gates.argmax(1), EXPERTS, dtype=int)
    taken = chosen * (jnp.cumsum(chosen, 0) <= MOST)
    sizes, order = taken.sum(0), jnp.argsort(jnp.where(taken.any(1), taken.argmax(1), EXPERTS))
    starts, arriving = jnp.cumsum(sizes) - sizes, swap(sizes)
    room = jnp.cumsum(arriving) - arriving
    arrived = move(x[order], jnp.zeros((EXPERTS * MOST, WIDTH)), starts, sizes, swap(room), arriving)
    y = jax.nn.relu(arrived @ params["up"][0]) @ params["down"][0]
    back = move(y, jnp.zeros_like(x), room, arriving, swap(starts), sizes)
    return x + back[jnp.argsort(order)] * gates.max(1, keepdims=True)


def make_step(optimizer, mesh, plan):
    def loss_fn(params, images, labels):
        params |= lax.pcast({name: params[name] for name in ("embed", "router", "out")}, "expert", to="varying")
        logits = mixture(images.reshape(-1, 8) @ params["embed"], params, plan).reshape(EACH, -1) @ params["out"]
        return lax.pmean(optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean(), "expert")

    loss = jax.shard_map(loss_fn, mesh=mesh, in_specs=(SHARDED, P("expert"), P("expert")), out_specs=P())

    @jax.jit
    def step(params, state, *batch):
        value, grads = jax.value_and_grad(loss)(params, *batch)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    return step


def main(steps=100):
    jax.config.update("jax_num_cpu_devices", EXPERTS)
    mesh = jax.make_mesh((EXPERTS,), ("expert",), axis_types=(jax.sharding.AxisType.Auto,))
    images, labels = load_digits(return_X_y=True)
    for name, plan in ("no compression", cgx.Raw()), ("8 bits", cgx.AbsMax(8)), ("4 bits", cgx.MaxMin(4)):
        optimizer, params, losses = optax.adam(1e-3), init_params(), []
        state, step = optimizer.init(params), make_step(optimizer, mesh, plan)
        for i in np.random.default_rng(0).integers(0, len(images), (steps, EXPERTS * EACH)):
            batch = np.float32(images[i] / 16), labels[i]
            params, state, loss = step(params, state, *batch)
            losses.append(float(loss))
        found = cgx.explain(step, params, state, *batch, show=False).collectives
        sent = sum(c.bytes * c.times for c in found if c.function)
        print(f"{name}: loss {np.mean(losses[-10:]):.4f}, a device sends {sent:,} bytes of tokens in a step")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
