"""Tests processes that exchange over jaxcgx's own connections: the bits of plain axes, and an end when a rank fails."""

import contextlib
import json
import os
import pathlib
import random
import re
import signal
import socket
import subprocess
import sys
import threading

import jax
import pytest
from errors import raises, says
from helpers import load_script
from jax.sharding import PartitionSpec as P
from ranks import mesh, on_ranks

import jaxcgx as cgx
from jaxcgx.exchange import costs
from jaxcgx.native import connections
from jaxcgx.native.meeting import Links
from jaxcgx.transports.axes import axis_names
from jaxcgx.transports.tcp import check_tcp
from jaxcgx.wan import Overlay, Tree

RANK = pathlib.Path(__file__).with_name("tcp_rank.py")
LIMIT = 300  # seconds, after which processes count as hung; they need a tenth of it


def results(action, processes):
    """Returns the result of an action on each rank, or None for a rank that ended without a result."""
    port = random.randrange(20_000, 32_000)  # below the ports that the system gives to connections
    # XLA crashes if it has to keep a program of several processes.
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_ENABLE_COMPILATION_CACHE": "false"}
    running = [
        subprocess.Popen(
            [sys.executable, RANK, action, str(port), str(rank), str(processes)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            process_group=0,
        )
        for rank in range(processes)
    ]
    limit = threading.Timer(LIMIT, lambda: [process.kill() for process in running])
    limit.start()
    try:
        found = []
        for process in running:
            lines = [line for line in process.stdout if line.startswith("RESULT ")]
            found.append(json.loads(lines[0].removeprefix("RESULT ")) if lines else None)
            if action in ("stay_away", "update"):  # the last process never ends
                running[-1].send_signal(signal.SIGKILL)
        return found
    finally:
        limit.cancel()
        for process in running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # and its children
            process.communicate()


@pytest.fixture(scope="module")
def everything():
    return results("everything", 4)


@pytest.fixture(scope="module")
def bits(everything):
    """Returns {case: (digests over Tcp, digests over plain axes)}."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        expected = load_script(RANK, monkeypatch).everything(tcp=False)
    found = {case: {} for case in expected}
    for each in everything:
        for case in expected:
            found[case] |= each["digests"][case]
    return {case: (found[case], expected[case]) for case in expected}


@pytest.mark.parametrize("fed", [False, True])
def test_the_bits_of_plain_axes(bits, fed):
    found, expected = zip(*(each for case, each in bits.items() if (case == "raw, fed") == fed))
    assert found == expected


def test_low_rank(everything):
    for found in (each["low_rank"] for each in everything):
        assert len(found) == 6 and found[::2] == found[1::2]


def test_meshes_that_it_can_not_serve(everything):
    for abstract, automatic in (each["errors"] for each in everything):
        says(
            "Tcp",
            expected="to be told which devices the mesh has",
            got="an abstract mesh",
            remedy="pass jax.shard_map the mesh itself",
        ).check(abstract)
        says(
            "Tcp", expected="a jax.shard_map over all axes of the mesh", got="one that leaves 'other' to the compiler"
        ).check(automatic)


def test_all_ranks_get_the_same_overlays(everything):
    """Rank 0 decides. Rates of links are measured by probes, and by other transfers."""
    (overlays, version, probes, known, finite, explained), *others = [each["adapted"] for each in everything]
    assert len(overlays) == 4 and probes >= 1 and known > 0.5 and finite
    assert all(other == [overlays, version, probes, None, True, None] for other in others)
    uneven = Overlay((Tree((-1, 0, 1, 0), 5), Tree((2, 2, 3, -1), 2), Tree((1, -1, 1, 1), 1)))
    leaf = jax.ShapeDtypeStruct((4000,), "float32")
    schedules = uneven, "one_shot", "two_shot", "ring"
    sums = [(schedule, cgx.Raw()) for schedule in schedules] + [("two_shot", cgx.MaxMin(4))]
    assert explained == [costs.sent(schedule, codec, [leaf], 4, "tcp") for schedule, codec in sums]


def test_an_overlay_may_change_while_gradients_are_on_their_way(everything):
    """All bits are those of plain steps whose overlay changes as often."""
    for plain, priority in (each["changing"] for each in everything):
        assert plain == priority


def test_explain_counts_it(everything):
    over_one, over_two = everything[1]["explained"]
    rows = [line.split() for line in over_one.splitlines()]
    sent = f"{3 * cgx.MaxMin(4).wire_bytes((4000,), 'float32'):,}"
    assert ["all-gather", "over", "Tcp", "data", "uint8", sent] in [row[:6] for row in rows]
    assert ["data", sent, "24,000"] in [row[:3] for row in rows]  # lax.psum sends 2 * 3 / 4 of 16,000
    rows = [line.split()[:5] for line in over_two.splitlines()]
    assert ["all-gather", "over", "Tcp", "node", "uint8"] in rows


def test_means_that_cross_programs(everything):
    """A later program runs while an exchange that an earlier one began is still in flight.

    The exchange can't be over, because the other ranks have not begun it.
    """
    for same, zeros, in_one_step, ended_twice in (each["events"] for each in everything):
        assert same and zeros and in_one_step
        assert "INVALID_ARGUMENT" in ended_twice and "end a ticket once" in ended_twice


def test_a_rank_that_is_killed_while_a_mean_crosses_programs():
    (error, usable), nothing = results("cross", 2)
    assert re.search(
        r"UNAVAILABLE: jaxcgx_tcp: two_shot of \d+ bytes: rank 0 waits for rank 1 \(process 1 at 127.0.0.1\), which "
        r"has ended or left",
        error,
    )
    assert all(usable) and len(usable) == 2 and nothing is None


def test_several_connections_and_a_pace():
    found = list(filter(None, results("connections", 2)))  # JAX may kill a rank as soon as the other one has ended
    assert found
    for lossless, over_tcp, plain, never_ended in found:
        assert 0.66 < lossless < 0.69
        assert over_tcp == plain
        assert "RESOURCE_EXHAUSTED: jaxcgx_tcp_allreduce: 10000 sums have begun and have not been ended" in never_ended


def test_a_rank_that_is_killed_is_an_error_of_the_others():
    """This also holds if it has a child with copies of its sockets."""
    error, nothing = results("die", 2)
    assert re.search(
        r"UNAVAILABLE: jaxcgx_tcp: two_shot of \d+ bytes: rank 0 waits for rank 1 \(process 1 at 127.0.0.1\), "
        r"which has "
        "ended or left",
        error,
    )
    assert nothing is None


def test_a_rank_that_ends_with_an_exception_is_an_error_of_the_others():
    """JAX keeps its process until the others end, for at most 300 s."""
    error, nothing = results("raise", 2)
    assert re.search(
        r"UNAVAILABLE: .* rank 0 waits for rank 1 \(process 1 at 127.0.0.1\), which has ended or left", error
    )
    assert nothing is None


def test_ctrl_c_ends_an_exchange_at_once():
    """Python sees the signal when the exchange ends. The other rank gets an error."""
    error, seconds = results("interrupt", 2)
    assert seconds < 2 and "rank 0 waits for rank 1 (process 1 at 127.0.0.1), which has ended or left" in error


def test_programs_that_differ_are_an_error_of_every_rank():
    errors = list(filter(None, results("differ", 2)))  # JAX may kill a rank as soon as the other one has ended
    words = "has other arrays, or another codec, schedule or divisor, of the same length"
    assert any(re.search(rf"INVALID_ARGUMENT: .* {words}; every process must run the same", each) for each in errors)
    assert all(words in each or "gave up" in each or "has ended or left" in each for each in errors)


@pytest.mark.parametrize(("action", "ms"), [("stay_away", 1000), ("update", 10_000)])
def test_a_rank_that_does_not_come_is_an_error_after_the_timeout(action, ms):
    """The same holds in the update of a Topology, which is not a step."""
    error, nothing = results(action, 2)
    assert re.search(rf"DEADLINE_EXCEEDED: .* rank 0 waits for rank 1 .*, which has not come within {ms} ms", error)
    assert nothing is None


class Store:
    """The part of jax.distributed's store that processes need to meet."""

    def __init__(self):
        self.values = {}

    def key_value_set(self, key, value):
        if key in self.values:
            raise jax.errors.JaxRuntimeError("ALREADY_EXISTS")
        self.values[key] = value

    def key_value_dir_get(self, folder):
        return list(self.values.items())


def test_processes_that_do_not_meet_have_no_second_try(monkeypatch):
    store = Store()
    monkeypatch.setattr(connections._compat, "rendezvous", lambda: (store, 1, 2, "127.0.0.1:1"))
    monkeypatch.setattr(connections, "_why", None)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"Tcp: process 0 has not come within 0.1 s; start the processes again"):
            connections.connect(0.1)
    assert store.values["jaxcgx/tcp/1"].endswith(" 127.0.0.1")


def test_the_wait_for_the_others_can_be_interrupted(monkeypatch):
    monkeypatch.setattr(connections._compat, "rendezvous", lambda: (Store(), 0, 2, "127.0.0.1:1"))
    monkeypatch.setattr(connections, "_why", None)
    interrupt = threading.Timer(0.2, signal.pthread_kill, (threading.get_ident(), signal.SIGINT))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # jobs in the background ignore the signal
    interrupt.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            connections.connect(60)
    finally:
        signal.signal(signal.SIGINT, before)
    with pytest.raises(RuntimeError, match="the wait for the other processes was interrupted; start the processes"):
        connections.connect(60)


def test_the_coordinator_ends_while_a_process_waits(monkeypatch):
    store = Store()

    def get(folder):
        if "jaxcgx/tcp/1" in store.values:
            raise jax.errors.JaxRuntimeError("UNAVAILABLE: gone")
        return list(store.values.items())

    store.key_value_dir_get = get
    monkeypatch.setattr(connections._compat, "rendezvous", lambda: (store, 1, 2, "127.0.0.1:1"))
    monkeypatch.setattr(connections, "_why", None)
    with pytest.raises(RuntimeError, match=r"Tcp: UNAVAILABLE: gone; start the processes again"):
        connections.connect(60)


@pytest.mark.parametrize(
    ("coordinator", "found", "listens_at"),
    [
        ("127.0.0.1", ["127.0.0.1"], ["127.0.0.1"]),
        ("localhost", ["127.0.0.1"], ["127.0.0.1"]),
        ("host0", ["127.0.1.1"], []),  # as in Debian's /etc/hosts on host0 itself
        ("203.0.113.1", ["203.0.113.1"], []),  # an address behind address translation, which no host has itself
    ],
)
def test_where_the_first_process_listens(coordinator, found, listens_at, monkeypatch):
    infos = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0)) for address in found]
    monkeypatch.setattr(connections.socket, "getaddrinfo", lambda *_, **__: infos)
    assert connections._own(coordinator) == listens_at


def test_a_process_alone():
    words = says(
        "Tcp",
        expected="processes that know each other",
        got="one alone",
        remedy="call jax.distributed.initialize first",
    )
    with raises(RuntimeError, words):
        connections.connect(1)


def test_devices_of_one_process():
    words = says(
        "compressed_psum",
        "axis_name",
        expected="Tcp on a mesh of one device of each process",
        got="2 devices of 1 process",
        remedy="start a process for each device",
    )
    with raises(ValueError, words):
        on_ranks(lambda x: cgx.compressed_psum(x, cgx.Tcp("a"), cgx.MaxMin(4)), mesh(2))(jax.numpy.ones((2, 3)))


def test_axes_of_vmap():
    words = says(
        "compressed_psum", "axis_name", expected="Tcp of axes of a mesh, inside jax.shard_map", got="'a' of vmap"
    )
    with raises(ValueError, words):
        jax.vmap(lambda x: cgx.compressed_psum(x, cgx.Tcp("a"), cgx.MaxMin(4)), axis_name="a")(jax.numpy.ones((2, 3)))


def test_an_axis_that_is_not_there():
    with raises(NameError, says("compressed_psum", "axis_name", expected="no axis 'a'")):
        cgx.compressed_psum(jax.numpy.ones(3), cgx.Tcp("a"), cgx.MaxMin(4))


@pytest.mark.parametrize("name", [("a", "b"), ["a"], cgx.Tcp("a")], ids=str)
def test_the_name_of_one_axis(name):
    with raises(ValueError, says("Tcp", "name", expected="name one axis")):
        cgx.Tcp(name)


@pytest.mark.parametrize("timeout", [0, -1, "1", True, float("nan"), float("inf")])
def test_a_timeout_must_be_a_positive_number(timeout):
    with raises(
        TypeError if isinstance(timeout, bool | str) else ValueError,
        says("Tcp", "timeout", expected="positive seconds"),
    ):
        cgx.Tcp("a", timeout)


@pytest.mark.parametrize("connections", [0, -1, 65, 1.5, True])
def test_connections_must_be_a_positive_integer(connections):
    kind = ValueError if type(connections) is int else TypeError
    with raises(kind, says("Tcp", "connections", expected="integer from 1 to 64", got=str(connections))):
        cgx.Tcp("a", connections=connections)


@pytest.mark.parametrize("pace", [0, -1e6, 999, True, float("inf"), float("nan")])
def test_a_pace_must_be_a_positive_number(pace):
    kind = TypeError if pace is True else ValueError
    with raises(kind, says("Tcp", "pace", expected="at least 1000 bytes a second, or a rate", got=repr(pace))):
        cgx.Tcp("a", pace=pace)


def test_a_pace_as_people_write_rates():
    assert cgx.Tcp("a", pace="100mbit") == cgx.Tcp("a", pace=12_500_000)
    for text in "0mbit", "fast", "-1mbit":
        with raises(ValueError, says("Tcp", "pace", got=repr(text))):
            cgx.Tcp("a", pace=text)


def test_marks_that_differ():
    axes = cgx.Tcp("data", connections=4), cgx.Tcp("local")
    with raises(
        ValueError,
        says(
            "compressed_psum",
            "axis_name",
            expected="the same connections and pace in every Tcp",
            got="connections=4, pace=None and connections=1, pace=None",
        ),
    ):
        check_tcp("compressed_psum", axis_names(axes), axes)


def test_connections_stay_as_they_were_made(monkeypatch):
    monkeypatch.setattr(connections._compat, "rendezvous", lambda: (Store(), 0, 2, "127.0.0.1:1"))
    monkeypatch.setattr(connections, "_why", "")
    monkeypatch.setattr(connections, "_links", Links(1))
    words = says(
        "Tcp",
        expected="connections=1, pace=None, with which this process has connected",
        got="connections=4, pace=None",
        remedy="give every Tcp of a process the same",
    )
    with raises(ValueError, words):
        connections.connect(1, Links(4))


def test_the_same_axis_twice():
    words = says("compressed_psum", "axis_name", expected="a name or a tuple of different names", got="('a', Tcp(")
    with raises(ValueError, words):
        on_ranks(lambda x: cgx.compressed_psum(x, ("a", cgx.Tcp("a")), cgx.MaxMin(4)), mesh(2))(jax.numpy.ones((2, 3)))


def test_everything_else_knows_the_axis_by_its_name():
    axes = (cgx.Tcp("node"), "local")
    assert axis_names(axes) == ("node", "local") and axis_names(cgx.Tcp("data")) == ("data",)
    assert cgx.Plan.bytegrad(axes) == cgx.Plan.bytegrad(("node", "local"))
    transformation = cgx.compress_gradients(axes, cgx.MaxMin(4), axis_size=4)
    state = transformation.init({"w": jax.numpy.ones((64, 64))})
    assert cgx.state_specs(state, axes) == cgx.state_specs(state, ("node", "local"))
    assert cgx.state_specs(state, axes).own.residuals["w"] == P(("node", "local"))
