"""Centres that exchange 4-bit outer gradients once in 20 steps, against an uncompressed exchange in every step.

pip install ".[examples]"
python examples/wan/diloco.py [STEPS]
"""

import sys

import jax
import numpy as np
import optax
from jax.sharding import AxisType
from sklearn.datasets import load_digits

import jaxcgx as cgx

EVERY = 20


def init_params(key):
    first, second = jax.random.split(key)
    return {"in": jax.random.normal(first, (64, 256)) / 8, "out": jax.random.normal(second, (256, 10)) / 16}


def loss_fn(params, batch):
    images, labels = batch
    logits = jax.nn.relu(images @ params["in"]) @ params["out"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def train(steps, inner, data, **options):
    """The loss of the parameters on all data, and the bytes of all collectives in the program."""
    mesh = jax.make_mesh((2,), ("dc",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    step = cgx.make_train_step(loss_fn, inner, mesh, data_axis="dc", **options)
    params, state = step.init(init_params(jax.random.key(0)))
    sent = cgx.explain(step.step, params, state, [each[:64] for each in data], show=False).bytes
    rng = np.random.default_rng(0)
    for _ in range(steps):
        chosen = rng.integers(0, len(data[0]), 64)
        params, state, _ = jax.block_until_ready(step.step(params, state, [each[chosen] for each in data]))
    return float(loss_fn(params, data)), sent


def main(steps=200):
    digits = load_digits()
    data = (digits.data / 16).astype(np.float32), digits.target.astype(np.int32)
    inner = optax.adam(1e-3)
    dense, all_bytes = train(steps, inner, data, plan=cgx.Raw())
    diloco = cgx.wan.diloco(inner, "sgd", every=EVERY, plan=cgx.MaxMin(4))
    loss, sent = train(steps, inner, data, diloco=diloco)
    print(f"every step, float32: loss {dense:.3f}, {all_bytes:,} bytes a step")
    print(f"every {EVERY} steps, 4 bits: loss {loss:.3f}, {sent / EVERY:,.0f} bytes a step")


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 2)
    main(*map(int, sys.argv[1:]))
