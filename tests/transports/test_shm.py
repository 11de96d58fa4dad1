"""Tests processes that share memory: they get the results of a mesh, and a failing one is an error of the others."""

import functools
import json
import os
import pathlib
import re
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from errors import names
from helpers import FULL, load_script
from ranks import mesh, on_ranks
from started import Processes

from jaxcgx import _compat
from jaxcgx._compat import mlir
from jaxcgx.native import registration
from jaxcgx.transports.shm import Shm
from jaxcgx.transports.xla import Axes

RANK = pathlib.Path(__file__).with_name("shm_rank.py")


class Ranks(Processes):
    """Runs shm_rank.py in some processes."""

    def __init__(self, action, size, **env):
        kept = os.environ.get("JAX_ENABLE_COMPILATION_CACHE", "true")  # each rank has programs of its own
        words = ([RANK, action, rank, size] for rank in range(size))
        super().__init__(*words, JAX_ENABLE_COMPILATION_CACHE=kept, **env)

    def result(self, rank):
        """Returns the result of the action on a rank. Rank 0 must be asked first, while all ranks gather values."""
        for line in self.running[rank].stdout:
            if line.startswith("mine "):
                every = [line, *(process.stdout.readline() for process in self.running[1:])]
                for process in self.running:
                    process.stdin.write(" ".join(each.split()[1] for each in every) + "\n")
            else:
                return json.loads(line)
        raise AssertionError(f"rank {rank} ended with status {self.running[rank].wait()}")

    def results(self):
        return list(map(self.result, range(len(self.running))))


def on_a_mesh(size, monkeypatch):
    """Returns the digests of shm_rank.py for ranks on a mesh."""
    script = load_script(RANK, monkeypatch)
    every = [jnp.asarray(script.of_ranks(Shm(0, size, 0, None), *leaf)) for leaf in script.LEAVES.values()]

    def total(schedule):
        run = functools.partial(script.allreduce, schedule, Axes(("a",)))
        return on_ranks(run, mesh(size), check_vma=False)(*every)

    sums = {schedule: total(schedule) for schedule in script.SCHEDULES}
    return [script.digested(jax.tree.map(lambda x: np.asarray(x)[rank], sums)) for rank in range(size)]


def test_everything_on_three_ranks(monkeypatch):
    with Ranks("everything", 3) as processes:
        assert processes.results() == on_a_mesh(3, monkeypatch)


# tests/cpp/test_ring.cc tests 1 to 4 ranks, which are threads.
@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.short), *([4] * FULL)])
def test_exchanges(size):
    with Ranks("exchanges", size) as processes:
        assert processes.results() == [None] * size


OTHER = "INVALID_ARGUMENT: .* all_gather of 20 bytes of other arrays, or of another codec, schedule or divisor; every"
ENDED = r"UNAVAILABLE: jaxcgx_exchange: all_to_all of 100000 bytes: .*rank 2 \(process \d+\).* has ended"
CLOSED = "FAILED_PRECONDITION: jaxcgx_exchange: this transport was closed"
LATE = r"DEADLINE_EXCEEDED: .* rank 0 waits for rank 1 \(process \d+\), which has not come within 2000 ms"


@pytest.mark.parametrize(
    ("action", "size", "words"),
    [
        ("die", 3, [ENDED, ENDED]),
        ("fail", 2, ["which has left"]),
        ("stay_away", 2, [LATE]),
        ("leave", 2, ["which has left", CLOSED]),
        ("mistake", 2, [OTHER, OTHER]),
    ],
)
def test_a_rank_that_fails_is_an_error_of_the_others(action, size, words):
    with Ranks(action, size) as processes:
        for rank, pattern in enumerate(words):
            assert re.search(pattern, processes.result(rank))
        last = processes.running[-1]
        # A rank that ended with an exception still has its process.
        assert last.wait() == -signal.SIGKILL if action.startswith("die") else last.poll() is None


class Alone:
    rank, size = 0, 1

    def allgather(self, mine):
        return [mine]


@pytest.fixture
def alone():
    net = Shm.over(Alone())
    yield net
    net.close()


def test_one_rank(alone, monkeypatch):
    script = load_script(RANK, monkeypatch)
    script.check_rows(alone)
    script.check_plain(alone)


@pytest.mark.parametrize("timeout", [0, -1, "1", True, float("nan"), float("inf")])
def test_a_timeout_must_be_a_positive_number(timeout):
    error = TypeError if isinstance(timeout, bool | str) else ValueError
    with names(error, "Shm.over timeout"):
        Shm.over(Alone(), timeout)


def test_what_one_rank_can_not_do_is_an_error_of_every_rank():
    class Many(Alone):
        size = 2000

    class Another(Many):
        def allgather(self, mine):
            return [mine, OSError("no memory")]

    with names(RuntimeError, "Shm.over - 2000"):
        Shm.over(Many())
    with pytest.raises(RuntimeError, match="Shm.over: rank 1: no memory"):
        Shm.over(Another())


def test_without_the_native_module(monkeypatch):
    monkeypatch.setattr(registration, "MODULE", None)
    with names(RuntimeError, "Shm.over - native module JAXCGX_REFERENCE=1 unset it"):
        Shm.over(Alone())


def test_platforms_that_it_can_not_serve(alone):
    traced = jax.jit(alone.all_gather).trace(jnp.zeros(3))
    with pytest.raises(NotImplementedError, match="jaxcgx_exchange: .*for CPUs and NVIDIA's GPUs"):
        traced.lower(lowering_platforms=("tpu",))
    if not registration.has_cuda():
        with pytest.raises(NotImplementedError, match="jaxcgx_exchange: .*this build has no CUDA half; build it"):
            traced.lower(lowering_platforms=("cuda",))


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda net: net.all_to_all(jnp.ones((2, 3))), ValueError, "all_to_all rows 1 ranks float32[2, 3]"),
        (lambda net: net.shift(jnp.ones(3, jnp.float4_e2m1fn)), TypeError, "shift x whole bytes float4_e2m1fn[3]"),
    ],
)
def test_arrays_that_it_can_not_move(alone, call, error, words):
    with names(error, words):
        call(alone)


def test_one_device_only(alone):
    x = jax.device_put(jnp.ones((8, 3)), jax.NamedSharding(mesh(8), jax.P("a")))
    with pytest.raises(ValueError, match="ordered effects are not supported for more than 1 device"):
        jax.jit(alone.all_gather)(x)


@pytest.mark.parametrize(
    ("operand", "changes", "words"),
    [
        (jnp.zeros(3, jnp.uint8), {}, None),
        (jnp.zeros(3, jnp.uint8), {"operation": 4}, "INVALID_ARGUMENT: jaxcgx_exchange: no operation 4"),
        (jnp.zeros(3, jnp.uint8), {"operation": -1}, "no operation -1"),
        (jnp.zeros(3, jnp.uint8), {"argument": 1}, "argument 1 of 1 ranks"),
        (jnp.zeros(3, jnp.uint8), {"argument": -1}, "argument -1 of 1 ranks"),
        (jnp.zeros(3, jnp.uint8), {"digest": None}, "INVALID_ARGUMENT: jaxcgx_exchange: attribute 'digest': "),
        (jnp.zeros(2, jnp.uint8), {}, "a result of 3 bytes does not belong to an operand of 2"),
        (jnp.zeros(3, jnp.int8), {}, "a result of another dtype than the operand"),
        (jnp.zeros(3, jnp.uint8), {"segment": 10**9}, CLOSED),
    ],
)
def test_the_handler_trusts_nobody(alone, operand, changes, words):
    attributes = {"segment": alone.segment, "operation": 2, "argument": 0, "digest": 0} | changes
    attributes = {name: np.int64(value) for name, value in attributes.items() if value is not None}
    effect = _compat.OrderedEffect()
    call = _compat.Primitive("call")
    call.def_effectful_abstract_eval(lambda x: (x.update(shape=(3,), dtype=np.dtype("uint8")), {effect}))
    lower = _compat.lower_ordered("jaxcgx_exchange", effect)
    mlir.register_lowering(call, lambda ctx, x: lower(ctx, x, **attributes))
    if words is None:
        jax.jit(call.bind)(operand)
        return
    with pytest.raises(jax.errors.JaxRuntimeError, match=words):
        jax.jit(call.bind)(operand).block_until_ready()
