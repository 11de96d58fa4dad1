"""Tests processes that share memory: they get the results of a mesh, and a failing one is an error of the others."""

import functools
import hashlib
import json
import pathlib
import re
import signal
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from errors import raises, says
from helpers import FULL, load_script
from ranks import mesh, on_ranks

from jaxcgx import _compat
from jaxcgx._compat import mlir
from jaxcgx.native import registration
from jaxcgx.transports.shm import Shm
from jaxcgx.transports.xla import Axes

RANK = pathlib.Path(__file__).with_name("shm_rank.py")
LIMIT = 300  # seconds, after which processes count as hung; they need a tenth of it


class Processes:
    """Runs shm_rank.py in some processes. At the end, no process is left."""

    def __init__(self, action, size):
        self.action, self.size = action, size

    def __enter__(self):
        self.running = [
            subprocess.Popen(
                [sys.executable, RANK, self.action, str(rank), str(self.size)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                bufsize=1,
            )
            for rank in range(self.size)
        ]
        self.limit = threading.Timer(LIMIT, self.kill)
        self.limit.start()
        return self

    def kill(self):
        for process in self.running:
            process.kill()

    def __exit__(self, *_):
        self.limit.cancel()
        self.kill()
        for process in self.running:
            process.communicate()

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
        return [self.result(rank) for rank in range(self.size)]


def on_a_mesh(size, monkeypatch):
    """Returns the digests of shm_rank.py for ranks on a mesh."""
    script = load_script(RANK, monkeypatch)
    every = [jnp.asarray(script.of_ranks(Shm(0, size, 0, None), *leaf)) for leaf in script.LEAVES.values()]

    def run(schedule):
        return on_ranks(functools.partial(script.allreduce, schedule, Axes(("a",))), mesh(size), check_vma=False)(
            *every
        )

    sums = {schedule: run(schedule) for schedule in script.SCHEDULES}
    return [
        {
            schedule: [hashlib.sha256(np.asarray(x)[rank].tobytes()).hexdigest() for x in leaves]
            for schedule, leaves in sums.items()
        }
        for rank in range(size)
    ]


def test_everything_on_three_ranks(monkeypatch):
    with Processes("everything", 3) as processes:
        assert processes.results() == on_a_mesh(3, monkeypatch)


# tests/cpp/test_segment.cc tests 1 to 4 ranks.
@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.short), *([4] * FULL)])
def test_exchanges(size):
    with Processes("exchanges", size) as processes:
        assert processes.results() == [None] * size


def test_a_rank_that_is_killed_is_an_error_of_the_others():
    with Processes("die", 3) as processes:
        for rank in (0, 1):
            error = processes.result(rank)
            assert error.startswith("UNAVAILABLE: jaxcgx_exchange: all_to_all of 100000 bytes: ")
            assert re.search(r"rank 2 \(process \d+\).* has ended", error)
        assert processes.running[2].wait() == -signal.SIGKILL


def test_a_rank_that_dies_before_it_attaches_is_an_error_of_the_others():
    with Processes("die_early", 2) as processes:
        assert re.fullmatch(r"rank 1 \(process \d+\) has ended", processes.result(0))


def test_a_rank_that_ends_with_an_exception_is_an_error_of_the_others():
    with Processes("fail", 2) as processes:
        assert "which has left" in processes.result(0)
        assert processes.running[1].poll() is None  # its process is still there


def test_the_same_bytes_of_other_numbers_are_an_error_of_every_rank():
    with Processes("mistake", 2) as processes:
        for error in processes.results():
            assert re.search(
                r"INVALID_ARGUMENT: .* all_gather of 20 bytes of other arrays, or of another codec, schedule or "
                r"divisor; every rank must run the same exchanges",
                error,
            )


def test_rows_of_different_lengths_are_an_error_of_every_rank():
    with Processes("differ", 2) as processes:
        errors = processes.results()
    for rank, error in enumerate(errors):
        assert re.search(
            rf"INVALID_ARGUMENT: .* rank {rank} has all_to_all of 10000{rank} bytes, rank {1 - rank} \(process \d+\) "
            "has all_to_all of "
            rf"10000{1 - rank} bytes; every rank must run the same exchanges, in the same order",
            error,
        )


def test_a_rank_that_does_not_come_is_an_error_after_the_timeout():
    with Processes("stay_away", 2) as processes:
        error = processes.result(0)
    assert re.search(
        r"DEADLINE_EXCEEDED: .* rank 0 waits for rank 1 \(process \d+\), which has not come within 2000 ms", error
    )


def test_a_rank_that_closes_its_transport():
    with Processes("leave", 2) as processes:
        assert "which has left" in processes.result(0)
        assert "FAILED_PRECONDITION: jaxcgx_exchange: this transport was closed" in processes.result(1)


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
    with raises(error, says("Shm.over", "timeout", expected="positive seconds")):
        Shm.over(Alone(), timeout)


def test_what_one_rank_can_not_do_is_an_error_of_every_rank():
    class Many(Alone):
        size = 2000

    class Another(Many):
        def allgather(self, mine):
            return [mine, OSError("no memory")]

    with raises(RuntimeError, says("Shm.over", expected="rank 0: expected 1 to 1024 ranks", got="2000")):
        Shm.over(Many())
    with pytest.raises(RuntimeError, match="Shm.over: rank 1: no memory"):
        Shm.over(Another())


def test_without_the_native_module(monkeypatch):
    monkeypatch.setattr(registration, "MODULE", None)
    with pytest.raises(
        RuntimeError,
        match="Shm.over: rank 0: this transport needs the native module, and JAXCGX_REFERENCE=1 leaves it out; "
        "unset it",
    ):
        Shm.over(Alone())


def test_one_device_only(alone):
    x = jax.device_put(
        jnp.ones((8, 3)),
        jax.NamedSharding(jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Auto,)), jax.P("d")),
    )
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
        (
            jnp.zeros(3, jnp.uint8),
            {"segment": 10**9},
            "FAILED_PRECONDITION: jaxcgx_exchange: this transport was closed",
        ),
    ],
    ids=[
        "right",
        "operation",
        "negative operation",
        "argument",
        "negative argument",
        "missing",
        "bytes",
        "dtype",
        "segment",
    ],
)
def test_the_handler_trusts_nobody(alone, operand, changes, words):
    attributes = {"segment": alone.segment, "operation": 2, "argument": 0, "digest": 0} | changes
    effect = _compat.OrderedEffect()
    call = _compat.Primitive("call")
    call.def_effectful_abstract_eval(lambda x: (x.update(shape=(3,), dtype=np.dtype("uint8")), {effect}))
    mlir.register_lowering(
        call,
        lambda ctx, x: _compat.lower_ordered("jaxcgx_exchange", effect)(
            ctx, x, **{name: np.int64(value) for name, value in attributes.items() if value is not None}
        ),
    )
    if words is None:
        jax.jit(call.bind)(operand)
        return
    with pytest.raises(jax.errors.JaxRuntimeError, match=words):
        jax.jit(call.bind)(operand).block_until_ready()
