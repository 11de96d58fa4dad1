"""A center that test_crossing.py starts:

    python diloco_rank.py PORT RANK CENTERS FOLDER

An exchange begins in some step. The last center reaches this step only after the first center has done the next step.
"""

import ctypes
import hashlib
import json
import pathlib
import signal
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxcgx as cgx

EVERY, FRAGMENTS, OVERLAP, STEPS = 8, 2, 2, 13
LIMIT = 100  # seconds


def train(axis, centers, before=lambda t: None, after=lambda t: None):
    """Returns {device: digest of its last arrays}. `before` and `after` are called with the number of each step."""
    mesh = jax.make_mesh((centers,), ("dc",), axis_types=(AxisType.Auto,), devices=jax.devices()[:centers])
    inner = optax.sgd(0.5, momentum=0.9)
    plan = cgx.Plan(cgx.MaxMin(4, 64, "stochastic"), min_size=100)
    given = cgx.wan.diloco(
        inner, every=EVERY, axis_name=axis, plan=plan, fragments=FRAGMENTS, overlap=OVERLAP, alpha=0.5, telemetry=True
    )
    loss = lambda p, x: ((jnp.tanh(x @ p["up"]) @ p["down"] + p["b"] - x) ** 2).mean()
    steps = cgx.make_train_step(loss, inner, mesh, data_axis="dc", diloco=given)
    numbers = np.random.RandomState(0).standard_normal
    shapes = {"up": (30, 40), "down": (40, 30), "b": (30,)}
    params, state = steps.init({name: np.float32(0.3 * numbers(shape)) for name, shape in shapes.items()})
    batch = np.float32(numbers((16, 30)))
    batch = jax.make_array_from_callback(batch.shape, NamedSharding(mesh, P("dc")), lambda at: batch[at])
    for t in range(1, STEPS + 1):
        before(t)
        params, state, _ = jax.block_until_ready(steps.step(params, state, batch))
        after(t)
    found = {}
    each = [(x.outer, x.sent.residuals, x.telemetry) for x in state.exchanges]
    for leaf in jax.tree.leaves((params, state.centers, each)):
        for shard in leaf.addressable_shards:
            digest = found.setdefault(str(jax.devices().index(shard.device)), hashlib.sha256())
            digest.update(np.asarray(shard.data).tobytes())
    return {device: digest.hexdigest() for device, digest in found.items()}


def main():
    port, rank, centers = map(int, sys.argv[1:4])
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: end together with the parent
    jax.config.update("jax_num_cpu_devices", 1)
    jax.distributed.initialize(f"127.0.0.1:{port}", centers, rank)
    passed = pathlib.Path(sys.argv[4], "passed")
    begins = EVERY // FRAGMENTS

    def before(t):
        deadline = time.monotonic() + LIMIT
        while rank == centers - 1 and t == begins and not passed.exists():
            if time.monotonic() > deadline:
                raise TimeoutError("the first center waits for an exchange that it began")
            time.sleep(0.02)

    def after(t):
        if rank == 0 and t == begins + OVERLAP - 1:
            passed.touch()

    print("RESULT", json.dumps(train(cgx.Tcp("dc"), centers, before, after)), flush=True)


if __name__ == "__main__":
    main()
