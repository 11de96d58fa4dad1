"""Sums and training steps of two processes over Tcp, each on one device. Prints the digest of every result.

    python tcp.py PROCESS ADDRESS

On GPUs, both processes may share one.
"""

import hashlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxcgx as cgx

PROCESSES, STEPS, TCP = 2, 4, cgx.Tcp("data", timeout=60)
SHAPES = {
    "w": ((300, 37), jnp.float32),
    "half": ((3001,), jnp.bfloat16),
    "s": ((), jnp.float32),
    "big": ((2**20,), "f4"),
}
PLANS = {
    "two_shot": cgx.Plan.every(cgx.MaxMin(4), schedule="two_shot"),
    "encoded": cgx.Plan.every(cgx.MaxMin(4, 128, "stochastic"), schedule="two_shot", own="encoded"),
    "one_shot": cgx.Plan.every(cgx.Float8(), schedule="one_shot"),
    "ring": cgx.Plan.every(cgx.MaxMin(4), schedule="ring"),
    "Raw": cgx.Plan.every(cgx.Raw()),
    "Lossless": cgx.Plan.every(cgx.Lossless()),
    "TopK": cgx.Plan.every(cgx.TopK(0.1)),
    "bits": cgx.Plan(cgx.MaxMin(4), [("half", cgx.MaxMin(8))], min_size=100),
}
# The gradient of the loss is the mean of the batch, without a product that a platform might fuse with a sum.
TRAINING = {
    "feedback": dict(exchange=cgx.MaxMin(4)),
    "backward": dict(exchange=cgx.MaxMin(4), overlap="backward"),
    "Priority": dict(exchange=cgx.MaxMin(4), overlap=cgx.Priority()),
    "DGC": dict(exchange=cgx.DGC(0.1)),
}


def rows(process):
    r = np.random.RandomState(process)
    return {name: r.standard_normal((1, *shape)).astype(dtype) for name, (shape, dtype) in SHAPES.items()}


def digest(tree):
    found = hashlib.sha256()
    for x in jax.tree.leaves(tree):
        found.update(np.ascontiguousarray(x.addressable_shards[0].data).tobytes())
    return found.hexdigest()[:16]


def main():
    process, address = int(sys.argv[1]), sys.argv[2]
    jax.distributed.initialize(address, PROCESSES, process, local_device_ids=[0])
    mesh = jax.make_mesh((PROCESSES,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices())
    split = NamedSharding(mesh, P("data"))
    x = jax.tree.map(lambda row: jax.make_array_from_process_local_data(split, row), rows(process))
    for name, plan in PLANS.items():

        def exchanged(x, plan=plan, key=jax.random.key(3) if name == "encoded" else None):
            sums = cgx.compressed_psum(jax.tree.map(lambda x: x[0], x), TCP, plan, key=key)
            return jax.tree.map(lambda x: x[None], sums)

        sums = jax.jit(jax.shard_map(exchanged, mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=False))
        print(name, digest(sums(x)), flush=True)
    params = {name: jnp.zeros(shape, dtype) for name, (shape, dtype) in SHAPES.items()}
    for name, options in TRAINING.items():
        train = cgx.make_train_step(
            lambda params, batch: sum((p * x).mean(0).sum() for p, x in zip(params.values(), batch.values())),
            optax.sgd(1.0),
            mesh,
            sharding=cgx.Sharding(TCP),
            **options,
        )
        state = train.init(params)
        for _ in range(STEPS):
            state, _ = train.step(state, x)
        print(name, digest(train.finish(state).params), flush=True)


if __name__ == "__main__":
    main()
