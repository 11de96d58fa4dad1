"""Trains a Keras model with Dropout and batch norm, in a step that jax.jit compiles.

One changed line compresses the gradients, and `aux_specs` says which of Keras' variables are random keys.

    pip install ".[examples]" keras
    python examples/keras_train.py
"""

import os
import sys

import jax
import numpy as np
from sklearn.datasets import load_digits

import jaxcgx as cgx

os.environ["KERAS_BACKEND"] = "jax"
import keras


def make_step(model, optimizer, mesh):
    error = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def loss_fn(trainable, others, x, y):
        logits, others = model.stateless_call(trainable, others, x, training=True)
        return error(y, logits), others

    # The other variables: batch norm's statistics, which are averaged over the ranks, and seeds of random numbers.
    kinds = ["key" if v.dtype == "uint32" else "mean" for v in model.non_trainable_variables]
    specs = dict(aux_specs=kinds, batch_specs=(jax.P(), jax.P("data"), jax.P("data")))
    value_and_grad = cgx.value_and_grad(loss_fn, "data", cgx.MaxMin(4), has_aux=True, mesh=mesh, **specs)

    @jax.jit
    def step(state, x, y):
        trainable, others, moments = state
        (loss, others), grads = value_and_grad(trainable, others, x, y)  # was jax.value_and_grad
        trainable, moments = optimizer.stateless_apply(moments, grads, trainable)
        return (trainable, others, moments), loss

    return step


def main(steps):
    digits = load_digits()
    images, labels = digits.data.astype(np.float32) / 16, digits.target
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    keras.utils.set_random_seed(0)
    layers = keras.layers
    hidden = layers.Dense(256), layers.BatchNormalization(momentum=0.9), layers.ReLU(), layers.Dropout(0.2)
    model = keras.Sequential([keras.Input((64,)), *hidden, layers.Dense(10)])
    optimizer = keras.optimizers.Adam(1e-3)
    optimizer.build(model.trainable_variables)
    variables = model.trainable_variables, model.non_trainable_variables, optimizer.variables
    step = make_step(model, optimizer, mesh)
    state = tuple([v.value for v in each] for each in variables)
    rng = np.random.default_rng(0)
    for i in range(steps):
        chosen = rng.integers(1400, size=128)
        batch = jax.device_put((images[chosen], labels[chosen]), jax.NamedSharding(mesh, jax.P("data")))
        # Wait for every step: virtual devices share a thread pool, which a second step in flight can exhaust.
        state, loss = jax.block_until_ready(step(state, *batch))
        if i % 50 == 0 or i == steps - 1:
            print(f"step {i}: loss {loss:.4f}")
    sent = cgx.explain(step, state, *batch, show=False)
    print(f"a device sends {sent.bytes:,} bytes in a step, uncompressed {sent.raw_bytes:,}")
    predictions, _ = model.stateless_call(*state[:2], images[1400:], training=False)
    print(f"test accuracy {(np.argmax(predictions, -1) == labels[1400:]).mean():.1%}")


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 4)  # used if JAX finds no accelerator
    cgx.keep_pages()
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 300)
