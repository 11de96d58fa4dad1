"""python -m jaxcgx link: the rates and the delay of the link to another host."""

import concurrent.futures
import json
import platform
import socket
import statistics
import sys
import time

import pytest
from errors import names

from jaxcgx import __main__
from jaxcgx.lab import why_not
from jaxcgx.report import link, machine

# Host 1 measures the link to host 0. Both have a file of their own.
PROGRAM = """
import os, socket, sys, time
rank, address, folder = sys.argv[1:]
os.environ["XDG_CACHE_HOME"] = os.path.join(folder, rank)
from jaxcgx.report import link
link.WARM_UP, link.SECONDS = 0.4, 1.0
if rank == "0":
    with socket.create_server((address, link.PORT)) as server:
        link.serve(server)
else:
    while True:
        try:
            link.measure(address)
            break
        except ValueError:  # host 0 doesn't wait yet
            time.sleep(0.05)
"""


@pytest.fixture(autouse=True)
def short(monkeypatch, tmp_path):
    """A short measurement, whose results are in a new folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(link, "WARM_UP", 0.02)
    monkeypatch.setattr(link, "SECONDS", 0.1)


@pytest.fixture
def waiting():
    """A server on which nobody serves yet, and a pool of one thread for what serves."""
    with socket.create_server(("127.0.0.1", 0)) as server, concurrent.futures.ThreadPoolExecutor(1) as pool:
        yield server, pool, server.getsockname()[1]


def test_both_hosts_find_and_keep_the_same(waiting, monkeypatch):
    """The delay is half of the median round trip, in which both hosts are slow to read."""
    server, pool, port = waiting
    receive, trip, trips = link._receive, link._trip, []
    monkeypatch.setattr(link, "_receive", lambda *args: (time.sleep(0.01 * (args[1] == 1)), receive(*args))[1])
    monkeypatch.setattr(link, "_trip", lambda words: trips.append(trip(words)) or trips[-1])
    assert link.slowest() is None
    other = pool.submit(link.serve, server)
    found = link.measure("localhost", port)
    peer, seen = other.result()
    assert peer == "127.0.0.1" and seen == link.Measured(up=found.down, down=found.up, delay=found.delay)
    assert min(found.up, found.down) > 0
    assert found.delay == statistics.median(trips) / 2 and min(trips) >= 0.01
    machine.save("links", platform.node(), "of another version", {"rate": 1})
    assert link.known() == {"localhost": found, peer: seen}
    assert link.slowest() == link.Measured(min(found.up, found.down), min(found.up, found.down), found.delay)


def test_the_command(waiting, capsys):
    server, pool, port = waiting
    other = pool.submit(link.serve, server)
    __main__.main(["link", "localhost", "--port", str(port)])
    other.result()
    said = capsys.readouterr().out
    assert said.startswith("localhost: ") and said.splitlines()[1].endswith("jaxcgx/links.json")


def test_nobody_waits(waiting):
    with pytest.raises(SystemExit, match=r"^python -m jaxcgx link: argument 'host'"):
        __main__.main(["link", "localhost", "--port", "1"])
    server, pool, port = waiting

    def greet():
        with server.accept()[0] as caller:
            caller.recv(len(link._HELLO))
            caller.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")

    pool.submit(greet)
    with names(ValueError, "link host 'localhost' python -m jaxcgx link"):
        link.measure("localhost", port)
    assert not link.known()


def test_another_program_calls(waiting):
    server, pool, port = waiting
    other = pool.submit(link.serve, server)
    with socket.create_connection(("localhost", port)) as caller:
        caller.sendall(b"GET / HTTP/1.1\r\n\r\n")
        with names(ValueError, "link host '127.0.0.1'"):
            other.result()


@pytest.mark.parametrize("sent", [b"", link._HELLO], ids=["at once", "after the first words"])
def test_the_other_host_ends(waiting, sent):
    server, pool, port = waiting
    other = pool.submit(link.serve, server)
    with socket.create_connection(("localhost", port)) as caller:
        caller.sendall(sent)
        caller.recv(len(sent))
    with pytest.raises(ConnectionError, match=r"^link: the other host ended the connection$"):
        other.result()
    assert not link.known()


@pytest.mark.skipif(bool(why_not()), reason=why_not())
def test_links_of_a_known_rate(tmp_path):
    """The kernel limits the link, so no program is faster. It is slower only if the machine stops for long."""
    command = ["lab", "--hosts", "2", "--rate", "8mbit", "--per-link", str(tmp_path / "links.toml")]
    (tmp_path / "links.toml").write_text('[host1]\nup = "4mbit"\n')
    program = [sys.executable, "-c", PROGRAM, "{rank}", "{address}", str(tmp_path)]
    assert __main__.main([*command, "--", *program]) == 0
    (found,) = json.loads((tmp_path / "1/jaxcgx/links.json").read_text()).popitem()[1].values()
    (seen,) = json.loads((tmp_path / "0/jaxcgx/links.json").read_text()).popitem()[1].values()
    assert (found["up"], found["down"]) == (seen["down"], seen["up"])
    assert 2e6 < 8 * found["up"] < 4.1e6 and 2e6 < 8 * found["down"] < 8.2e6
