"""Tests publishers at addresses: secrets, restarts, deaths, pace, parallel connections, and strangers."""

import collections
import contextlib
import socket
import time
from unittest import mock

import numpy as np
import pytest
from errors import raises, says
from started import Processes, free_port, until

import jaxcgx as cgx
from jaxcgx.patch import carriers
from jaxcgx.patch import publisher as published
from jaxcgx.patch import subscriber as subscribed
from jaxcgx.patch.carriers import ASK, PUBLISHER, SIZE, SUBSCRIBER, UNKNOWN
from jaxcgx.transports import sockets
from jaxcgx.transports.sockets import HELLO, STRANGERS, Wire, read

LIKE = np.zeros(1000, np.float32)
LIMIT = 60  # seconds, after which a test counts as hung
PROGRAM = """
import sys, numpy as np, jaxcgx as cgx
publisher = cgx.patch.Publisher(sys.argv[1], secret="s", anchor_every=5)
for line in sys.stdin:
    print(publisher.publish(np.full(1000, int(line), np.float32)), flush=True)
"""


@pytest.fixture
def address():
    return f"127.0.0.1:{free_port()}"


def subscribe(address, **options):
    return cgx.patch.Subscriber(address, LIKE, **dict(every=0.01, timeout=LIMIT, secret="s") | options)


def publish(processes, number):
    processes.running[0].stdin.write(f"{number}\n")
    return int(processes.running[0].stdout.readline())


@pytest.mark.filterwarnings("ignore:Subscriber.latest. this is version")
def test_a_publisher_that_dies_and_comes_back(address):
    """In a process of its own, which is killed. The versions of the next one begin again at 1."""
    with subscribe(address, timeout=0) as early, raises(TimeoutError, says("Subscriber.latest", got="none")):
        early.latest()
    with subscribe(address) as subscriber:
        with Processes(["-c", PROGRAM, address]) as first:
            for number in range(1, 8):
                assert publish(first, number) == number
            assert subscriber.latest(7)[0] == 7
        until(lambda _: "not reached" in subscriber._reason)
        assert subscriber.latest()[0] == 7
        with Processes(["-c", PROGRAM, address]) as second:
            assert publish(second, 50) == 1
            until(lambda _: subscriber._state.version == 1)
            subscriber._timeout = 0
            with raises(TimeoutError, says("Subscriber.latest", expected="version 5 within", got="1")):
                subscriber.latest(5)  # the old version 7 is none of this publisher
            until(lambda _: subscriber.latest()[0] == 50)
            assert publish(second, 60) == 2
            until(lambda _: subscriber.latest()[0] == 60)
            assert subscriber.version == 2


def test_parts_over_several_connections(address, monkeypatch):
    """They end with the publisher."""
    monkeypatch.setattr(carriers, "IDLE", 1000)
    monkeypatch.setattr(published, "PIECE", 50)
    monkeypatch.setattr(subscribed, "SPAN", 400)
    monkeypatch.setattr(subscribed, "FIRST", 100)
    x = np.random.default_rng(0).normal(size=1000).astype(np.float32)
    with cgx.patch.Publisher(address, secret="s") as publisher, subscribe(address, connections=3) as subscriber:
        for number in range(1, 4):
            publisher.publish(x + np.float32(number))
            found = subscriber.latest(number)
            np.testing.assert_array_equal(found, x + np.float32(number))
            assert not found.flags.writeable  # the next call may return it again
        assert 1 < len(subscriber._source._idle) <= 4 and subscriber._source._idle[0].gettimeout() == 1000
        subscriber._closed.set()
        subscriber._thread.join()  # no request ends its connections
        publisher.close()
        until(lambda _: not publisher._server._sockets)
        with raises(RuntimeError, says("Publisher.publish", expected="a publisher that is open")):
            publisher.publish(x)


def test_pace(address):
    """All subscribers share it."""
    x = np.random.default_rng(0).integers(0, 2**32, 10_000, np.uint32)
    start = time.monotonic()
    with cgx.patch.Publisher(address, pace="1600kbit") as publisher:
        publisher.publish(x)
        both = [cgx.patch.Subscriber(address, x, every=0.2, timeout=LIMIT) for _ in range(2)]
        for each in both:
            np.testing.assert_array_equal(each.latest(), x)
        assert 0.3 < time.monotonic() - start < LIMIT  # 80,000 bytes with 200,000 bytes per second
        for each in both:
            each.close()


def test_an_answer_while_a_subscriber_closes(address):
    """Its connection is closed, too."""

    class Late(collections.deque):
        def append(self, sock):
            remote.close()
            super().append(sock)

    remote = carriers.Remote(carriers.as_place("test", address, "s"), "s")
    remote._idle = Late()
    with cgx.patch.Publisher(address, secret="s"):
        assert remote.names() == {}
    assert [sock.fileno() for sock in remote._sockets] == [-1]


def test_a_wrong_secret(address):
    """It is an error until the publisher has the subscriber's secret. Nothing is sent before."""
    words = says("Subscriber.latest", expected=f"a publisher with this secret at {address}", remedy="it has another")
    with subscribe(address, secret="other") as subscriber:
        with cgx.patch.Publisher(address, secret="s") as publisher:
            publisher.publish(LIKE)
            until(lambda _: subscriber._problem)
            for _ in range(2):
                with raises(RuntimeError, words):
                    subscriber.latest()
        with cgx.patch.Publisher(address, secret="other") as publisher:
            publisher.publish(LIKE)
            until(lambda _: not subscriber._problem)
            assert subscriber.latest() is subscriber.latest(1)


def test_strangers(address):
    """A publisher turns away who sends back its own bytes, and lives on. A subscriber says what it met."""
    host, port = address.split(":")
    with cgx.patch.Publisher(address, secret="s") as publisher:
        publisher.publish(LIKE)
        with socket.create_connection((host, int(port))) as sock:
            sock.sendall(hello := read(sock, HELLO.size))
            with pytest.raises(ConnectionError):
                sock.sendall(read(sock, 32))
            assert hello.startswith(PUBLISHER)
        for request, answer in ((b"x", SIZE.pack(-1)), (b"\xff", b"")):
            with socket.create_connection((host, int(port))) as sock:
                Wire(SUBSCRIBER, "s", UNKNOWN, PUBLISHER).meet(sock)
                sock.sendall(ASK.pack(0, 9, 1) + request)
                assert sock.recv(100) == answer
    with socket.create_server((host, int(port))) as other:
        other.settimeout(LIMIT)
        with subscribe(address) as subscriber:
            sock, _ = other.accept()
            with sock:
                sock.sendall(b"x" * HELLO.size)
                with raises(RuntimeError, says("Subscriber.latest", expected="a publisher", remedy="is no publisher")):
                    until(lambda _: subscriber._problem) or subscriber.latest()


def test_strangers_that_take_their_time(address, monkeypatch):
    """A handshake has one deadline. Neither it nor a lack of threads takes the place of others for long."""
    monkeypatch.setattr(sockets, "SILENCE", 0.3)
    host, port = address.split(":")
    with cgx.patch.Publisher(address, secret="s") as publisher:
        with monkeypatch.context() as patch:
            patch.setattr(sockets, "start_thread", starts := mock.Mock(side_effect=RuntimeError))
            for _ in range(STRANGERS + 1):
                with socket.create_connection((host, int(port)), LIMIT) as sock, contextlib.suppress(ConnectionError):
                    assert sock.recv(1) == b""
        assert starts.call_count == STRANGERS + 1
        with socket.create_connection((host, int(port))) as sock, pytest.raises(ConnectionError):
            for _ in range(HELLO.size - 1):
                sock.sendall(b"x")
                time.sleep(0.1)
        monkeypatch.undo()
        publisher.publish(LIKE)
        with subscribe(address) as subscriber:
            assert subscriber.latest()[0] == 0


def test_an_address_that_is_taken(address):
    words = says("Publisher", "where", expected="an address of this machine", got=repr(address), remedy="the port")
    with cgx.patch.Publisher(address), raises(OSError, words):
        cgx.patch.Publisher(address)
    cgx.patch.Publisher(address).close()
