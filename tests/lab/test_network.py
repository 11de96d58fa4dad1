"""Tests hosts and links. tests/report/test_lab.py runs programs in them."""

import json
import os
import subprocess
import sys

import pytest
from errors import names
from helpers import run

from jaxcgx.lab import Lab, Link, network, why_not

NEEDS = pytest.mark.skipif(bool(why_not()), reason=why_not())


def test_without_root(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(RuntimeError, match="^lab: network namespaces need root$"), Lab(2, "1gbit"):
        pass


def test_without_tools(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("PATH", "")
    assert why_not() == "ip, tc, unshare, setpriv not found: install iproute2 and util-linux"


def test_without_namespaces(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(network.shutil, "which", lambda tool: tool)
    for code, why in (1, "no network namespaces here: denied"), (0, ""):
        done = subprocess.CompletedProcess([], code, stderr="denied\n")
        monkeypatch.setattr(network.subprocess, "run", lambda *_, done=done, **__: done)
        assert why_not() == why


def test_arguments():
    with names(ValueError, "Lab hosts 0"):
        Lab(0, "1gbit")
    with names(ValueError, "Lab link 110mbit 'fast'"):
        Lab(2, "fast")
    with names(ValueError, "Lab link 1"):
        Lab(3, [Link(10**9, 10**9)])
    for link in ["1gbit", "1gbit"], 5:
        with names(TypeError, f"Lab link {link!r}"):
            Lab(2, link)
    for name, link in ("up", dict(up=0, down=1)), ("down", dict(up=1, down=-1)):
        with names(ValueError, f"Link {name} {link[name]}"):
            Link(**link)
    for name, wrong in ("delay", -0.1), ("jitter", -0.1), ("loss", 1.1):
        with names(ValueError, f"Link {name} {wrong}"):
            Link(1, 1, **{name: wrong})


def test_netem_delays_where_the_kernel_has_it(monkeypatch):
    said = []
    monkeypatch.setattr(network, "_run", said.append)
    monkeypatch.setattr(network, "_has_netem", lambda _: True)
    lab = Lab(2, [Link(10**9, 10**9), Link(10**9, 10**8, 0.04, jitter=0.02, loss=0.01)])
    lab._build()
    lab.change(1, Link(10**6, 10**6))
    assert lab.relay is None and not [words for words in said if "inner" in words]
    host = f"tc -n {lab.namespace(1)} qdisc"
    assert [words.removeprefix(host) for words in said if words.startswith(host)] == [
        " add dev eth0 root handle 1: netem delay 50000us 10000us loss 1% limit 1000000",
        " add dev eth0 parent 1:1 handle 2: tbf rate 1000000000bit burst 125000 latency 400ms",
        " change dev eth0 parent 1:1 handle 2: tbf rate 1000000bit burst 16000 latency 400ms",
    ]
    assert f"tc -n {lab.namespace(0)} qdisc add dev eth0 root tbf" in " ".join(said)


def test_hosts_send_what_passes_the_slowest_link_whole(monkeypatch):
    said = []
    monkeypatch.setattr(network, "_run", said.append)
    lab = Lab(2, "1gbit")
    lab._build()
    lab.change(1, Link(10**8, 10**9))
    sizes = [words.split()[-1] for words in said if "gso_max_size" in words]
    assert sizes == ["65536", "65536", "14400", "14400"]  # 9/10 of a burst, which then has 16,000 bytes


@NEEDS
def test_what_runs_ends_with_the_lab():
    with Lab(1, "1gbit") as lab:
        process = lab.start(0, [sys.executable, "-S", "-c", "import time; time.sleep(60)"])
        namespace = f"/run/netns/{lab.namespace(0)}"
        assert os.path.exists(namespace) and process.poll() is None
    assert not os.path.exists(namespace) and process.poll() is not None


@NEEDS
def test_hosts_use_cubic_or_the_lab_says_why_not(capfd):
    with Lab(1, "1gbit") as lab:
        show = ["cat", "/proc/sys/net/ipv4/tcp_congestion_control"]
        name = lab.start(0, show, stdout=subprocess.PIPE, text=True).communicate()[0].strip()
    said = "sysctl -w net.ipv4.tcp_allowed_congestion_control" in capfd.readouterr().err
    assert name and said == (name != "cubic")


@NEEDS
def test_a_cable_between_two_hosts():
    with Lab(3, "1gbit") as lab:
        ip = lambda host, words: run("ip", "-n", lab.namespace(host), *words.split()).stdout
        way = lambda host, other: ip(host, f"route get {lab.address(other)}")
        most = lambda device: json.loads(ip(0, f"-j -d link show {device}"))[0]["gso_max_size"]
        lab.join(0, 1, "10mbit")
        # A packet of this many bytes passes the token bucket whole.
        assert most("eth0") == 65_536 and most("to1") == 14_400
        assert "dev to1" in way(0, 1) and "dev to0" in way(1, 0) and "dev eth0" in way(0, 2)
        lab.part(0, 1)
        assert "dev eth0" in way(0, 1) and "dev eth0" in way(1, 0)


SEND = """
for i in itertools.count():
    s.sendto(f"{i} {time.monotonic()}".encode(), ("10.77.0.1", 5000))
    time.sleep(0.002)
"""
RECEIVE = """
for _ in range(200):
    number, sent = s.recv(99).split()
    print(int(number), time.monotonic() - float(sent))
"""


@NEEDS
def test_packets_that_a_host_sends_are_late_or_lost():
    begin = "import itertools, socket, time; s = socket.socket(type=socket.SOCK_DGRAM); s.bind(('', 5000))"
    python = sys.executable, "-S", "-c"
    with Lab(2, [Link(10**9, 10**9), Link(10**9, 10**9, 0.02, jitter=0.1, loss=0.5)]) as lab:
        received = lab.start(0, [*python, begin + RECEIVE], stdout=subprocess.PIPE, text=True)
        lab.start(1, [*python, begin + SEND])
        lines = received.communicate(timeout=60)[0].splitlines()
    numbers, delays = zip(*(map(float, line.split()) for line in lines))
    assert 0.3 < 200 / (max(numbers) - min(numbers) + 1) < 0.7
    assert min(delays) >= 0.02 and max(delays) - min(delays) > 0.03
