"""A rank that old.py starts with today's jaxcgx or with an older one, so it uses only what both have.

Its arguments are a folder and either "Tcp", the coordinator's address, its rank and the number of ranks, or "MPI". It
writes a digest of the result of each call, or the error of the call, to the folder.
"""

import hashlib
import importlib
import json
import pathlib
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxcgx as cgx

NEW = hasattr(cgx.Plan, "every")  # before, arguments said what a plan says now
SHAPES = dict(w=((40, 1001), "float32"), half=((40, 77), "bfloat16"), scale=((), "float32"))
CODECS = [
    *(cgx.MaxMin(4), cgx.MaxMin(3, 128, "correlated"), cgx.ByteGrad(), cgx.AbsMax(8), cgx.Float8(), cgx.Micro("mxfp4")),
    *(cgx.Eden(3), cgx.Sign(), cgx.Cast("bfloat16"), cgx.TopK(0.05), cgx.Lossless(), cgx.Raw()),
]
MEANS = {f"mean of {codec}": (codec, "two_shot") for codec in CODECS}
MEANS |= {f"mean, {schedule}": (cgx.MaxMin(4), schedule) for schedule in ("one_shot", "ring")}


def mean(x, over, codec, schedule):
    key = jax.random.key(7) if codec.stochastic else None
    if not isinstance(over, cgx.Tcp) and cgx.mpi.hierarchy() is over:
        codec = {"cross": cgx.Raw(), "inner": codec}
    if NEW:
        return cgx.compressed_pmean(x, over, cgx.Plan.every(codec, schedule=schedule), key=key)
    if isinstance(over, cgx.Tcp):
        return cgx.compressed_pmean(x, over, codec, key=key, schedule=schedule)
    return cgx.mpi.compressed_allreduce(x, codec, over, key=key, op="mean", schedule=schedule)


def numbers(rank):
    """Returns this rank's leaves. They are whole numbers, whose uncompressed sums don't depend on the order."""
    rng = np.random.default_rng(rank)
    return {name: jnp.round(100 * rng.standard_normal(shape)).astype(dtype) for name, (shape, dtype) in SHAPES.items()}


def trained(mesh, axis):
    """Returns the parameters after three steps with feedback."""
    loss_fn = lambda w, x: jnp.mean((x @ w - 1) ** 2)
    rows = np.linspace(-1, 1, 300 * mesh.size, dtype=np.float32).reshape(mesh.size, 300)
    batch = jax.make_array_from_callback(rows.shape, jax.NamedSharding(mesh, jax.P("data")), lambda at: rows[at])
    weights = np.ones((300, 40), np.float32)
    if NEW:
        train = cgx.make_train_step(loss_fn, optax.sgd(0.1), mesh, cgx.MaxMin(4), sharding=cgx.Sharding(axis))
        state = train.init(weights)
        for _ in range(3):
            state, _ = train.step(state, batch)
        return state.params
    train = cgx.make_train_step(loss_fn, optax.sgd(0.1), mesh, data_axis=axis, plan=cgx.MaxMin(4))
    params, state = train.init(weights)
    for _ in range(3):
        params, state, _ = train.step(params, state, batch)
    return params


def over_tcp(address, rank, ranks):
    jax.config.update("jax_num_cpu_devices", 1)
    jax.distributed.initialize(address, int(ranks), int(rank))
    mesh = jax.make_mesh((int(ranks),), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    axis = cgx.Tcp("data", timeout=60)
    x = jax.tree.map(
        lambda leaf: jax.make_array_from_single_device_arrays(
            (int(ranks), *leaf.shape), jax.NamedSharding(mesh, jax.P("data")), [leaf[None]]
        ),
        numbers(int(rank)),
    )

    def on_ranks(f):
        run = lambda x: jax.tree.map(lambda y: y[None], f(jax.tree.map(lambda y: y[0], x)))
        return jax.jit(jax.shard_map(run, mesh=mesh, in_specs=jax.P("data"), out_specs=jax.P("data"), check_vma=False))

    rows = {name: leaf[:, : 12 * int(ranks)] for name, leaf in x.items() if leaf.ndim > 1}
    yield from ((name, lambda case=case: on_ranks(lambda x: mean(x, axis, *case))(x)) for name, case in MEANS.items())
    codec = cgx.MaxMin(4)
    yield "mean, tree", lambda: on_ranks(lambda x: mean(x, axis, codec, "tree"))(x)
    yield "all_gather", lambda: on_ranks(lambda x: cgx.compressed_all_gather(x, axis, codec))(x)
    yield "psum_scatter", lambda: on_ranks(lambda x: cgx.compressed_psum_scatter(x, axis, codec, tiled=True))(rows)
    yield "all_to_all", lambda: on_ranks(lambda x: cgx.compressed_all_to_all(x, axis, 0, 0, codec, tiled=True))(rows)
    yield "training", lambda: trained(mesh, axis)


def over_mpi():
    """First with the comparison of the ranks' arguments, then without."""
    from mpi4py import MPI

    nodes, x = cgx.mpi.hierarchy(), numbers(MPI.COMM_WORLD.rank)
    yield "broadcast", lambda: cgx.mpi.broadcast(x)
    yield "compared mean", lambda: jax.jit(lambda x: mean(x, MPI.COMM_WORLD, cgx.MaxMin(4), "two_shot"))(x)
    module = importlib.import_module("jaxcgx.mpi.ranks" if NEW else "jaxcgx.mpi.functions")
    module.greet = lambda *_: None
    for name, over in ("MPI", MPI.COMM_WORLD), ("memory", nodes):
        for case, how in MEANS.items():
            yield f"{name}: {case}", lambda over=over, how=how: jax.jit(lambda x: mean(x, over, *how))(x)


def digest(tree):
    parts = (np.asarray(x.addressable_data(0)).tobytes() for x in jax.tree.leaves(jax.block_until_ready(tree)))
    return hashlib.sha256(b"".join(parts)).hexdigest()


def main():
    folder, over, *words = sys.argv[1:]
    found, broken = {}, ""  # after an error over Tcp, all other exchanges of a process are errors
    for name, call in over_tcp(*words) if over == "Tcp" else over_mpi():
        try:
            found[name] = broken or digest(call())
        except (RuntimeError, ValueError) as error:
            found[name] = f"{type(error).__name__}: {error}"
            broken = found[name] if over == "Tcp" else ""
    rank = words[1] if words else importlib.import_module("mpi4py.MPI").COMM_WORLD.rank
    pathlib.Path(folder, f"{rank}.json").write_text(json.dumps(dict(path=cgx.__file__, found=found)))
    begun = time.monotonic()  # JAX kills a process that still waits for a rank that has ended
    while broken and len(list(pathlib.Path(folder).glob("*.json"))) < int(words[2]) and time.monotonic() < begun + 120:
        time.sleep(1)


if __name__ == "__main__":
    main()
