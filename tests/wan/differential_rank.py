"""A process that test_differential.py starts. It joins the others, and exchanges gradients whose late blocks are lost:

    python differential_rank.py PORT RANK PROCESSES

It prints what becomes of six steps, with different deadlines and over one or two axes. Then the last process kills
itself before another step, and the others print their error.
"""

import hashlib
import json
import os
import signal
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxcgx as cgx

STEPS, LOCALS = 6, 2
SHAPES = {"w": ((125, 1024), "float32"), "half": ((40, 512), "bfloat16"), "bias": ((5,), "float32")}
TCP = cgx.Tcp("dc", connections=3, pace=1e6)
CASES = {  # plan, deadline, axes
    "never": (cgx.Raw(), 1e6, (TCP,)),
    "always": (cgx.Raw(), 0, (TCP,)),
    "some": (cgx.Raw(), 0.19, (TCP,)),  # the important blocks take 0.13 s, and then the others as long
    "two axes": ({"dc": cgx.MaxMin(8, 64), "local": cgx.Raw()}, 0, (TCP, "local")),
    "along trees": (cgx.Plan.every(cgx.MaxMin(8, 64), schedule="tree"), 0, (TCP,)),
}


def grads_of(ranks):
    """Returns the gradients of all ranks in all steps: leaves [ranks, steps, ...], whose means are whole numbers."""
    rng = np.random.default_rng(5)
    draw = lambda shape: ranks * np.round(4 * rng.standard_normal((ranks, STEPS, *shape)))
    return {name: np.asarray(draw(shape), dtype) for name, (shape, dtype) in SHAPES.items()}


def program(mesh, case, ranks):
    """Returns a function of gradients [ranks, steps, ...]: by rank, (updates, what is lost for good, late)."""
    plan, deadline, axes = CASES[case]
    how = cgx.wan.Differential(plan, k=0.5, rest="late-is-lost", deadline=deadline)
    transformation, names = cgx.compress_gradients(axes, how), mesh.axis_names
    wide = lambda tree: jax.tree.map(lambda x: x.astype(jnp.float32), tree)

    def of_rank(grads):
        grads = jax.tree.map(lambda g: g[0], grads)
        step = lambda state, g: transformation.update(g, state)[::-1]
        state, updates = lax.scan(step, transformation.init(jax.tree.map(lambda g: g[0], grads)), grads)
        kept = state.own.residuals
        total = lambda x: lax.psum(x, names)

        def error(update, grad, r):
            left = 0 if r is None else total(r)
            return jnp.abs(ranks * update.sum(0) + left - total(grad.sum(0))).max()

        lost = [error(wide(updates)[name], wide(grads)[name], kept[name]) for name in SHAPES]
        late = jnp.mean(jnp.abs(kept["w"]) > 0.5)  # more than errors of codecs
        return jax.tree.map(lambda x: x[None], (updates, jnp.stack(lost), late))

    return jax.jit(jax.shard_map(of_rank, mesh=mesh, in_specs=P(names), out_specs=P(names), check_vma=False))


def run(case, processes):
    """Returns what a process reports of a case."""
    devices = np.array(jax.devices()).reshape(processes, LOCALS)
    both = len(CASES[case][2]) == 2
    mesh = Mesh(devices, ("dc", "local")) if both else Mesh(devices[:, 0], ("dc",))
    ranks, grads = mesh.size, grads_of(mesh.size)
    mine = jax.process_index() * LOCALS if both else jax.process_index()
    over_all = NamedSharding(mesh, P(mesh.axis_names))
    local = jax.tree.map(lambda g: g[mine : mine + 1 + both], grads)
    given = jax.tree.map(lambda g: jax.make_array_from_process_local_data(over_all, g), local)
    found = program(mesh, case, ranks)(given)
    updates, lost, late = jax.tree.map(lambda x: np.asarray(x.addressable_data(0))[0], found)
    sums = {name: g.astype(np.float32).sum(0) for name, g in grads.items()}
    plain = {name: (g / np.float32(ranks)).astype(SHAPES[name][1]) for name, g in sums.items()}
    return dict(
        digest=hashlib.sha256(b"".join(x.tobytes() for x in jax.tree.leaves(updates))).hexdigest(),
        plain=all(map(np.array_equal, jax.tree.leaves(updates), jax.tree.leaves(plain))),
        lost=lost.tolist(),
        late=float(late),
    )


def main():
    port, rank, processes = map(int, sys.argv[1:])
    jax.config.update("jax_num_cpu_devices", LOCALS)
    jax.distributed.initialize(f"127.0.0.1:{port}", processes, rank)
    print("RESULT", json.dumps({case: run(case, processes) for case in CASES}), flush=True)
    if rank == processes - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        run("some", processes)
    except jax.errors.JaxRuntimeError as error:
        print("ERROR", json.dumps(str(error)), flush=True)
    os._exit(0)  # JAX would wait for the process that has gone


if __name__ == "__main__":
    main()
