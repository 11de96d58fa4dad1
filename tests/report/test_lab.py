"""Tests python -m jaxcgx lab: the traffic that the kernel counted while a command ran in every host."""

import itertools
import json
import sys

import pytest

from jaxcgx import __main__
from jaxcgx.lab import Link, why_not
from jaxcgx.lab.counters import LinkTraffic
from jaxcgx.lab.files import Change
from jaxcgx.report import lab

SENT = 500_000  # bytes: more than the first rates can carry before the link breaks
# Host 1 sends to host 0, after the round trip of one byte.
PROGRAM = f"""
import socket, sys, time
rank, hosts, address = sys.argv[1:]
assert hosts == "2" and socket.gethostbyname("host1") == "10.77.0.2"
if rank == "0":
    with socket.create_server((address, 5000)) as server, server.accept()[0] as peer:
        peer.sendall(peer.recv(1))
        while peer.recv(1 << 16):
            pass
else:
    while True:
        try:
            peer = socket.create_connection((address, 5000))
            break
        except ConnectionRefusedError:
            time.sleep(0.05)
    start = time.monotonic()
    peer.sendall(b"x")
    peer.recv(1)
    print("round trip", time.monotonic() - start, flush=True)
    peer.sendall(bytes({SENT}))
"""


def carried(data, host, key, first):
    """Returns the bytes on a link between a change and the next one, and the seconds between them."""
    begin, end = (change["at_seconds"] for change in data["changes"][first : first + 2])
    rows = [row for row in data["samples"] if row["host"] == host]
    spans = [(a["seconds"], b["seconds"], b[key] / 8e-6) for a, b in itertools.pairwise(rows)]
    # The first sample after a change is taken right after the change.
    return sum((b - a) * speed for a, b, speed in spans if begin < a and b <= end), end - begin


@pytest.mark.skipif(bool(why_not()), reason=why_not())
def test_a_rate_that_changes_and_a_link_that_breaks(tmp_path, capfd, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)  # test_figures.py draws
    (tmp_path / "links.toml").write_text('[host1]\ndelay = "30ms"\n')
    changes = 'at = "300ms"\nup = "2mbit"', 'at = "1s"\nhosts = [0]\ncut = true'
    changes += 'at = "1400ms"\nhosts = [0]\ncut = false', 'at = "1400ms"\nrate = "20mbit"'
    (tmp_path / "schedule.toml").write_text("".join(f"[[change]]\n{each}\n" for each in changes))
    command = ["lab", "--hosts", "2", "--rate", "6mbit", "--per-link", str(tmp_path / "links.toml")]
    command += ["--schedule", str(tmp_path / "schedule.toml"), "--out", str(tmp_path / "out"), "--"]
    assert __main__.main([*command, sys.executable, "-S", "-c", PROGRAM, "{rank}", "{hosts}", "{address}"]) == 0
    printed = capfd.readouterr().out
    assert float(printed.split("round trip")[1].split()[0]) >= 0.03
    data = json.loads((tmp_path / "out/lab.json").read_text())
    assert data["command"].startswith("python -m jaxcgx lab --hosts 2 --rate 6mbit")
    first, second = data["rows"]
    for row, name in (first, "down"), (second, "up"):
        counted = LinkTraffic(row[name]["bytes"], row[name]["packets"], row[name]["dropped"])
        # Some packets are sent again after the break. The few packets that aren't TCP have shorter headers.
        assert 0.999 * SENT <= counted.payload <= 1.3 * SENT
        assert f"{counted.bytes:,}" in printed
    slow, seconds = carried(data, 1, "up_mbit", 0)
    assert slow <= 2e6 / 8 * seconds + 20_000  # the bucket passes some bytes at once
    assert carried(data, 0, "down_mbit", 1)[0] == 0


@pytest.mark.skipif(bool(why_not()), reason=why_not())
def test_the_status_is_the_worst(capfd):
    assert __main__.main(["lab", "--", "sh", "-c", "exit {rank}"]) == 1


@pytest.mark.skipif(bool(why_not()), reason=why_not())
def test_a_run_that_is_interrupted_has_a_table(capfd, monkeypatch):
    def interrupt(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(lab.time, "sleep", interrupt)
    assert __main__.main(["lab", "--hosts", "1", "--", "sh", "-c", "sleep 0.1; exit 3"]) == 3
    assert "share of the rate" in capfd.readouterr().out


def test_tables():
    history = [(0.5 * i, [(LinkTraffic(500_000 * i, 400 * i), LinkTraffic(1000 * i, 10 * i, i))]) for i in range(5)]
    changes = [(1.01, Change(1.0, (0,), {"down": 16_000_000}, None))]
    data = lab.describe([Link(8_000_000, 4_000_000, 0.01)], changes, history)
    up = dict(rate_mbit=8.0, bytes=2_000_000, packets=1600, dropped=0, busiest_mbit=8.0, share=1.0)
    down = dict(rate_mbit=16.0, bytes=4000, packets=40, dropped=4, busiest_mbit=0.016, share=0.001)
    assert data["rows"] == [dict(host=0, delay_ms=10.0, up=up, down=down)]
    assert data["samples"][0] == dict(host=0, seconds=0.5, up_mbit=8.0, down_mbit=0.016)
    assert data["changes"] == [dict(at_seconds=1.01, hosts="0", cut=None, down_mbit=16.0)]
    last = lab.spell(data).splitlines()[-1].split()
    assert last == ["0", "down", "16mbit", "4,000", "40", "4", "0.0", "Mbit/s", "0.001"]


@pytest.mark.parametrize(
    "words, error",
    [
        (["--rate", "fast"], "argument '--rate': expected a number and one of bit, kbit, mbit, gbit"),
        (["--delay", "40"], "argument '--delay': expected a number and one of us, ms, s"),
        (["--hosts", "0"], "argument '--hosts': expected an integer from 1 to 200, got 0"),
        (["--per-link", "none.toml"], "No such file or directory: 'none.toml'"),
    ],
)
def test_wrong_arguments(words, error):
    with pytest.raises(SystemExit) as stopped:
        __main__.main(["lab", *words, "true"])
    assert str(stopped.value).startswith("python -m jaxcgx lab: ") and error in str(stopped.value)
