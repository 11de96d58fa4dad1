"""A rank that test_crossing.py starts:

    python diloco_rank.py FORM PORT RANK CENTERS LOCAL FOLDER

FORM is

- streaming, eager: an exchange begins in some step. The last center reaches this step only after the first center has
  done the next step.
- dies: the last center kills itself in mid-round. The first one prints the error of its step.
- settings: two centers make trainings whose settings differ, and print the errors of `init`.
"""

import ctypes
import hashlib
import json
import os
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

EVERY, FRAGMENTS, OVERLAP = 8, 2, 2
STEPS = {"streaming": 14, "eager": 22}  # no exchange is in progress after 14 steps. 20 steps have applied residuals
LIMIT = 400  # seconds
DIES = 10  # steps of the center that dies. Two exchanges have ended then
# {name: settings of each center}
SETTINGS = {
    "every": [dict(every=10), dict(every=5)],
    "fragments": [dict(every=4, fragments=2), dict(every=4)],
    "alpha": [dict(every=4, overlap=1), dict(every=4, overlap=1, alpha=0.5)],
    "outer": [dict(outer="sgd"), dict(outer="nesterov")],
    "rate": [dict(outer=optax.sgd(0.5)), dict(outer=optax.sgd(0.25))],
    "k2": [dict(k1=2, k2=2), dict(k1=2, k2=3)],
    "form": [dict(k1=2, k2=2), dict(every=4, outer="sgd")],
    "same": [dict(every=4, outer=optax.adam(0.5)), dict(every=4, outer=optax.adam(0.5))],
}


class Run:
    """Training over some centers.

    Attributes:
      state: the TrainState.
    """

    def __init__(self, axis, centers, local, form):
        sizes, names = ((centers, local), ("dc", "local")) if local > 1 else ((centers,), ("dc",))
        devices = jax.devices()[: centers * local]
        mesh = jax.make_mesh(sizes, names, axis_types=(AxisType.Auto,) * len(names), devices=devices)
        inner = optax.sgd(0.5, momentum=0.9)
        plan = cgx.Plan(cgx.MaxMin(4, 64, "stochastic"), min_size=100)
        options = dict(fragments=FRAGMENTS, telemetry=True)
        options |= dict(eager=True) if form == "eager" else dict(overlap=OVERLAP, alpha=0.5, forward="bfloat16")
        rounds, sharding = cgx.wan.Diloco(plan, EVERY, **options), cgx.Sharding((axis, *names[1:]))
        loss = lambda p, x: ((jnp.tanh(x @ p["up"]) @ p["down"] + p["b"] - x) ** 2).mean()
        self.steps = cgx.make_train_step(loss, inner, mesh, rounds, sharding=sharding, donate=False)
        numbers = np.random.RandomState(0).standard_normal
        shapes = {"up": (30, 40), "down": (40, 30), "b": (30,)}
        self.state = self.steps.init({name: np.float32(0.3 * numbers(shape)) for name, shape in shapes.items()})
        batch = np.float32(numbers((16, 30)))
        self.batch = jax.make_array_from_callback(batch.shape, NamedSharding(mesh, P(names)), lambda at: batch[at])

    def step(self):
        self.state, _ = jax.block_until_ready(self.steps.step(self.state, self.batch))

    def digests(self):
        """Returns {device: digest of its last arrays}, without those that change when an exchange in progress ends."""
        found = {}
        sent = self.state.exchange
        each = [(x.shared.outer, x.shared.telemetry, x.own.start or x.own.residuals) for x in sent.parts]
        for leaf in jax.tree.leaves((self.state.params, sent._replace(parts=()), self.state.opt_state, each)):
            for shard in leaf.addressable_shards:
                digest = found.setdefault(str(jax.devices().index(shard.device)), hashlib.sha256())
                digest.update(np.asarray(shard.data).tobytes())
        return {device: digest.hexdigest() for device, digest in found.items()}


def train(axis, centers, local, form):
    run = Run(axis, centers, local, form)
    for _ in range(STEPS[form]):
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
    begun = [x.own.waiting.begun for x in run.state.exchange.parts]
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, run.state)
    run.state = before = cgx.restore_state(path, run.state)
    run.step()
    differ = lambda part: any((a != b).any() for a, b in zip(own(part(before)), own(part(run.state)), strict=True))
    rounds = lambda x: [(each.own._replace(waiting=None), each.shared) for each in x.exchange.parts]
    parts = lambda x: x.params, rounds, lambda x: x.exchange.params
    return any(x.any() for x in own(begun)), [differ(part) for part in parts]


def end_without(run, last, path):
    """Trains until the last center dies.

    Returns (the error of a step, the number of this step, its seconds, whether its inputs can be saved as they were).
    """
    is_key = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    arrays = lambda: own([x for x in jax.tree.leaves(run.state) if not is_key(x)])
    t = 0
    while True:
        t += 1
        if last and t > DIES:
            os.kill(os.getpid(), signal.SIGKILL)
        before, start = arrays(), time.monotonic()
        try:
            run.step()
        except jax.errors.JaxRuntimeError as error:
            seconds = time.monotonic() - start
            np.savez(path, *arrays())
            with np.load(path) as saved:
                same = [x.tobytes() == saved[f"arr_{i}"].tobytes() for i, x in enumerate(before)]
            return str(error), t, seconds, all(same) and len(same) == len(saved.files)


def refused(settings, axis_type=AxisType.Auto):
    """Returns the error of `init` with these settings, or "none"."""
    mesh = jax.make_mesh((2,), ("dc",), axis_types=(axis_type,))
    form, given = (cgx.wan.HFA, {}) if "k1" in settings else (cgx.wan.Diloco, dict(every=500))
    loss = lambda params, x: ((x @ params["w"]) ** 2).mean()
    rounds, sharding = form(cgx.Raw(), **given | settings), cgx.Sharding("dc")
    train = cgx.make_train_step(loss, optax.sgd(0.5), mesh, rounds, sharding=sharding)
    params = {"w": jnp.ones((6, 4)), "n": jnp.ones(3)}
    jax.eval_shape(train.init, params)
    try:
        train.init(params)
    except ValueError as error:
        return str(error)
    return "none"


def main():
    form, *numbers, folder = sys.argv[1:]
    port, rank, centers, local = map(int, numbers)
    folder = pathlib.Path(folder)
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: end together with the parent
    jax.config.update("jax_num_cpu_devices", 1)
    jax.distributed.initialize(f"127.0.0.1:{port}", centers * local, rank)
    if form == "settings":
        found = {name: refused(given[rank]) for name, given in SETTINGS.items()}
        print("RESULT", json.dumps(found | {"explicit": refused({}, AxisType.Explicit)}), flush=True)
        return
    passed, begins = folder / "passed", EVERY // FRAGMENTS
    run = Run(cgx.Tcp("dc", timeout=LIMIT), centers, local, form)
    if form == "dies":
        print("RESULT", json.dumps(end_without(run, rank == centers - 1, folder / "state.npz")), flush=True)
        os._exit(0)  # JAX would wait for the other center
    for t in range(1, STEPS[form] + 1):
        deadline = time.monotonic() + LIMIT
        while rank // local == centers - 1 and t == begins and not passed.exists():
            if time.monotonic() > deadline:
                raise TimeoutError("the first center waits for an exchange that it began")
            time.sleep(0.02)
        run.step()
        if rank == 0 and t == begins + OVERLAP - 1:
            passed.touch()
    digests = run.digests()  # before the state goes on
    restored = restored_in_mid_exchange(run, folder / "state") if form == "streaming" else None
    print("RESULT", json.dumps([digests, restored]), flush=True)


if __name__ == "__main__":
    main()
