"""Trains an Equinox model with eqx.filter_jit and compressed gradients.

One changed line compresses the gradients. The model learns to read handwritten digits, on all devices of JAX.

    pip install ".[examples]" equinox
    python examples/equinox_train.py
"""

import sys

import equinox as eqx
import jax
import numpy as np
import optax
from sklearn.datasets import load_digits

import jaxcgx as cgx

optimizer = optax.adam(1e-3)


def loss_fn(model, x, y):
    return optax.softmax_cross_entropy_with_integer_labels(jax.vmap(model)(x), y).mean()


@eqx.filter_jit
def train_step(model, state, x, y):
    loss, grads = cgx.value_and_grad(loss_fn, "data", cgx.MaxMin(4))(model, x, y)  # was eqx.filter_value_and_grad
    updates, state = optimizer.update(grads, state, model)
    return eqx.apply_updates(model, updates), state, loss


def main(steps):
    digits = load_digits()
    images, labels = digits.data.astype(np.float32) / 16, digits.target
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    model = eqx.nn.MLP(64, 10, 256, 2, key=jax.random.key(0))
    state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))
    rng = np.random.default_rng(0)
    with jax.set_mesh(mesh):
        for i in range(steps):
            chosen = rng.integers(1400, size=128)
            batch = jax.device_put((images[chosen], labels[chosen]), jax.NamedSharding(mesh, jax.P("data")))
            # Wait for every step: virtual devices share a thread pool, which a second step in flight can exhaust.
            model, state, loss = jax.block_until_ready(train_step(model, state, *batch))
            if i % 50 == 0 or i == steps - 1:
                print(f"step {i}: loss {loss:.4f}")
        sent = cgx.explain(train_step, model, state, *batch, show=False)
    print(f"a device sends {sent.bytes:,} bytes in a step, uncompressed {sent.raw_bytes:,}")
    predictions = jax.vmap(model)(images[1400:])
    print(f"test accuracy {(predictions.argmax(-1) == labels[1400:]).mean():.1%}")


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 4)  # used if JAX finds no accelerator
    cgx.keep_pages()
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 300)
