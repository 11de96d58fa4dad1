"""A rank that test_crossing.py starts:

    python diloco_rank.py PORT RANK CENTERS LOCAL FOLDER

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

EVERY, FRAGMENTS, OVERLAP, STEPS = 8, 2, 2, 14  # no exchange is in progress after these steps
LIMIT = 100  # seconds


class Run:
    """Training over some centers.

    Attributes:
      state: [parameters, state].
    """

    def __init__(self, axis, centers, local):
        sizes, names = ((centers, local), ("dc", "local")) if local > 1 else ((centers,), ("dc",))
        devices = jax.devices()[: centers * local]
        mesh = jax.make_mesh(sizes, names, axis_types=(AxisType.Auto,) * len(names), devices=devices)
        inner = optax.sgd(0.5, momentum=0.9)
        plan = cgx.Plan(cgx.MaxMin(4, 64, "stochastic"), min_size=100)
        options = dict(every=EVERY, fragments=FRAGMENTS, overlap=OVERLAP, alpha=0.5, telemetry=True)
        given = cgx.wan.diloco(inner, axis_name=axis, plan=plan, **options)
        loss = lambda p, x: ((jnp.tanh(x @ p["up"]) @ p["down"] + p["b"] - x) ** 2).mean()
        self.steps = cgx.make_train_step(loss, inner, mesh, data_axis=names, diloco=given, donate=False)
        numbers = np.random.RandomState(0).standard_normal
        shapes = {"up": (30, 40), "down": (40, 30), "b": (30,)}
        self.state = self.steps.init({name: np.float32(0.3 * numbers(shape)) for name, shape in shapes.items()})
        batch = np.float32(numbers((16, 30)))
        self.batch = jax.make_array_from_callback(batch.shape, NamedSharding(mesh, P(names)), lambda at: batch[at])

    def step(self):
        *self.state, _ = jax.block_until_ready(self.steps.step(*self.state, self.batch))

    def digests(self):
        """Returns {device: digest of its last arrays}."""
        found = {}
        params, state = self.state
        each = [(x.outer, x.sent.residuals, x.telemetry) for x in state.exchanges]
        for leaf in jax.tree.leaves((params, state.centers, each)):
            for shard in leaf.addressable_shards:
                digest = found.setdefault(str(jax.devices().index(shard.device)), hashlib.sha256())
                digest.update(np.asarray(shard.data).tobytes())
        return {device: digest.hexdigest() for device, digest in found.items()}


def train(axis, centers, local):
    run = Run(axis, centers, local)
    for _ in range(STEPS):
        run.step()
    return run.digests()


def own(tree):
    """Returns this process's shards of a tree."""
    return [np.asarray(shard.data) for x in jax.tree.leaves(tree) for shard in x.addressable_shards]


def restored_in_mid_exchange(run, path):
    """Restores a state that was saved in mid-exchange, and takes the step in which the exchange would have ended.

    Returns (whether an exchange was in progress, whether the step changes [the outer parameters, the state of the
    exchanges, a center's own parameters]).
    """
    import orbax.checkpoint as ocp

    for _ in range(EVERY // FRAGMENTS - OVERLAP + 1):
        run.step()
    begun = [x.waiting.begun for x in run.state[1].exchanges]
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, tuple(run.state))
    run.state = before = cgx.restore_state(path, tuple(run.state))
    run.step()
    differ = lambda part: any((a != b).any() for a, b in zip(own(part(before)), own(part(run.state)), strict=True))
    parts = lambda x: x[0], lambda x: [each._replace(waiting=None) for each in x[1].exchanges], lambda x: x[1].centers
    return any(x.any() for x in own(begun)), [differ(part) for part in parts]


def main():
    port, rank, centers, local = map(int, sys.argv[1:5])
    folder = pathlib.Path(sys.argv[5])
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: end together with the parent
    jax.config.update("jax_num_cpu_devices", 1)
    jax.distributed.initialize(f"127.0.0.1:{port}", centers * local, rank)
    passed, begins, run = folder / "passed", EVERY // FRAGMENTS, Run(cgx.Tcp("dc"), centers, local)
    for t in range(1, STEPS + 1):
        deadline = time.monotonic() + LIMIT
        while rank // local == centers - 1 and t == begins and not passed.exists():
            if time.monotonic() > deadline:
                raise TimeoutError("the first center waits for an exchange that it began")
            time.sleep(0.02)
        run.step()
        if rank == 0 and t == begins + OVERLAP - 1:
            passed.touch()
    print("RESULT", json.dumps([run.digests(), restored_in_mid_exchange(run, folder / "state")]), flush=True)


if __name__ == "__main__":
    main()
