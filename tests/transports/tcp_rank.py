"""A process that test_tcp.py starts. It joins the others, makes a mesh of all their devices, and does its action:

    python tcp_rank.py ACTION PORT RANK PROCESSES

- digests: two processes with two devices each run every collective over Tcp. They print digests of the results.
- uneven: two processes with one and three devices run a few of these collectives, and train. They also print the first
  rows of the parameters after two steps without compression.
- others: four processes print what `explain` reports (only rank 1), the events of means that cross programs, and what
  overlays do.
- die, stay_away, raise, differ: the others sum and print their error. Meanwhile the last process kills itself while a
  child of it lives, doesn't take part, ends with an exception, or forms the mean instead of the sum.
- interrupt: the last process gets Ctrl-C while it waits for another one, which is 8 s late. It prints after how many
  seconds its sum has ended.
- cross: the last process kills itself while a mean of the others crosses programs.
- unwaited: one process with four devices trains without waiting for steps. It prints when it is done.
- connections: two processes with several paced connections. They print the sent bytes of a lossless sum, the digests of
  "several pieces" over these connections and over the plain axis, and the error of means that are never ended.
"""

import ctypes
import dataclasses
import functools
import hashlib
import json
import os
import pathlib
import re
import signal
import sys
import threading
import time
import unittest.mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

import jaxcgx as cgx
from jaxcgx import _compat
from jaxcgx.collectives.arguments import Call
from jaxcgx.exchange import reduce
from jaxcgx.exchange.routes import Way
from jaxcgx.native import connections
from jaxcgx.transports.axes import axis_names
from jaxcgx.wan import Differential, MixedSync, Overlay, Topology, Tree
from jaxcgx.wan.geomx import differential

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from order import unordered

TCP, BOTH = cgx.Tcp("data"), ("node", "local")
BETWEEN = cgx.Tcp("node"), "local"
UNEVEN = Overlay((Tree((-1, 0, 1, 0), 5), Tree((2, 2, 3, -1), 2), Tree((1, -1, 1, 1), 1)))
SHAPES = {
    "w": ((300, 37), "float32"),
    "scale": ((), "float32"),
    "half": ((3001,), "bfloat16"),
    "empty": ((0,), "float32"),
    "count": ((5,), "int32"),
}
ROWS = {"w": ((4, 1001), "float32"), "half": ((4, 77), "bfloat16")}
LARGE = {"w": ((400_000,), "float32"), "half": ((100_001,), "bfloat16")}  # leaves of several pieces
SMALL = {"w": ((1030,), "float32"), "half": ((9,), "bfloat16")}  # "w" is in both chunks; many leaves compile slowly
NOISY, SAMPLED = cgx.MaxMin(3, 128, "correlated"), cgx.TopK(0.01, select="sampled", pull="top")


class Halves(cgx.Cast):
    """A codec without kernels."""


HIERARCHY = {"node": cgx.MaxMin(4), "local": cgx.Cast("bfloat16")}
RAW = {"node": cgx.Raw(), "local": cgx.Raw()}
IN_MEMORY = {"node": cgx.MaxMin(4), "local": cgx.Raw()}  # the devices of a process add their leaves in memory
NOISY_BETWEEN = {"node": NOISY, "local": cgx.Raw()}
ACROSS = ("local", "node")  # the inner axis is between the processes, so they exchange their leaves
OVER_ACROSS = {"local": NOISY, "node": cgx.Raw()}
MARKED = {"data": TCP, BOTH: BETWEEN, ACROSS: tuple(map(cgx.Tcp, ACROSS))}
PERM = [(0, 2), (2, 1), (3, 3)]


def key():
    return jax.random.key(7)


def zeros(x):
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32) if leaf.dtype != jnp.int32 else None, x)


def reduction(codec=cgx.MaxMin(4), keyed=False, fed=False, **fields):
    plan = dataclasses.replace(codec, **fields) if isinstance(codec, cgx.Plan) else cgx.Plan.every(codec, **fields)

    def run(axes, x):
        carry = cgx.Carry(residuals=jax.tree.map(lambda r: r + 0.125, zeros(x))) if fed else None
        return cgx.compressed_pmean(x, axes, plan, key=key() if keyed else None, carry=carry)

    return run


def begin_pmean(x, axes, plan, key=None, carry=None):
    """Begins a `compressed_pmean`, which `reduce.end(*result)` ends in this program or in a later one."""
    call = Call.of("begin", x, axes, plan, key=key)
    return reduce.begin(call.x, carry or cgx.Carry(), call.travel(Way(mean=True, later=True)), call.key)


def raw(codec=cgx.Raw()):
    """Returns the mean of whole numbers, which doesn't depend on the order of a sum."""
    return lambda axes, x: cgx.compressed_pmean(jax.tree.map(jnp.round, x), axes, codec)


def in_a_scan(axes, x):
    return lax.scan(
        lambda x, _: (cgx.compressed_pmean(x, axes, cgx.Plan.every(cgx.MaxMin(8), schedule="two_shot")), None),
        x,
        length=3,
    )[0]


def under_vmap(codec):
    plan = cgx.Plan.every(codec, schedule="two_shot")
    return lambda axes, x: jax.vmap(lambda x: cgx.compressed_psum(x, axes, plan, key=key()))(x)


def in_a_mapped_branch(axes, x):
    def parts(x):
        begun = begin_pmean(x, axes, cgx.MaxMin(4))
        return reduce.end(*begun)[0], cgx.compressed_all_gather(x["w"], axes, cgx.AbsMax(8))

    either = lambda first, x: jax.lax.cond(first, parts, lambda x: parts(jax.tree.map(lambda y: -y, x)), x)
    return jax.vmap(either)(jnp.arange(len(x["w"])) % 2 == 0, x)


def denormals(axes, x):
    return jax.tree.map(lambda y: (y * 1e-12) * (y * 1e-30), cgx.compressed_psum(x, axes, cgx.MaxMin(4)))


def in_parts(axes, w):
    return cgx.compressed_all_gather(w[:, :960], axes, cgx.Float8(bucket_size=64), as_parts=True).dequantize()


def ragged(axes, w):
    ones = jnp.ones(4, jnp.int32)
    slices = jnp.arange(4), ones, lax.axis_index(axis_names(axes)) * ones, ones
    return cgx.compressed_ragged_all_to_all(w, 0 * w, *slices, axis_name=axes, plan=cgx.MaxMin(4), capacity=2)


def differences(axes, x):
    """Sends x, and then the difference of 2 x to what was sent."""
    carry = cgx.init_carry(NOISY, x, ends=True)
    for scale in (1, 2):
        scaled = jax.tree.map(lambda y, s=scale: s * y, x)
        moved, carry = cgx.compressed_ppermute(scaled, axes, PERM, NOISY, key=key(), carry=carry)
    return moved, carry


def derivative(axes, x):
    def loss(x):
        parts = (
            cgx.compressed_all_gather(x["w"], axes, cgx.AbsMax(8)),
            cgx.compressed_all_to_all(x["w"], axes, 0, 0, cgx.MaxMin(4)),
            cgx.compressed_all_gather(x["half"], axes, cgx.Raw()),
            cgx.compressed_ppermute(x["w"], axes, PERM, cgx.MaxMin(4)),
            cgx.compressed_ppermute(x["half"], axes, PERM, cgx.Raw()),
            cgx.compressed_pbroadcast(x["w"], axes, 2, cgx.MaxMin(4)),
            in_parts(axes, x["w"]),
            ragged(axes, x["w"]),
        )
        sums = (cgx.compressed_psum_scatter(x["w"], axes, codec) for codec in (cgx.MaxMin(8), cgx.Raw()))
        wide = lambda y: y.astype(jnp.float32)
        return sum(jnp.sum(jnp.sin(wide(y))) for y in parts) + sum(jnp.sum(y) ** 2 for y in sums)

    return jax.grad(loss)(x)


def backward(axes, x, fed=False):
    plan = cgx.Plan.every(cgx.MaxMin(4), fusion_mb=0.001)

    def loss(x, residuals):
        carry = cgx.Carry(residuals=residuals) if fed else None
        leaves = jax.tree.leaves(cgx.sync_in_backward(x, axes, plan, carry=carry))
        return sum(jnp.sum(leaf.astype(jnp.float32) ** 2) for leaf in leaves)

    residuals = jax.tree.map(lambda leaf: jnp.float32(0.1) * leaf.astype(jnp.float32), x)
    return jax.grad(loss, argnums=(0, 1) if fed else 0)(x, residuals)


# Every case has the shapes of a rank's leaves, the axes of a mesh, and a function of the plain or marked axes.
CASES = {
    "two_shot": (SHAPES, "data", reduction(schedule="two_shot")),
    "one_shot": (SHAPES, "data", reduction(NOISY, keyed=True, schedule="one_shot", fed=True)),
    "ring": (SHAPES, "data", reduction(schedule="ring")),
    "gather": (SHAPES, "data", reduction(NOISY, keyed=True, schedule="gather", fed=True)),
    "feedback encoded": (SHAPES, "data", reduction(schedule="two_shot", own="encoded", fed=True)),
    "several pieces": (LARGE, "data", reduction(schedule="two_shot", fed=True)),
    "several pieces one_shot": (LARGE, "data", reduction(cgx.MaxMin(8, skip_incomplete=True), schedule="one_shot")),
    "overlay": (SHAPES, "data", reduction(NOISY, keyed=True, schedule=UNEVEN, fed=True)),
    "overlay of several pieces": (LARGE, "data", reduction(schedule=Overlay.ring([2, 0, 1, 3]))),
    "overlay fed, several pieces": (LARGE, "data", reduction(schedule=UNEVEN, fed=True)),
    "owners": (SHAPES, "data", reduction(schedule=Overlay.owners(4, [1, 1, 0, 0.2]), own="encoded", fed=True)),
    "raw along trees": (SHAPES, "data", reduction(cgx.Raw(), schedule="tree")),
    "lists along trees": (SHAPES, "data", reduction(cgx.TopK(0.05, pull="top"), schedule=UNEVEN, fed=True)),
    "raw": (LARGE, "data", raw()),
    "raw, fed": (SHAPES, "data", reduction(cgx.Plan(cgx.MaxMin(4)), schedule="two_shot", fed=True)),
    "raw in all": (SHAPES, BOTH, raw()),
    "raw by axis": ({"w": LARGE["w"]}, BOTH, raw(RAW)),  # axis by axis, XLA rounds bfloat16 twice
    "whole buckets": (SHAPES, "data", reduction(cgx.ByteGrad(), schedule="two_shot", fusion_mb=0.01)),
    "scales of blocks": (LARGE, "data", reduction(cgx.Micro("mxfp4"), schedule="two_shot", fed=True)),
    "rotated": (LARGE, "data", reduction(cgx.Eden(3), keyed=True, schedule="two_shot", fed=True)),
    "rotated ring": (SHAPES, "data", reduction(cgx.MaxMin(4, 128, rotate=True), schedule="ring")),
    "rotated along trees": (SHAPES, "data", reduction(cgx.Eden(4, 128), keyed=True, schedule=UNEVEN, fed=True)),
    "hierarchy": (SHAPES, BOTH, reduction(HIERARCHY)),
    "in memory, fed": (SHAPES, BOTH, reduction(IN_MEMORY, schedule="two_shot", fed=True)),
    "in memory, one_shot": (LARGE, BOTH, reduction(NOISY_BETWEEN, keyed=True, schedule="one_shot", fed=True)),
    "in memory, lossless": (LARGE, BOTH, reduction({"node": cgx.Lossless(), "local": cgx.Raw()}, schedule="two_shot")),
    "in memory, vmap": (ROWS, BOTH, under_vmap(NOISY_BETWEEN)),
    "across": (SHAPES, ACROSS, reduction(OVER_ACROSS, keyed=True, schedule="two_shot", fed=True)),
    "across, vmap": (ROWS, ACROSS, under_vmap(OVER_ACROSS)),
    "leader": (SHAPES, BOTH, reduction(HIERARCHY, leader=True)),
    "sparse lists": (SHAPES, "data", reduction(cgx.TopK(0.02, cgx.MaxMin(4)), schedule="one_shot", fed=True)),
    "sparse owners": (LARGE, "data", reduction(SAMPLED, keyed=True, schedule="two_shot", fed=True)),
    "lossless": (LARGE, "data", reduction(cgx.Lossless(), schedule="two_shot", fed=True)),
    "lossless one_shot": (SHAPES, "data", reduction(cgx.Lossless(), schedule="one_shot")),
    "lossless all_gather": (SHAPES, "data", lambda axes, x: cgx.compressed_all_gather(x, axes, cgx.Lossless())),
    "psum_scatter": (ROWS, "data", lambda axes, x: cgx.compressed_psum_scatter(x, axes, cgx.MaxMin(4))),
    "all_gather": (SHAPES, "data", lambda axes, x: cgx.compressed_all_gather(x, axes, cgx.MaxMin(4))),
    "all_to_all": (ROWS, "data", lambda axes, x: cgx.compressed_all_to_all(x, axes, 0, 0, NOISY, key=key())),
    "pbroadcast": (SHAPES, "data", lambda axes, x: cgx.compressed_pbroadcast(x, axes, 1, NOISY, key=key())),
    "parts": (ROWS, "data", lambda axes, x: in_parts(axes, x["w"])),
    "ragged": (ROWS, "data", lambda axes, x: ragged(axes, x["w"])),
    "ppermute": (SHAPES, "data", lambda axes, x: cgx.compressed_ppermute(x, axes, PERM, NOISY, key=key())),
    "ppermute in both": (SHAPES, BOTH, lambda axes, x: cgx.compressed_ppermute(x, axes, PERM, cgx.MaxMin(4))),
    "differences": (SHAPES, "data", differences),
    "scan": (ROWS, "data", in_a_scan),
    "vmap": (ROWS, "data", under_vmap(NOISY)),
    "lists under vmap": (ROWS, "data", under_vmap(cgx.TopK(0.1, cgx.MaxMin(3, 128, "stochastic"), pull="top"))),
    "branches of vmap": (ROWS, "data", in_a_mapped_branch),
    "denormals": (ROWS, "data", denormals),
    "grad": (ROWS, "data", derivative),
    "backward": (ROWS, "data", backward),
    "backward with feedback": (ROWS, "data", functools.partial(backward, fed=True)),
}


# Means that cross programs: the shapes of a rank's leaves, the axes, the plan, and whether there is feedback.
PLAN = cgx.Plan(cgx.MaxMin(4), min_size=1000, skip_1d=False)
CROSSING = {
    "two_shot": (SHAPES, "data", cgx.Plan.every(cgx.MaxMin(4), schedule="two_shot"), True),
    "one_shot": (SHAPES, "data", cgx.Plan.every(NOISY, schedule="one_shot"), True),
    "several pieces": (LARGE, "data", cgx.Plan.every(NOISY, schedule="two_shot"), False),
    "plan": (SHAPES, "data", PLAN, True),
    "sparse": (LARGE, "data", cgx.TopK(0.01), True),
    "sparse owners": (LARGE, "data", cgx.Plan.every(cgx.TopK(0.01, pull="top"), schedule="two_shot"), True),
    "sparse owners, not fed": (SHAPES, "data", cgx.Plan.every(cgx.TopK(0.1, pull="top"), schedule="two_shot"), False),
    "sparse ring": (SHAPES, "data", cgx.Plan.every(cgx.TopK(0.1, pull="top"), schedule="ring"), False),
    "sparse hierarchy": (SHAPES, BOTH, {"node": cgx.TopK(0.05), "local": cgx.Raw()}, True),
    "no kernels": (SMALL, "data", cgx.Plan.every(Halves(), schedule="two_shot"), True),
    "low rank": (SHAPES, "data", cgx.PowerSGD(2), True),
    "low rank between nodes": (SHAPES, BOTH, {"node": cgx.PowerSGD(2), "local": cgx.Raw()}, True),
    "hierarchy": (SHAPES, BOTH, HIERARCHY, True),
    "in memory": (LARGE, BOTH, cgx.Plan.every(IN_MEMORY, schedule="two_shot"), True),
}


def crossing(tcp):
    """Returns {case: digests} of means that one program begins and another ends. They equal those of one program."""
    found = {}
    for axes in "data", BOTH:
        mesh, marked = the_mesh(*axis_names(axes)), MARKED[axes] if tcp else axes
        cases = {name: case for name, case in CROSSING.items() if case[1] == axes}
        inputs = {
            # whole numbers, so sums don't depend on the order
            name: {leaf: array(mesh, *what, [9, i], whole=True) for i, (leaf, what) in enumerate(case[0].items())}
            for name, case in cases.items()
        }

        def mean(function, name, x, cases=cases, marked=marked):
            _, _, plan, fed = cases[name]
            carry, noisy = cgx.Carry(residuals=zeros(x) if fed else None), getattr(plan, "default", None) == NOISY
            return function(x, marked, plan, key=key() if noisy else None, carry=carry)

        plain = on_ranks(mesh, lambda x: {name: mean(cgx.compressed_pmean, name, x[name]) for name in x})
        begin = on_ranks(mesh, lambda x: {name: mean(begin_pmean, name, x[name]) for name in x})
        finish = lambda begun: {name: reduce.end(*begun[name]) for name in begun}
        end = on_ranks(mesh, finish, donate_argnums=0)
        begun = begin(inputs)
        expected = jax.block_until_ready(plain(inputs))  # while all of these means are in flight
        results = jax.block_until_ready(end(begun))
        for name in cases:
            assert digests(results[name]) == digests(expected[name]), name
            if name != "low rank":  # over plain axes, lax sums the factors of four ranks in its own order
                found[f"crossing {name}"] = digests(results[name])
    return found


def order_of_events():
    """Returns the events.

    Rank 0 begins a mean, and the others begin it only after a later program of rank 0 has run.
    """
    store, mesh, spec = _compat.rendezvous()[0], the_mesh("data"), PartitionSpec("data")
    x = array(mesh, (200_000,), "float32", 4)

    def mapped(f, out_specs):
        return jax.jit(jax.shard_map(f, mesh=mesh, in_specs=spec, out_specs=out_specs))

    begin = mapped(lambda x: begin_row(x[0]), out_specs=spec)
    end = mapped(end_row, out_specs=PartitionSpec())
    between = mapped(lambda x: x * 2, out_specs=spec)
    if jax.process_index() == 0:
        ticket = begin(x)
        between(x).block_until_ready()
        store.key_value_set("between", "has run")
    else:
        store.blocking_key_value_get("between", 60_000)
        ticket = begin(x)
    mean = np.asarray(end(ticket))
    expected = np.asarray(mapped(lambda x: cgx.compressed_pmean(x[0], TCP, cgx.MaxMin(4)), PartitionSpec())(x))
    nothing = np.asarray(end(jax.tree.map(jnp.zeros_like, ticket)))
    found = [bool((mean == expected).all()), not nothing.any(), in_one_step(mesh, x, expected)]
    try:
        jax.block_until_ready(end(ticket))
    except jax.errors.JaxRuntimeError as error:
        found.append(str(error))
    return found


def begin_row(x):
    """Returns a ticket whose arrays have a leading axis of size one, for the specs of shard_map."""
    return jax.tree.map(lambda a: a[None], begin_pmean(x, TCP, cgx.MaxMin(4))[0])


def end_row(ticket):
    return reduce.end(jax.tree.map(lambda a: a[0], ticket), cgx.Carry())[0]


def in_one_step(mesh, x, expected):
    """One program begins a mean in the first of three steps and ends it in the last one."""

    def step(x, ticket, begins, ends):
        begin = lambda ticket: begin_row(x[0])
        ticket = lax.cond(begins, begin, lambda ticket: ticket, ticket)
        end = lambda ticket: (end_row(ticket), jax.tree.map(jnp.zeros_like, ticket))
        return lax.cond(ends, end, lambda ticket: (jnp.zeros_like(x[0]), ticket), ticket)

    spec, all_ = PartitionSpec("data"), PartitionSpec()
    new = jax.shard_map(
        lambda x: jax.tree.map(jnp.zeros_like, begin_row(x[0])), mesh=mesh, in_specs=spec, out_specs=spec
    )
    ticket = jax.tree.map(
        lambda a: jax.make_array_from_callback(a.shape, NamedSharding(mesh, spec), lambda at: np.zeros(a.shape)[at]),
        jax.eval_shape(new, x),
    )
    ticket = jax.tree.map(lambda a: a.astype(jnp.uint32), ticket)
    program = jax.jit(
        jax.shard_map(step, mesh=mesh, in_specs=(spec, spec, all_, all_), out_specs=(all_, spec), check_vma=False),
        donate_argnums=1,
    )
    means = []
    for _ in range(2):
        for t in range(3):
            mean, ticket = program(x, ticket, t == 0, t == 2)
            means.append(mean)
    means = [np.asarray(mean) for mean in means]
    return all((mean == expected).all() if t % 3 == 2 else not mean.any() for t, mean in enumerate(means))


def end_without(last):
    """Returns the error of a mean whose other rank is killed before it begins, and checks what still works."""
    mesh, axis = the_mesh("data"), cgx.Tcp("data", timeout=60, connections=3)
    x = array(mesh, (200_000,), "float32", 0)
    plan = cgx.Plan.every(cgx.MaxMin(4), schedule="two_shot")
    begin = on_ranks(mesh, lambda x: begin_pmean(x, axis, plan, carry=cgx.Carry(residuals=jnp.ones_like(x))))
    end = on_ranks(mesh, lambda begun: reduce.end(*begun))
    double = on_ranks(mesh, lambda x: x * 2)
    jax.block_until_ready(end(begin(x)))
    if last:
        os.kill(os.getpid(), signal.SIGKILL)
    begun = jax.block_until_ready(begin(x))
    double(x).block_until_ready()
    try:
        jax.block_until_ready(end(begun))
    except jax.errors.JaxRuntimeError as error:
        after = [jax.block_until_ready(double(begun[1].residuals)), double(x)]
        return str(error), [bool(np.isfinite(np.asarray(y.addressable_shards[0].data)).all()) for y in after]
    return None


def over_connections():
    axis = cgx.Tcp("data", connections=3, pace="400mbit")
    mesh, (shapes, _, run) = the_mesh("data"), CASES["several pieces"]
    x = {leaf: array(mesh, *what, i) for i, (leaf, what) in enumerate(shapes.items())}

    def never_ended(x):
        begin = lambda x, _: (x, begin_pmean(x, axis, cgx.MaxMin(4)))
        return lax.scan(begin, x["half"][:8], length=10_001)[1]

    found = [bytes_sent(mesh, axis)]
    try:
        for function in lambda x: run(axis, x), lambda x: run("data", x), never_ended:
            found.append(digests(jax.block_until_ready(on_ranks(mesh, function)(x))))
    except jax.errors.JaxRuntimeError as error:
        found.append(str(error))
    return found


def bytes_sent(mesh, axis):
    """Returns the bytes that TCP carries for a lossless sum, per byte of the array."""
    x = array(mesh, (2**20,), "bfloat16", 0)
    plan = cgx.Plan.every(cgx.Lossless(), schedule="two_shot")
    compiled = on_ranks(mesh, lambda x: cgx.compressed_psum(x, axis, plan)).lower(x).compile()  # connects the processes
    count = lambda: sum(each.bytes for each in connections.sent())
    before = count()
    jax.block_until_ready(compiled(x))
    time.sleep(0.2)  # until the last bytes are acknowledged
    return (count() - before) / (x.nbytes / mesh.size)


HALF = cgx.Plan(cgx.Cast("bfloat16"), schedule="two_shot")  # "auto" is not the same schedule over both transports
TRAINED = {
    "make_train_step": dict(exchange=cgx.MaxMin(4)),
    "overlap": dict(exchange=cgx.Plan.every(cgx.MaxMin(4), fusion_mb=0.01), overlap="backward"),
    "priority": dict(exchange=cgx.MaxMin(4), overlap=cgx.Priority(1000)),
    "DGC": dict(exchange=cgx.DGC(ratio=0.02, nesterov=True, fusion_mb=0.01), overlap="backward"),
    "DGC, priority": dict(exchange=cgx.DGC(ratio=0.02, pull="top", schedule="two_shot"), overlap=cgx.Priority(1000)),
    "DGT": dict(exchange=Differential(cgx.Plan(cgx.MaxMin(4), min_size=0), k=0.5, block_bytes=400)),
    "DGT, drop": dict(exchange=Differential(HALF, k=0.5, block_bytes=400, rest="drop")),
    "mixed sync": dict(exchange=MixedSync(cgx.MaxMin(4))),
}
LATE = "DGT", "mixed sync"  # with sums that travel while a step computes
# Exchanges inside and between centers, in 2 x 2 ranks. "auto" is not the same schedule over both transports.
CENTERS = cgx.Plan({"node": cgx.MaxMin(8), "local": cgx.Raw()}, min_size=0, skip_1d=False, schedule="two_shot")
IN_CENTERS = {
    "P3": dict(exchange=CENTERS, overlap=cgx.Priority(1000)),
    "DGT, quantize": dict(exchange=Differential(CENTERS, k=0.8, block_bytes=400, rest="quantize")),
    "adaptive DGT": dict(exchange=cgx.wan.from_env({"ENABLE_DGT": "2", "ADAPTIVE_K_FLAG": "1"}, CENTERS).exchange),
}


def the_mesh(*names):
    devices = np.array(jax.devices()[:4]).reshape((2, 2) if len(names) == 2 else -1)
    return jax.sharding.Mesh(devices[::-1] if len(names) == 2 else devices, names)


def array(mesh, shape, dtype, seed, whole=False):
    """Returns the numbers of every rank, [ranks, ...]."""
    numbers = np.random.default_rng(seed).standard_normal((mesh.size, *shape)) * 100
    whole = np.asarray(jnp.asarray(np.round(numbers) if whole else numbers, jnp.dtype(dtype)))
    return jax.make_array_from_callback(
        whole.shape, NamedSharding(mesh, PartitionSpec(mesh.axis_names)), lambda at: whole[at]
    )


def on_ranks(mesh, function, **options):
    def run(*args):
        return jax.tree.map(lambda x: x[None], function(*jax.tree.map(lambda x: x[0], args)))

    spec = PartitionSpec(mesh.axis_names)
    return jax.jit(jax.shard_map(run, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False), **options)


def digests(tree):
    """Returns {rank: digest of its array} for this process's ranks."""
    found = {}
    for leaf in jax.tree.leaves(tree):
        for shard in leaf.addressable_shards:
            digest = found.setdefault(str(jax.devices().index(shard.device)), hashlib.sha256())
            digest.update(np.asarray(shard.data).tobytes())
    return {rank: digest.hexdigest() for rank, digest in found.items()}


def collectives(tcp, all_cases=CASES):
    """Returns {case: digests}, over Tcp or over the plain axes. All cases of a mesh are one program."""
    results = {}
    for axes in {case[1]: None for case in all_cases.values()}:
        mesh, marked = the_mesh("data") if axes == "data" else the_mesh(*BOTH), MARKED[axes] if tcp else axes
        cases = {name: case for name, case in all_cases.items() if case[1] == axes}
        inputs = {
            name: {leaf: array(mesh, *what, [len(name), i]) for i, (leaf, what) in enumerate(case[0].items())}
            for name, case in cases.items()
        }
        run = on_ranks(mesh, lambda inputs: {name: cases[name][2](marked, inputs[name]) for name in cases})
        program = run.lower(inputs).compile()
        assert ("jaxcgx_tcp_allreduce" in program.as_text()) == tcp
        jax.block_until_ready(program(inputs))
        found = jax.block_until_ready(program(inputs))  # JAX handles the second call differently
        results |= {name: digests(each) for name, each in found.items()}
    return results


def everything(tcp):
    results = collectives(tcp)
    for name, options in TRAINED.items():
        results[name] = train(TCP if tcp else "data", late=tcp and name in LATE, **options)
    with unittest.mock.patch.object(differential, "LEVELS", 2):  # fewer sizes are compiled sooner
        for name, options in IN_CENTERS.items():
            results[f"{name} in centers"] = train(BETWEEN if tcp else BOTH, **options)
    batch = array(the_mesh("data"), (8,), "float32", 3)
    loss_fn = lambda w, x: jnp.mean((x @ w - 1) ** 2)
    asked = jax.jit(cgx.value_and_grad(loss_fn, TCP if tcp else "data", cgx.MaxMin(4), mesh=the_mesh("data")))
    given = np.ones((8, 300), np.float32), batch
    assert ("all_reduce" in asked.lower(*given).as_text()) != tcp
    results["value_and_grad"] = digests(asked(*given))
    return results | crossing(tcp)


# With the sums of a hierarchy whose inner axis is between processes for some ranks, and inside one for others.
IN_UNEVEN = "two_shot", "one_shot", "several pieces", "overlay", "sparse owners", "grad", "hierarchy", "in memory, fed"


def uneven():
    found = collectives(True, {name: CASES[name] for name in IN_UNEVEN})
    found |= {name: train(TCP, **TRAINED[name]) for name in ("make_train_step", "priority")}
    exact = train(TCP, cgx.Raw(), read=lambda state: jax.tree.map(lambda x: mine(x)[0].tolist(), state.params))
    return found, exact


def assert_meanwhile(program):
    """Checks that a sum begins before the backward pass of a program has ended, and that none is waited for before.

    No wait is after another one, so the first sum to arrive is decoded while the others travel.
    """
    operations = program.split("\nENTRY ")[1].splitlines()
    found = [re.match(r"\s*(?:ROOT )?%(\S+) = (.*)", line) for line in operations]
    uses = {each[1]: set(re.findall(r"%([\w.-]+)", each[2])) for each in found if each}
    waiting = {each[1] for each in found if each and 'target="jaxcgx_tcp_allreduce_end"' in each[2]}
    for wait in waiting:
        behind, new = set(), uses[wait]
        while new:
            behind |= new
            new = set().union(*(uses.get(name, set()) for name in new)) - behind
        assert not behind & waiting, (wait, behind & waiting)
    at = lambda pattern: [i for i, line in enumerate(operations) if re.search(pattern, line)]
    begins, ends = at('target="jaxcgx_tcp_allreduce"'), at('target="jaxcgx_tcp_allreduce_end"')
    backward = at(r"transpose\(jvp")
    assert begins[0] < backward[-1] < ends[0], (begins, backward, ends)


MATRICES = {"v": np.ones((300, 40), np.float32), "w": np.ones((8, 300), np.float32)}


def of_matrices(axis, exchange, **options):
    """Returns a training step of two matrices."""
    loss_fn = lambda p, x: jnp.mean((x @ p["w"] @ p["v"] - 1) ** 2)
    mesh = the_mesh(*axis_names(axis))
    return cgx.make_train_step(loss_fn, optax.sgd(0.1), mesh, exchange, sharding=cgx.Sharding(axis), **options)


def batch_of_ranks(axis):
    """Returns the batch of each step, with an example for each rank."""
    batch, names = np.linspace(-1, 1, 32, dtype=np.float32).reshape(4, 8), axis_names(axis)
    sharding = NamedSharding(the_mesh(*names), PartitionSpec(names))
    return jax.make_array_from_callback(batch.shape, sharding, lambda at: batch[at])


def train(axis, exchange, late=False, read=digests, **options):
    train, batch = of_matrices(axis, exchange, **options), batch_of_ranks(axis)
    state = train.init(MATRICES)
    for _ in range(2):
        state, _ = jax.block_until_ready(train.step(state, batch))
    (program,) = train.step.programs(state, batch)
    if axis == TCP:  # neither gradients nor losses travel by Gloo, whose errors name no rank
        assert "all-reduce" not in program.as_text()
    if axis == BETWEEN:
        assert not unordered(program.as_text())
    if late:
        assert_meanwhile(program.as_text())
    state = jax.block_until_ready(train.finish(state))
    # contributions are means by lax; their last bits depend on the transport
    is_late = lambda x: isinstance(x, differential.Ranking)
    return read(jax.tree.map(lambda x: x._replace(contributions=None) if is_late(x) else x, state, is_leaf=is_late))


def unwaited():
    train, batch = of_matrices(BETWEEN, IN_MEMORY), batch_of_ranks(BETWEEN)
    state = train.init(MATRICES)
    for _ in range(200):
        state, _ = train.step(state, batch)
    return jax.block_until_ready(state) is not None


def changing(**options):
    """Trains with an overlay that changes while gradients are in flight."""
    topology, batch = Topology(the_mesh("data"), TCP), batch_of_ranks(TCP)
    topology.update = lambda: setattr(topology, "overlay", Overlay.owners(4, 2))
    plan = lambda overlay: cgx.Plan.every(cgx.MaxMin(4), schedule=overlay)
    train = topology.steps(lambda overlay: of_matrices(TCP, plan(overlay), **options), every=2)
    state = train.init(MATRICES)
    for _ in range(4):
        state, _ = jax.block_until_ready(train.step(state, batch))
    return digests(train.finish(state).params)


def mine(x):
    return np.asarray(x.addressable_shards[0].data)


def low_rank():
    """Returns digests, over plain axes and over Tcp. Several ways to train give nearly the same parameters.

    Between two nodes, both sum the factors in the same order. Otherwise the last bits differ.
    """
    mesh, codec = the_mesh(*BOTH), {"node": cgx.PowerSGD(2), "local": cgx.Raw()}
    x = array(mesh, (40, 30), "float32", 1)
    program = on_ranks(mesh, lambda x: [cgx.compressed_pmean(x, way, codec) for way in (BOTH, BETWEEN)])
    found = list(map(digests, jax.block_until_ready(program(x))))
    mesh, x = the_mesh("data"), array(the_mesh("data"), (40, 30), "float32", 1)
    for schedule in "two_shot", UNEVEN:
        plan = cgx.Plan.every(cgx.PowerSGD(2), schedule=schedule)
        program = on_ranks(mesh, lambda x, plan=plan: [cgx.compressed_pmean(x, a, plan) for a in ("data", TCP)])
        plain, over_tcp = map(mine, program(x))
        np.testing.assert_allclose(over_tcp, plain, rtol=0, atol=1e-5 * np.abs(plain).max())
    plan = cgx.Plan.every(cgx.PowerSGD(2), fusion_mb=0.01, schedule="two_shot")
    ways = dict(), dict(overlap="backward"), dict(overlap=cgx.Priority(1000))
    read = lambda state: list(map(mine, state.params.values()))
    plain, *others = (train(TCP, plan, read=read, **way) for way in ways)
    for trained in others:
        for x, y in zip(plain, trained, strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-5)
    return found


def explained():
    """Returns what `explain` reports for two sums.

    One is over one axis. The other one is raw and over two axes, the outer one with Tcp.
    """
    found = []
    for names, axes, codec in (("data",), TCP, cgx.MaxMin(4)), (BOTH, BETWEEN, RAW):
        mesh = the_mesh(*names)
        program = on_ranks(mesh, lambda x, axes=axes, codec=codec: cgx.compressed_psum(x, axes, codec))
        found.append(str(cgx.explain(program, array(mesh, (4000,), "float32", 0), show=False)))
    return found


def adapted():
    """Returns what a topology decides on each rank.

    These are its overlays, what it knows of links, and a sum along the last overlay.
    """
    mesh = the_mesh("data")
    topology = Topology(mesh, TCP, greed=0.5, probe_bytes=2**17)
    overlays = []
    for _ in range(4):
        topology.update()
        overlays.append(str(topology.overlay.trees))
    x, every = array(mesh, (4000,), "float32", 0), cgx.Plan.every
    total = lambda plan: on_ranks(mesh, lambda x: cgx.compressed_psum(x, TCP, plan))
    last = total(every(cgx.Raw(), schedule=topology.overlay))(x)
    known = np.isfinite(topology.links.rates).mean() if jax.process_index() == 0 else None
    finite = bool(np.isfinite(last.addressable_data(0)).all())
    plans = [every(cgx.Raw(), schedule=schedule) for schedule in (UNEVEN, "one_shot", "two_shot", "ring")]
    plans.append(every(cgx.MaxMin(4), schedule="two_shot"))
    explained = [cgx.explain(total(plan), x, show=False).bytes for plan in plans] if known else None
    return overlays, topology.version, topology.probes, known, finite, explained


def sum_until(action, last):
    mesh, axis = the_mesh("data"), cgx.Tcp("data", timeout={"stay_away": 1.0, "update": 10.0}.get(action, 60.0))
    x = array(mesh, (200_000,), "float32", 0)
    collective = cgx.compressed_pmean if action == "differ" and last else cgx.compressed_psum
    schedule = "tree" if action in ("raise", "stay_away") else "two_shot"
    program = on_ranks(mesh, lambda x: collective(x, axis, cgx.Plan.every(cgx.MaxMin(4), schedule=schedule)))
    topology = Topology(mesh, axis) if action == "update" else None
    connections.connect(1, 60)
    for i in range(10**9):
        if i == 5 and action == "interrupt":
            pressed = time.monotonic() + 1
            if last:
                signal.signal(signal.SIGINT, signal.default_int_handler)  # jobs in the background ignore the signal
                threading.Timer(1, os.kill, (os.getpid(), signal.SIGINT)).start()
            else:
                time.sleep(8)
        elif last and i == 5:
            if action == "die":
                if os.fork() == 0:
                    os.close(1)
                    time.sleep(100)
                    os._exit(0)
                os.kill(os.getpid(), signal.SIGKILL)
            if action == "raise":
                raise ValueError("an error of one rank")
            time.sleep(10**6)
        try:
            topology.update() if topology else program(x).block_until_ready()
        except KeyboardInterrupt:
            return time.monotonic() - pressed
        except jax.errors.JaxRuntimeError as error:
            return str(error)
    return None


def main():
    action, port, rank, processes = sys.argv[1], *map(int, sys.argv[2:])
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: end together with the parent
    devices = {"digests": 2, "uneven": 1 + 2 * rank, "unwaited": 4}.get(action, 1)
    jax.config.update("jax_num_cpu_devices", devices)
    jax.distributed.initialize(f"127.0.0.1:{port}", processes, rank)
    if action == "digests":
        result = everything(tcp=True)
    elif action == "uneven":
        result = uneven()
    elif action == "others":
        connections.connect(1, 60)
        result = dict(
            explained=explained() if rank == 1 else "",
            low_rank=low_rank(),
            events=order_of_events(),
            adapted=adapted(),
            changing=[changing(), changing(overlap=cgx.Priority())],
        )
    elif action == "cross":
        result = end_without(rank == processes - 1)
    elif action == "connections":
        result = over_connections()
    elif action == "unwaited":
        result = unwaited()
    else:
        result = sum_until(action, rank == processes - 1)
    print("RESULT", json.dumps(result), flush=True)
    if action not in ("digests", "uneven", "others"):  # end like a healthy process, without waiting for the others
        os._exit(0)


if __name__ == "__main__":
    main()
