"""Trains a model of Flax NNX: replicated on every device, sharded over them (FSDP), and as ranks that share a device.

`python training.py PROCESS ADDRESS` trains as one of two processes.
"""

import dataclasses
import functools
import sys

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxcgx as cgx

STEPS = 10
PLAN = cgx.Plan(cgx.MaxMin(4, 128), [("second/kernel", cgx.TopK(0.3))], min_size=100)
X = np.random.RandomState(0).standard_normal((48, 32)).astype(np.float32)
OPTIMIZER = optax.sgd(0.3)  # unlike Adam, SGD learns differently if gradients have another scale


class Model(nnx.Module):
    def __init__(self, rngs):
        self.first, self.second = nnx.Linear(32, 48, rngs=rngs), nnx.Linear(48, 4, rngs=rngs)

    def __call__(self, x):
        return self.second(nnx.relu(self.first(x)))


@functools.cache  # jax.distributed must begin before there are arrays
def model():
    return nnx.split(Model(nnx.Rngs(0)), nnx.Param)


def loss_fn(params, x):
    return ((nnx.merge(model()[0], params)(x) - x[:, :4]) ** 2).mean()


def run(step, state, batch):
    """Returns the loss of each step, and the kernels in its program."""
    text = step.lower(state, batch).as_text()
    losses = []
    for _ in range(STEPS):
        state, metrics = step(state, batch)
        losses.append(float(getattr(metrics, "loss", metrics)))  # CPUs wait for every step
    return np.array(losses), {name for name in ("encode", "decode", "reduce") if f"@jaxcgx_{name}" in text}


def train_step(devices, plan, sharded):
    mesh = jax.make_mesh((len(devices),), ("data",), axis_types=(AxisType.Auto,), devices=devices)
    params = jax.tree.map(np.asarray, model()[1])
    sharding = cgx.Sharding(params=cgx.shard_specs(params, mesh, min_size=100) if sharded else None)
    if not sharded:
        plan = dataclasses.replace(plan, schedule="two_shot")
    train = cgx.make_train_step(loss_fn, OPTIMIZER, mesh, plan, sharding=sharding)
    batch = jax.make_array_from_callback(X.shape, NamedSharding(mesh, P("data")), lambda at: X[at])
    return run(train.step, train.init(params), batch)


def ranks_of_one_device(device, plan):
    """Trains four ranks of vmap. One device runs all kernels of the exchange."""

    @jax.jit
    def step(state, batch):
        params, state = state

        def rank(x):
            loss, grads = jax.value_and_grad(loss_fn)(params, x)
            return loss, cgx.compressed_pmean(grads, "data", dataclasses.replace(plan, schedule="two_shot"))

        losses, grads = jax.vmap(rank, axis_name="data")(batch.reshape(4, -1, X.shape[1]))
        updates, state = OPTIMIZER.update(jax.tree.map(lambda g: g[0], grads), state, params)
        return (optax.apply_updates(params, updates), state), losses.mean()

    params = model()[1]
    return run(step, *jax.device_put(((params, OPTIMIZER.init(params)), X), device))


def check(losses):
    """Compressed steps learn like plain ones, and their programs have the kernels."""
    (plain, _), (found, kernels) = (losses(plan) for plan in (cgx.Plan.every(cgx.Raw()), PLAN))
    assert plain[-1] < 0.8 * plain[0]
    assert kernels == {"encode", "decode", "reduce"}
    np.testing.assert_allclose(found[0], plain[0], rtol=1e-5)
    np.testing.assert_allclose(found, plain, rtol=0.2)


def check_train_step(devices):
    for sharded in (False, True):
        check(lambda plan: train_step(devices, plan, sharded))


def check_ranks_of_one_device(device):
    check(lambda plan: ranks_of_one_device(device, plan))


if __name__ == "__main__":
    jax.distributed.initialize(sys.argv[2], 2, int(sys.argv[1]), local_device_ids=[0])
    check_train_step(jax.devices())
    print("rank", sys.argv[1], "agrees")
