"""One of the processes that the tests in this folder start.

It joins the other processes, makes a mesh of all four devices, and does its action:

    python ranks.py ACTION PORT RANK PROCESSES HEARTBEAT

- collectives: runs every collective, and prints the digests of the results on each of its devices. Two processes then
  train with a local batch, with one made of all processes' parts, and with sharded weights.
- exchange, watch: sums until a sum fails, watch with cgx.watch.
- die, stop, leave: sums, and then kills itself, stops, or no longer takes part but stays alive.
"""

import ctypes
import hashlib
import json
import os
import signal
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

import jaxcgx as cgx

DEVICES = 4
AXES = ("node", "local")
SHAPES = {
    "w": ((300, 37), jnp.float32),
    "b": ((17,), jnp.float32),
    "scale": ((), jnp.float32),
    "half": ((3001,), jnp.bfloat16),
    "count": ((5,), jnp.int32),
}
ROWS = {"w": ((DEVICES, 3001), jnp.float32), "half": ((DEVICES, 5, 77), jnp.bfloat16)}


def key():
    """The key is not a constant, because that would start JAX before the processes have joined."""
    return jax.random.key(7)


def squares_of_all(x):
    leaves = jax.tree.leaves(cgx.compressed_all_gather(x, AXES, cgx.Raw()))
    return sum((leaf.astype(jnp.float32) ** 2).sum() for leaf in leaves)


def psum(axes=AXES, codec=cgx.MaxMin(4), keyed=False, **fields):
    plan = cgx.Plan.every(codec, **fields)
    return SHAPES, lambda x: cgx.compressed_psum(x, axes, plan, key=key() if keyed else None)


def differences(x):
    """Sends x, and then the difference of 2 x to what was sent."""
    codec, perm = cgx.MaxMin(4), [(0, 2), (3, 1), (1, 0)]
    carry = cgx.init_carry(codec, x, ends=True)
    for scale in (1, 2):
        scaled = jax.tree.map(lambda y, s=scale: s * y, x)
        moved, carry = cgx.compressed_ppermute(scaled, AXES, perm, codec, carry=carry)
    return moved | {f"sent {name}": y for name, y in carry.sent.items() if y is not None}


# Every case has the shapes of a rank's leaves, and the collective. Their programs are those of one process, which other
# tests compare with lax. So one case for each way of XLA's to move bytes is enough.
CASES = {
    "psum two_shot": psum(schedule="two_shot"),
    "psum ring": psum(schedule="ring"),
    "psum gather": psum(schedule="gather"),
    "psum hierarchy": psum(codec={"node": cgx.MaxMin(2, rounding="stochastic"), "local": cgx.AbsMax(8)}, keyed=True),
    "psum leader": psum(codec={"node": cgx.MaxMin(4), "local": cgx.Raw()}, leader=True),
    "psum over node": psum(axes="node"),
    "psum_scatter raw": (ROWS, lambda x: cgx.compressed_psum_scatter(x, AXES, cgx.Raw())),
    "gradient of all_gather raw": (ROWS, jax.grad(squares_of_all)),
    "pbroadcast": (SHAPES, lambda x: cgx.compressed_pbroadcast(x, AXES, 2, cgx.MaxMin(4))),
    "ppermute with a carry": (SHAPES, differences),
}


def random_leaf(name, shape, dtype):
    """Returns the leaf of every device, [devices, ...]. It is the same in every process."""
    numbers = np.random.default_rng(list(name.encode())).standard_normal((DEVICES, *shape), np.float32)
    return np.asarray(numbers * 100 if dtype == jnp.int32 else numbers, jnp.dtype(dtype))


def on_devices(mesh, array):
    sharding = NamedSharding(mesh, PartitionSpec(AXES))
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


def compiled(mesh, collective):
    """Returns a program of the collective for leaves [devices, ...], one per device."""

    def run(leaves):
        return jax.tree.map(lambda x: x[None], collective(jax.tree.map(lambda x: x[0], leaves)))

    # Without check_vma, results that should be the same on every device may be returned separately for each.
    spec = PartitionSpec(AXES)
    return jax.jit(jax.shard_map(run, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))


def given(mesh, shapes):
    return {name: on_devices(mesh, random_leaf(name, *what)) for name, what in shapes.items()}


def lowered(mesh, shapes, collective):
    return compiled(mesh, collective).lower(given(mesh, shapes)).as_text()


def digests(mesh, shapes, collective):
    """Returns {leaf: {device: digest of its bytes}} for this process's devices."""
    results = jax.block_until_ready(compiled(mesh, collective)(given(mesh, shapes)))
    return {
        name: {
            shard.index[0].start or 0: hashlib.sha256(np.asarray(shard.data).tobytes()).hexdigest()
            for shard in x.addressable_shards
        }
        for name, x in results.items()
    }


def sum_until(mesh, action):
    x = on_devices(mesh, random_leaf("w", (2**20,), jnp.float32))
    program = compiled(mesh, lambda x: cgx.compressed_psum(x, AXES, cgx.Plan.every(cgx.MaxMin(4), schedule="two_shot")))
    program(x).block_until_ready()
    if action in ("die", "stop"):
        number = signal.SIGKILL if action == "die" else signal.SIGSTOP
        threading.Timer(0.3, os.kill, (os.getpid(), number)).start()
    if action in ("watch", "leave"):
        program = cgx.watch(program, 1.0, end=4.0)
    for i in range(10**9):
        if action == "leave" and i == 3:
            time.sleep(10**6)
        program(x).block_until_ready()


def check_batches(mesh):
    """A process's own NumPy batch is refused before compilation. An array of all processes' parts is accepted."""

    def loss(params, model_state, batch):
        key, _ = jax.random.split(model_state["key"])
        new = {"mean": batch["x"].mean(0), "count": model_state["count"] + 1, "key": key}
        return (params * batch["x"]).sum() * batch["scale"], new

    sharding = cgx.Sharding(AXES)
    train = cgx.make_train_step(loss, optax.sgd(2.0), mesh, cgx.Raw(), sharding=sharding, model_state="mean")
    first = {"mean": jnp.zeros(3), "count": 0, "key": jax.random.key(5)}
    state, own = train.init(jnp.zeros(3), first), np.full((2, 3), 1 + jax.process_index(), np.float32)
    for batch in (own, jnp.asarray(own)):
        try:
            train.step(state, {"x": batch, "scale": 2.0})
        except ValueError as error:
            print("REFUSED", error, flush=True)
    made = jax.make_array_from_process_local_data(NamedSharding(mesh, PartitionSpec(AXES)), own)
    state, _ = train.step(state, {"x": made, "scale": 2.0})
    new = state.model_state
    print("PARAMETERS", np.asarray(state.params), flush=True)
    print("STATE", new["mean"].tolist(), new["count"], jax.random.key_data(new["key"]).tolist(), flush=True)
    asked = cgx.value_and_grad(lambda params, x: (params * x).sum(-1).mean(), AXES, cgx.MaxMin(4))
    with jax.set_mesh(mesh):
        try:
            asked(np.zeros(3, np.float32), own)
        except ValueError as error:
            print("REFUSED", error, flush=True)
        print("GRADIENTS", np.asarray(jax.jit(asked)(np.zeros(3, np.float32), made)[1]), flush=True)


def check_shards(mesh):
    """Weights are sharded over the devices of both processes."""
    sharding = cgx.Sharding(AXES, params=PartitionSpec(AXES), gather=cgx.MaxMin(8))
    loss = lambda w, x: (w * x.sum(0)).sum()
    train = cgx.make_train_step(loss, optax.sgd(1.0), mesh, cgx.MaxMin(8), sharding=sharding)
    own = np.full((2, 8), 1 + jax.process_index(), np.float32)
    batch = jax.make_array_from_process_local_data(NamedSharding(mesh, PartitionSpec(AXES)), own)
    state, _ = train.step(train.init(jnp.zeros(8)), batch)
    print("SHARDS", [shard.data.tolist() for shard in state.params.addressable_shards], flush=True)


def main():
    action, port, rank, processes, heartbeat = sys.argv[1], *map(int, sys.argv[2:])
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: end together with the parent
    jax.config.update("jax_num_cpu_devices", DEVICES // processes)
    if processes > 1:
        timeouts = dict(heartbeat_timeout_seconds=heartbeat, shutdown_timeout_seconds=heartbeat)
        jax.distributed.initialize(f"127.0.0.1:{port}", processes, rank, **timeouts)
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(2, DEVICES // 2), AXES)
    if action == "collectives":
        scatters = {name for name, case in CASES.items() if "reduce_scatter" in lowered(mesh, *case)}
        print("SCATTERS", json.dumps(sorted(scatters)))
        print("DIGESTS", json.dumps({name: digests(mesh, *case) for name, case in CASES.items()}), flush=True)
        if processes > 1:
            check_batches(mesh)
            check_shards(mesh)
    else:
        sum_until(mesh, action)


if __name__ == "__main__":
    main()
