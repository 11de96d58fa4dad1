"""Trains with FSDP, with compressed weights and gradients.

Each device keeps a shard of the weights and of the optimizer state. The forward pass gathers the weights with 8 bits
per element. The backward pass sends the gradients with 4 bits per element to the devices that own the shards. The
script trains on scikit-learn's handwritten digits, first without compression and then with it. It prints the bytes that
a device sends in a step.

    pip install ".[examples]"
    python examples/fsdp.py
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import jaxcgx as cgx

# Pixels, two hidden layers, classes. Only 10 of the 16 classes occur: with 16, the number of devices divides each size.
SIZES = 64, 512, 256, 16
BATCH_PER_DEVICE = 32


def init_params(seed=0):
    keys = jax.random.split(jax.random.key(seed), len(SIZES) - 1)
    return [
        dict(w=jax.random.normal(k, (m, n)) * (2 / m) ** 0.5, b=jnp.zeros(n)) for k, m, n in zip(keys, SIZES, SIZES[1:])
    ]


def loss_fn(params, images, labels):
    for layer in params[:-1]:
        images = jax.nn.relu(images @ layer["w"] + layer["b"])
    logits = images @ params[-1]["w"] + params[-1]["b"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean(), (logits.argmax(-1) == labels).mean()


def make_step(optimizer, mesh, weights, gradients):
    """Returns a training step that gathers weights with one codec and sends gradients with another."""

    def step(shards, state, images, labels, key):
        def local_loss(shards):
            params = cgx.compressed_all_gather(shards, "data", weights, tiled=True, backward_plan=gradients, key=key)
            return loss_fn(params, images, labels)

        (loss, _), grads = jax.value_and_grad(local_loss, has_aux=True)(shards)
        # The backward pass of a gather sums the gradients of all devices. The optimizer gets their mean.
        grads = jax.tree.map(lambda g: g / lax.axis_size("data"), grads)
        updates, state = optimizer.update(grads, state, shards)
        return optax.apply_updates(shards, updates), state, lax.pmean(loss, "data")

    return jax.jit(
        jax.shard_map(
            step,
            mesh=mesh,
            in_specs=(P("data"), P("data"), P("data"), P("data"), P()),
            out_specs=(P("data"), P("data"), P()),
        ),
        donate_argnums=(0, 1),
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--devices", type=int, default=4, choices=(2, 4, 8, 16), help="virtual CPU devices")
    parser.add_argument("--steps", type=int, default=300)
    args = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    cgx.keep_pages()
    jax.config.update("jax_num_cpu_devices", args.devices)

    digits = load_digits()
    images, test_images, labels, test_labels = train_test_split(
        digits.data.astype(np.float32) / 16, digits.target, test_size=0.25, random_state=0, stratify=digits.target
    )
    mesh = jax.make_mesh((args.devices,), ("data",), axis_types=(AxisType.Auto,))
    optimizer = optax.sgd(0.05, momentum=0.9)
    key = jax.random.key(0)

    for name, weights, gradients, draws in (
        ("float32", cgx.Raw(), cgx.Raw(), False),
        ("8-bit weights, 4-bit gradients", cgx.MaxMin(8), cgx.MaxMin(4, rounding="stochastic"), True),
    ):
        step = make_step(optimizer, mesh, weights, gradients)
        shards = jax.device_put(init_params(), NamedSharding(mesh, P("data")))
        state = jax.jit(optimizer.init)(shards)
        rng = np.random.default_rng(0)
        for number in range(args.steps):
            chosen = rng.choice(len(images), args.devices * BATCH_PER_DEVICE, replace=False)
            batch = images[chosen], labels[chosen], jax.random.fold_in(key, number) if draws else None
            if number == 0:
                sent = cgx.explain(step, shards, state, *batch, show=False).bytes
            # Wait for every step: virtual devices share a thread pool, which a second step in flight can exhaust.
            shards, state, _ = jax.block_until_ready(step(shards, state, *batch))
        accuracy = loss_fn(jax.device_get(shards), test_images, test_labels)[1]
        print(f"{name:<32} test accuracy {accuracy:.1%}   a device sends {sent:,} bytes in a step")


if __name__ == "__main__":
    main()
