"""Trains a Flax Linen model with jax.jit, a TrainState and compressed gradients.

One changed line compresses the gradients. The model learns to read handwritten digits, on all devices of JAX.

    pip install ".[examples]" flax
    python examples/trainstate_train.py
"""

import sys

import jax
import numpy as np
import optax
from flax import linen as nn
from flax.training.train_state import TrainState
from sklearn.datasets import load_digits

import jaxcgx as cgx

model = nn.Sequential([nn.Dense(256), nn.relu, nn.Dense(256), nn.relu, nn.Dense(10)])


def loss_fn(params, x, y):
    logits = model.apply({"params": params}, x)
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


@jax.jit
def train_step(state, x, y):
    loss, grads = cgx.value_and_grad(loss_fn, "data", cgx.MaxMin(4))(state.params, x, y)  # was jax.value_and_grad
    return state.apply_gradients(grads=grads), loss


def main(steps):
    digits = load_digits()
    images, labels = digits.data.astype(np.float32) / 16, digits.target
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    params = model.init(jax.random.key(0), images[:1])["params"]
    state = TrainState.create(apply_fn=model.apply, params=params, tx=optax.adam(1e-3))
    rng = np.random.default_rng(0)
    with jax.set_mesh(mesh):
        for i in range(steps):
            chosen = rng.integers(1400, size=128)
            batch = jax.device_put((images[chosen], labels[chosen]), jax.NamedSharding(mesh, jax.P("data")))
            # Wait for every step: virtual devices share a thread pool, which a second step in flight can exhaust.
            state, loss = jax.block_until_ready(train_step(state, *batch))
            if i % 50 == 0 or i == steps - 1:
                print(f"step {i}: loss {loss:.4f}")
        sent = cgx.explain(train_step, state, *batch, show=False)
    print(f"a device sends {sent.bytes:,} bytes in a step, uncompressed {sent.raw_bytes:,}")
    predictions = model.apply({"params": state.params}, images[1400:])
    print(f"test accuracy {(predictions.argmax(-1) == labels[1400:]).mean():.1%}")


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 4)  # used if JAX finds no accelerator
    cgx.keep_pages()
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 300)
