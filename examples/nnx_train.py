"""Trains a Flax NNX model with nnx.jit and nnx.Optimizer.

One changed line compresses the gradients.

    pip install ".[examples]" flax
    python examples/nnx_train.py
"""

import sys

import jax
import numpy as np
import optax
from flax import nnx
from sklearn.datasets import load_digits

import jaxcgx as cgx


def loss_fn(model, x, y):
    return optax.softmax_cross_entropy_with_integer_labels(model(x), y).mean()


@nnx.jit
def train_step(model, optimizer, x, y):
    loss, grads = cgx.value_and_grad(loss_fn, "data", cgx.MaxMin(4))(model, x, y)  # was nnx.value_and_grad
    optimizer.update(model, grads)
    return loss


def main(steps):
    digits = load_digits()
    images, labels = digits.data.astype(np.float32) / 16, digits.target
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    rngs = nnx.Rngs(0)
    model = nnx.Sequential(
        nnx.Linear(64, 256, rngs=rngs),
        nnx.BatchNorm(256, axis_name="data", rngs=rngs),  # statistics of the whole batch
        nnx.relu,
        nnx.Dropout(0.2, rngs=rngs),  # every rank draws its own noise
        nnx.Linear(256, 10, rngs=rngs),
    )
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
    rng = np.random.default_rng(0)
    with jax.set_mesh(mesh):
        for i in range(steps):
            chosen = rng.integers(1400, size=128)
            batch = jax.device_put((images[chosen], labels[chosen]), jax.NamedSharding(mesh, jax.P("data")))
            # Wait for every step: virtual devices share a thread pool, which a second step in flight can exhaust.
            loss = jax.block_until_ready(train_step(model, optimizer, *batch))
            if i % 50 == 0 or i == steps - 1:
                print(f"step {i}: loss {loss:.4f}")
        sent = cgx.explain(train_step, model, optimizer, *batch, show=False)
    print(f"a device sends {sent.bytes:,} bytes in a step, uncompressed {sent.raw_bytes:,}")
    predictions = nnx.view(model, deterministic=True, use_running_average=True)(images[1400:])
    print(f"test accuracy {(predictions.argmax(-1) == labels[1400:]).mean():.1%}")


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 4)  # used if JAX finds no accelerator
    cgx.keep_pages()
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 300)
