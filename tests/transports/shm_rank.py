"""A rank that test_shm.py starts:

    python shm_rank.py ACTION RANK SIZE

To exchange Python values, a rank prints its value and reads the values of all. The last line that it prints is the
result of the action, as JSON. Then it waits to be killed.
"""

import atexit
import ctypes
import functools
import hashlib
import json
import os
import pathlib
import pickle
import signal
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jaxcgx as cgx
from jaxcgx.exchange import schedules
from jaxcgx.exchange.message import Message, Stage, Sum
from jaxcgx.transports.shm import Shm

BYTES = (0, 1, 17, 1_000_003)
SCHEDULES = ("two_shot", "one_shot", "ring")
LEAVES = {"w": ((300, 37), jnp.float32), "b": ((17,), jnp.float32), "half": ((3001,), jnp.bfloat16)}


def allreduce(schedule, net, *leaves):
    codec, key = cgx.MaxMin(4, rounding="stochastic"), jnp.array([1, 2], jnp.uint32)
    message = Message(tuple(range(len(leaves))), list(leaves), key)
    return schedules.allreduce(Stage(net, codec, schedule, codec), message, Sum()).leaves


class Comm:
    """The part of a communicator that a transport needs."""

    def __init__(self, rank, size):
        self.rank, self.size = rank, size

    def allgather(self, mine):
        print("mine", pickle.dumps(mine).hex(), flush=True)
        return [pickle.loads(bytes.fromhex(each)) for each in input().split()]


def random(shape, dtype, *seed):
    x = np.random.RandomState(np.array(seed, np.uint32)).standard_normal(shape) * 50
    return np.asarray(jnp.asarray(x, jnp.float32).astype(dtype))


def of_ranks(net, shape, dtype, seed=0):
    """Returns the arrays of all ranks, which every rank knows."""
    return np.stack([random(shape, dtype, seed, rank) for rank in range(net.size)])


def same(got, expected):
    got, expected = np.asarray(got), np.asarray(expected)
    assert (got.shape, got.dtype) == (expected.shape, expected.dtype) and got.tobytes() == expected.tobytes()


def check_rows(net):
    for dtype, sizes in (
        (jnp.uint8, BYTES),
        (jnp.bfloat16, (5,)),
        (jnp.complex64, (3,)),
        (jnp.bool_, (9,)),
        (jnp.int4, (5,)),
    ):
        for n in sizes:
            every = of_ranks(net, (net.size, n), dtype)
            moved = jax.jit(
                lambda x: (net.all_to_all(x), net.all_gather(x[0]), net.shift(x[0]), net.broadcast(x[0], net.size - 1))
            )(every[net.rank])
            for got, expected in zip(
                moved, (every[:, net.rank], every[:, 0], every[net.rank - 1, 0], every[-1, 0]), strict=True
            ):
                same(got, expected)


def check_plain(net):
    for shape, dtype in (
        ((), jnp.float32),
        ((0,), jnp.float32),
        ((3, 5), jnp.float32),
        ((17,), jnp.bfloat16),
        ((17,), jnp.int8),
        ((17,), jnp.bool_),
    ):
        every = of_ranks(net, shape, dtype)
        wide = every.astype({jnp.bfloat16: np.float32, jnp.bool_: np.int32}.get(dtype, dtype))
        total = functools.reduce(np.add, wide).astype(np.int32 if dtype == jnp.bool_ else dtype)
        same(net.plain_psum(jnp.asarray(every[net.rank])), total)
    x = of_ranks(net, (2, net.size * 3), jnp.float32)
    mine = jnp.asarray(x[net.rank])
    total = functools.reduce(np.add, x)
    same(net.plain_pmean(mine), jnp.asarray(total) / net.size)
    same(net.plain_psum_scatter(mine, 1, True), total[:, 3 * net.rank :][:, :3])
    same(net.plain_all_gather(mine, 0, True, "varying"), x.reshape(-1, net.size * 3))
    same(net.plain_all_to_all(mine, 1, 0, True), x.reshape(-1, net.size, 3)[:, net.rank])


def check_control_flow(net):
    every = of_ranks(net, (5,), jnp.float32)
    mine, before = jnp.asarray(every[net.rank]), jnp.asarray(every[net.rank - 1])
    same(net.shift(mine), before)  # outside of jit
    with jax.disable_jit():
        same(net.shift(mine), before)
    ahead = jax.jit(net.shift).lower(mine).compile()
    same(ahead(mine), before)
    same(ahead(mine), before)  # JAX handles the second call differently
    same(jax.jit(lambda x: lax.fori_loop(0, 100 * net.size + 1, lambda i, x: net.shift(x), x))(mine), before)
    goes_on, step = lambda x: x[5] < 7, lambda x: jnp.append(net.shift(x[:5]), x[5] + 1)
    looped = jax.jit(lambda x: lax.while_loop(goes_on, step, jnp.append(x, 0.0)))(mine)
    same(looped[:5], every[(net.rank - 7) % net.size])
    branch = jax.jit(lambda go, x: lax.cond(go, net.shift, lambda x: x, x))
    same(branch(True, mine), before)
    same(branch(False, mine), mine)
    # Only the order of the program keeps these apart.
    many = jax.jit(lambda x: [net.shift(x + i) if i % 2 else net.all_gather(x + i) for i in range(40)])(mine)
    for i, got in enumerate(many):
        same(got, before + i if i % 2 else every + np.float32(i))
    for _ in range(20):  # each program is a separate call, and no rank waits
        last = branch(True, mine)
    same(last, before)


def check_vmap(net):
    every = of_ranks(net, (3, net.size, 4, 2), jnp.float32)  # two axes around the axis with a row for each rank
    x = jnp.asarray(every[net.rank])
    same(jax.jit(jax.vmap(jax.vmap(net.all_to_all, 1, 1)))(x), np.moveaxis(every[:, :, net.rank], 0, 1))
    for f in (net.all_gather, net.shift, functools.partial(net.broadcast, root=0), net.plain_psum):
        same(jax.vmap(f, 1)(x[0]), np.stack([f(row) for row in x[0].swapaxes(0, 1)]))


def check_derivatives(net):
    x = jnp.asarray(of_ranks(net, (net.size, 4), jnp.float32)[net.rank]).round()  # whole numbers, so sums are exact
    for f in (
        net.all_to_all,
        net.all_gather,
        net.shift,
        functools.partial(net.broadcast, root=net.size - 1),
        net.plain_psum,
    ):
        y, pull = jax.vjp(f, x)
        ct = jnp.asarray(of_ranks(net, y.shape, jnp.float32, 1)[net.rank]).round()
        # over all ranks, <A x, c> = <x, A' c>
        same(net.plain_psum(jnp.vdot(y, ct)), net.plain_psum(jnp.vdot(x, pull(ct)[0])))
        same(jax.jvp(f, (x,), (2 * x,))[1], 2 * y)

    # Goes around the ring, and is multiplied by every rank's w on the way.
    def around(w):
        return lax.scan(jax.checkpoint(lambda c, _: (net.shift(c * w), None)), jnp.float32(1), length=net.size)[0]

    product, w = np.float32(2 ** sum(range(net.size))), np.float32(2**net.rank)
    same(around(w), product)
    same(jax.jit(jax.grad(around))(w), net.size * product / w)


def check_no_traces():
    """Checks that a kill would leave nothing behind."""
    descriptors = [path.readlink() for path in pathlib.Path("/proc/self/fd").iterdir() if path.is_symlink()]
    assert not [name for name in descriptors if "memfd:jaxcgx" in str(name)]
    assert not [name for name in os.listdir("/dev/shm") if "jaxcgx" in name]
    with open("/proc/self/maps") as f:
        assert "memfd:jaxcgx (deleted)" in f.read()


def digested(sums):
    return jax.tree.map(lambda x: hashlib.sha256(np.asarray(x).tobytes()).hexdigest(), sums)


def digests(net):
    """Returns the digests of the results of the schedules on these ranks."""
    leaves = [jnp.asarray(of_ranks(net, *leaf)[net.rank]) for leaf in LEAVES.values()]
    return digested({schedule: jax.jit(functools.partial(allreduce, schedule, net))(*leaves) for schedule in SCHEDULES})


def exchanges(net):
    check_rows(net)
    check_no_traces()


def everything(net):
    other = Shm.over(Comm(net.rank, net.size), timeout=60)  # a second job of the same processes
    for check in (exchanges, check_plain, check_control_flow, check_vmap, check_derivatives):
        check(net)
        same(other.plain_psum(jnp.int32(1)), np.int32(net.size))
    return digests(net)


def until_an_error(net, n=100_000):
    """Returns the error of the first exchange that fails."""
    exchange = jax.jit(net.all_to_all)
    try:
        while True:
            exchange(jnp.zeros((net.size, n), jnp.uint8)).block_until_ready()
    except jax.errors.JaxRuntimeError as error:
        return str(error)


def fail(net):
    raise ValueError("an error of one rank")


# What the last rank does while the others exchange. "leave" closes its transport; "fail" ends with an exception, and
# its process stays.
LAST = dict(
    die=lambda net: threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGKILL)).start(),  # during an exchange
    stay_away=lambda net: signal.pause(),
    fail=fail,
    leave=lambda net: [net.close() for _ in range(2)],  # closing twice has no effect
)


def mistake(net):
    """The last rank takes the bytes for other numbers."""
    dtype = jnp.float32 if net.rank == net.size - 1 else jnp.int32
    try:
        jax.jit(net.all_gather)(jnp.zeros(5, dtype)).block_until_ready()
    except jax.errors.JaxRuntimeError as error:
        return str(error)


def main():
    action, rank, size = sys.argv[1], *map(int, sys.argv[2:])
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: end together with the parent
    if action == "fail":
        atexit.register(signal.pause)  # JAX and MPI may also wait for the other processes at the end
    net = Shm.over(Comm(rank, size), timeout=2 if action == "stay_away" else 60)
    if action in LAST and rank == size - 1:
        LAST[action](net)
    run = until_an_error if action in LAST else globals()[action]
    print(json.dumps(run(net)), flush=True)
    signal.pause()  # stays alive as long as other ranks may read


if __name__ == "__main__":
    main()
