"""Tests processes that exchange over jaxcgx's own connections: the bits of plain axes, and an end when a rank fails."""

import json
import pathlib
import re
import signal
import socket
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from errors import names
from helpers import load_script
from jax.sharding import PartitionSpec as P
from ranks import mesh, on_ranks
from started import Processes, free_port

import jaxcgx as cgx
from jaxcgx.exchange import costs
from jaxcgx.native import connections, registration
from jaxcgx.native.meeting import Links
from jaxcgx.transports.axes import axis_names
from jaxcgx.transports.tcp import transport_over_tcp
from jaxcgx.wan import Overlay, Tree

RANK = pathlib.Path(__file__).with_name("tcp_rank.py")


def results(action, processes):
    """Returns the result of an action on each rank, or None for a rank that ended without a result."""
    found, port = [], free_port()
    with Processes(*([RANK, action, port, rank, processes] for rank in range(processes))) as started:
        for process in started.running:
            lines = [line for line in process.stdout if line.startswith("RESULT ")]
            found.append(json.loads(lines[0].removeprefix("RESULT ")) if lines else None)
            if action in ("stay_away", "update"):  # the last process never ends
                started.running[-1].send_signal(signal.SIGKILL)
    return found


@pytest.fixture(scope="module")
def others():
    return results("others", 4)


@pytest.fixture(scope="module")
def expected():
    """Returns {case: digests} of four ranks over plain axes, which are devices of one process."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        return load_script(RANK, monkeypatch).everything(tcp=False)


@pytest.fixture(scope="module")
def over_tcp():
    """Returns {case: digests} of four ranks over Tcp, which are devices of two processes."""
    first, second = results("digests", 2)
    return {case: first[case] | second[case] for case in first}


@pytest.mark.parametrize("fed", [False, True])
def test_the_bits_of_plain_axes(over_tcp, expected, fed):
    chosen = lambda bits: {case: each for case, each in bits.items() if (case == "raw, fed") == fed}
    assert chosen(expected) and chosen(over_tcp) == chosen(expected)


def test_processes_with_different_numbers_of_devices(expected):
    (first, exact), (second, same) = results("uneven", 2)
    for case in first:
        assert first[case] | second[case] == expected[case], case
    params, batch = {"v": np.ones((300, 40)), "w": np.ones((8, 300))}, np.linspace(-1, 1, 32).reshape(4, 8)
    for _ in range(2):
        gradients = jax.grad(lambda p: jnp.mean((batch @ p["w"] @ p["v"] - 1) ** 2))(params)
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients)
    assert exact == same
    for name in params:
        np.testing.assert_allclose(exact[name], params[name][0], rtol=1e-5)


def test_a_step_waits_for_the_step_before():
    """Otherwise, exchanges of several steps would keep all of XLA's threads waiting."""
    assert results("unwaited", 1) == [True]


def test_low_rank(others):
    for plain, over_tcp in (each["low_rank"] for each in others):
        assert plain == over_tcp


def test_all_ranks_get_the_same_overlays(others):
    """Rank 0 decides. Rates of links are measured by probes, and by other transfers."""
    (overlays, version, probes, known, finite, explained), *rest = [each["adapted"] for each in others]
    assert len(overlays) == 4 and probes >= 1 and known > 0.5 and finite
    assert all(other == [overlays, version, probes, None, True, None] for other in rest)
    uneven = Overlay((Tree((-1, 0, 1, 0), 5), Tree((2, 2, 3, -1), 2), Tree((1, -1, 1, 1), 1)))
    leaf = jax.ShapeDtypeStruct((4000,), "float32")
    schedules = uneven, "one_shot", "two_shot", "ring"
    sums = [(schedule, cgx.Raw()) for schedule in schedules] + [("two_shot", cgx.MaxMin(4))]
    assert explained == [costs.sent(schedule, codec, [leaf], 4, "tcp") for schedule, codec in sums]


def test_an_overlay_may_change_while_gradients_are_on_their_way(others):
    """All bits are those of plain steps whose overlay changes as often."""
    for plain, priority in (each["changing"] for each in others):
        assert plain == priority


def test_explain_counts_it(others):
    over_one, over_two = others[1]["explained"]
    rows = [line.split() for line in over_one.splitlines()]
    sent = f"{3 * cgx.MaxMin(4).wire_bytes((4000,), 'float32'):,}"
    assert ["all-gather", "over", "Tcp", "data", "uint8", sent] in [row[:6] for row in rows]
    assert ["data", sent, "24,000"] in [row[:3] for row in rows]  # lax.psum sends 2 * 3 / 4 of 16,000
    rows = [line.split()[:5] for line in over_two.splitlines()]
    assert ["all-gather", "over", "Tcp", "node", "uint8"] in rows


def test_means_that_cross_programs(others):
    """A later program runs during an exchange that can't be over, because the others haven't begun it."""
    for same, zeros, in_one_step, ended_twice in (each["events"] for each in others):
        assert same and zeros and in_one_step
        assert "INVALID_ARGUMENT" in ended_twice and "end a ticket once" in ended_twice


LEFT = r"rank 0 waits for rank 1 \(process 1 at 127.0.0.1\), which has ended or left"


def test_a_rank_that_is_killed_while_a_mean_crosses_programs():
    (error, usable), nothing = results("cross", 2)
    assert re.search(rf"UNAVAILABLE: jaxcgx_tcp: two_shot of \d+ bytes: {LEFT}", error)
    assert all(usable) and len(usable) == 2 and nothing is None


def test_several_connections_and_a_pace():
    found = list(filter(None, results("connections", 2)))  # JAX may kill a rank as soon as the other one has ended
    assert found
    for lossless, over_tcp, plain, never_ended in found:
        assert 0.66 < lossless < 0.69
        assert over_tcp == plain
        assert "RESOURCE_EXHAUSTED: jaxcgx_tcp_allreduce: 10000 sums or exchanges have begun and have" in never_ended


@pytest.mark.parametrize(
    ("action", "words"),
    [
        ("die", rf"UNAVAILABLE: jaxcgx_tcp: two_shot of \d+ bytes: {LEFT}"),  # a child has copies of its sockets
        ("raise", rf"UNAVAILABLE: .* {LEFT}"),  # JAX keeps its process until the others end, for at most 300 s
        ("stay_away", "DEADLINE_EXCEEDED: .* rank 0 waits for rank 1 .*, which has not come within 1000 ms"),
        ("update", "DEADLINE_EXCEEDED: .* rank 0 waits for rank 1 .*, which has not come within 10000 ms"),
    ],
)
def test_a_rank_that_fails_is_an_error_of_the_others(action, words):
    """It is killed, ends with an exception, or doesn't come to a step or to the update of a Topology."""
    error, nothing = results(action, 2)
    assert re.search(words, error) and nothing is None


def test_ctrl_c_ends_an_exchange_at_once():
    """Python sees the signal when the exchange ends. The other rank gets an error."""
    error, seconds = results("interrupt", 2)
    assert seconds < 2 and re.search(LEFT, error)


def test_programs_that_differ_are_an_error_of_every_rank():
    errors = list(filter(None, results("differ", 2)))  # JAX may kill a rank as soon as the other one has ended
    words = "has other arrays, or another codec, schedule or divisor, of the same length"
    assert any(re.search(rf"INVALID_ARGUMENT: .* {words}; every process must run the same", each) for each in errors)
    assert all(words in each or "gave up" in each or "has ended or left" in each for each in errors)


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


@pytest.fixture
def meet(monkeypatch):
    """Lets this process be one of two that meet at a store."""

    def of_two(rank, store, why=None, storing_crashes=False):
        monkeypatch.setattr(connections._compat, "storing_crashes", lambda: storing_crashes)
        monkeypatch.setattr(connections._compat, "rendezvous", lambda: (store, rank, 2, "127.0.0.1:1"))
        monkeypatch.setattr(connections, "_why", why)

    return of_two


def test_processes_that_do_not_meet_have_no_second_try(meet):
    meet(1, store := Store())
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"Tcp: process 0 has not come within 0.1 s; start the processes again"):
            connections.connect(1, 0.1)
    assert store.values["jaxcgx/tcp/1"].endswith(" 127.0.0.1")


def test_the_wait_for_the_others_can_be_interrupted(meet):
    meet(0, Store())
    interrupt = threading.Timer(0.2, signal.pthread_kill, (threading.get_ident(), signal.SIGINT))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # jobs in the background ignore the signal
    interrupt.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            connections.connect(1, 60)
    finally:
        signal.signal(signal.SIGINT, before)
    with pytest.raises(RuntimeError, match="the wait for the other processes was interrupted; start the processes"):
        connections.connect(1, 60)


def test_the_coordinator_ends_while_a_process_waits(meet):
    meet(1, store := Store())

    def get(folder):
        if "jaxcgx/tcp/1" in store.values:
            raise jax.errors.JaxRuntimeError("UNAVAILABLE: gone")
        return list(store.values.items())

    store.key_value_dir_get = get
    with pytest.raises(RuntimeError, match=r"Tcp: UNAVAILABLE: gone; start the processes again"):
        connections.connect(1, 60)


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
    with names(RuntimeError, "Tcp - one alone jax.distributed.initialize"):
        connections.connect(1, 1)


def psum(axes, **fields):
    return lambda x: cgx.compressed_psum(x, axes, cgx.Plan.every(cgx.MaxMin(4), **fields))


def mapped(**where):
    return jax.jit(jax.shard_map(psum(cgx.Tcp("a")), in_specs=P("a"), out_specs=P("a"), check_vma=False, **where))(X)


X, TWO = jax.numpy.ones((2, 3)), mesh(2)
ABSTRACT = jax.sharding.AbstractMesh((2,), ("a",), axis_types=(jax.sharding.AxisType.Auto,))
SOME = dict(mesh=mesh(2, 2), axis_names={"a"})
PSUM = "compressed_psum axis_name"
NO_POSITIVE_NUMBERS = [(ValueError, x) for x in (0, -1, float("inf"), float("nan"))] + [(TypeError, True)]


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: jax.vmap(psum(cgx.Tcp("a")), axis_name="a")(X), ValueError, f"{PSUM} jax.shard_map 'a' of vmap"),
        (lambda: psum(cgx.Tcp("a"))(X), NameError, f"{PSUM} no axis 'a'"),
        (lambda: on_ranks(psum(("a", cgx.Tcp("a"))), TWO)(X), ValueError, f"{PSUM} different names ('a', Tcp("),
        (lambda: mapped(mesh=ABSTRACT), ValueError, "Tcp - an abstract mesh pass jax.shard_map the mesh itself"),
        (lambda: mapped(**SOME), ValueError, f"{PSUM} all axes 'b'"),
    ],
)
def test_axes_that_it_can_not_serve(call, error, words):
    with names(error, words):
        call()


def test_platforms_that_it_can_not_serve():
    traced = jax.jit(on_ranks(psum(cgx.Tcp("a")), TWO)).trace(X)
    with pytest.raises(NotImplementedError, match="on CPUs or NVIDIA's GPUs; .* give the"):
        traced.lower(lowering_platforms=("tpu",))
    if not registration.has_cuda():
        with pytest.raises(NotImplementedError, match="this build has no CUDA half; build it where there is"):
            traced.lower(lowering_platforms=("cuda",))


@pytest.mark.parametrize(
    ("error", "field", "value"),
    [
        *((ValueError, "name", name) for name in (("a", "b"), ["a"], cgx.Tcp("a"))),
        *((error, "timeout", x) for error, x in [*NO_POSITIVE_NUMBERS, (TypeError, "1")]),
        *((TypeError if x in (1.5, True) else ValueError, "connections", x) for x in (0, -1, 65, 1.5, True)),
        *((error, "pace", x) for error, x in [*NO_POSITIVE_NUMBERS, (ValueError, 999)]),
        *((ValueError, "pace", text) for text in ("0mbit", "fast", "-1mbit")),
    ],
)
def test_fields(error, field, value):
    with names(error, f"Tcp {field}" + f" {value!r}" * (field in ("connections", "pace"))):
        cgx.Tcp(**{"name": "a", field: value})


def test_a_pace_as_people_write_rates():
    assert cgx.Tcp("a", pace="100mbit") == cgx.Tcp("a", pace=12_500_000)


def test_marks_that_differ():
    axes = cgx.Tcp("data", connections=4), cgx.Tcp("local")
    with names(ValueError, "compressed_psum axis_name connections=4, pace=None and connections=1, pace=None"):
        transport_over_tcp("compressed_psum", axis_names(axes), axes)


def test_connections_stay_as_they_were_made(meet, monkeypatch):
    meet(0, Store(), why="")
    monkeypatch.setattr(connections, "_links", Links(1))
    with names(ValueError, "Tcp - connections=1, pace=None connections=4, pace=None give every Tcp"):
        connections.connect(1, 1, Links(4))


def test_a_cache_of_programs_that_would_crash_jax(meet, monkeypatch):
    meet(0, Store(), why="", storing_crashes=True)
    monkeypatch.setattr(connections, "_links", Links())
    with pytest.warns(UserWarning, match="JAX 0.10 crashes .* JAX_ENABLE_COMPILATION_CACHE=false"):
        connections.connect(1, 1)


def test_everything_else_knows_the_axis_by_its_name():
    axes = (cgx.Tcp("node"), "local")
    assert axis_names(axes) == ("node", "local") and axis_names(cgx.Tcp("data")) == ("data",)
    assert cgx.Plan.bytegrad(axes) == cgx.Plan.bytegrad(("node", "local"))
    transformation = cgx.compress_gradients(axes, cgx.MaxMin(4), axis_size=4)
    state = transformation.init({"w": jax.numpy.ones((64, 64))})
    assert cgx.state_specs(state, axes) == cgx.state_specs(state, ("node", "local"))
    assert cgx.state_specs(state, axes).own.residuals["w"] == P(("node", "local"))
