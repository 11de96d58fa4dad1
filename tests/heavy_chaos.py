"""Trains between hosts whose links are slow, lossy, cut or half open: `make test-chaos`, which needs root.

Where training can go on, all replicas agree. Where it can't, each rank gets an error within its limit. Nothing hangs.
"""

import contextlib
import json
import os
import pathlib
import subprocess
import sys
import time

import pytest

from jaxcgx.lab import Lab, Link, why_not
from jaxcgx.native.meeting import SILENCE

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())
PROGRAM = pathlib.Path(__file__).with_name("chaos_rank.py")
HOSTS, LIMIT, MARGIN = 3, 240, 15  # seconds until a run counts as hung, and of the errors beyond their limits
GOOD = Link(10**9, 10**9)
BAD = [Link(10**8, 10**8, 0.02, jitter=0.02, loss=0.01), Link(10**7, 10**8, 0.05, jitter=0.05, loss=0.03), GOOD]
PORT = 20_000  # in the hosts all ports are free


class Run:
    """A program in every host of a lab. `late`: the seconds by which the last one comes later."""

    def __init__(self, folder, links, role, count, late=0):
        self.folder, self.lab, self.late = folder, Lab(HOSTS, links), late
        addresses = [f"{self.lab.address(host)}:{PORT}" for host in range(HOSTS)]
        self.words = [role, count, *([addresses[0], HOSTS] if role == "tcp" else addresses)]

    def __enter__(self):
        self.stack = contextlib.ExitStack()
        self.stack.enter_context(self.lab)
        env = os.environ | dict(JAX_PLATFORMS="cpu", JAX_ENABLE_COMPILATION_CACHE="false")
        start = lambda host: self.lab.start(
            host, [sys.executable, "-P", PROGRAM, self.folder, host, *self.words], env=env, stdout=subprocess.DEVNULL
        )
        self.running = [start(host) for host in range(HOSTS - 1)]
        time.sleep(self.late)
        self.running.append(start(HOSTS - 1))
        return self

    def __exit__(self, *error):
        self.stack.close()

    def said(self, host):
        """Returns what a host has written so far. The last line may be incomplete."""
        path = self.folder / str(host)
        text = path.read_text() if path.exists() else ""
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def until(self, what, host=0):
        """Waits until a host has written a line that fits."""
        deadline = time.monotonic() + LIMIT
        while not any(map(what, self.said(host))):
            assert time.monotonic() < deadline, [self.said(each)[-1:] for each in range(HOSTS)]
            time.sleep(0.05)

    def ends(self):
        """Returns the last line of every host."""
        for host in range(HOSTS):
            self.until(lambda line: "digest" in line or "error" in line, host)
        return [self.said(host)[-1] for host in range(HOSTS)]

    def silence(self, host, silent):
        """Lets packets from a host to the others get lost, while it still receives theirs."""
        action = "add" if silent else "delete"
        for other in {*range(HOSTS)} - {host}:
            words = f"ip -n {self.lab.namespace(host)} route {action} blackhole {self.lab.address(other)}/32"
            subprocess.run(words.split(), check=True)


def one_digest(ends):
    assert not [end["error"] for end in ends if "error" in end]
    (found,) = {end["digest"] for end in ends}
    return found


def test_tcp_over_bad_links_gives_the_bits_of_good_ones(tmp_path):
    """The last rank comes late, and a link is cut and mended before its host counts as vanished."""
    (good := tmp_path / "good").mkdir(), (bad := tmp_path / "bad").mkdir()
    with Run(good, GOOD, "tcp", 60) as run:
        expected = one_digest(run.ends())
    with Run(bad, BAD, "tcp", 60, late=10) as run:
        run.until(lambda line: line.get("step") == 10)
        run.lab.cut(1)
        time.sleep(SILENCE / 3)
        run.lab.mend(1)
        run.until(lambda line: line.get("step") == 20)
        run.silence(2, True)
        time.sleep(SILENCE / 3)
        run.silence(2, False)
        assert one_digest(run.ends()) == expected


@pytest.mark.parametrize("half", [False, True], ids=["cut", "half open"])
def test_tcp_over_a_link_that_is_lost(half, tmp_path):
    """Every rank gets an error, and those that heard from the lost one to the last name it."""
    with Run(tmp_path, BAD, "tcp", 10**6) as run:
        run.until(lambda line: line.get("step") == 10)
        run.silence(2, True) if half else run.lab.cut(2)
        event = time.monotonic()
        ends = run.ends()
    for end in ends:
        assert "UNAVAILABLE: jaxcgx_tcp" in end["error"] and end["at"] - event < SILENCE + MARGIN, ends
    assert any(f"rank 2 (process 2 at {run.lab.address(2)})" in end["error"] for end in ends[:2])


def test_decoupled_centers_go_on(tmp_path):
    """One comes late. Then one is cut off, and another one half open; each comes back and has the same parameters."""
    with Run(tmp_path, BAD, "center", 60, late=10) as run:
        all_three = lambda since: run.until(lambda line: line.get("round", 0) >= since and line["centers"] == [0, 1, 2])
        all_three(1)
        for off, on in (
            (lambda: run.lab.cut(1), lambda: run.lab.mend(1)),
            (lambda: run.silence(2, True), lambda: run.silence(2, False)),
        ):
            off()
            now = run.said(0)[-1]["round"]
            run.until(lambda line, now=now: line["round"] > now and len(line["centers"]) == 2)
            now = run.said(0)[-1]["round"]
            run.until(lambda line, now=now: line["round"] >= now + 3)
            on()
            all_three(run.said(0)[-1]["round"] + 1)
        one_digest(run.ends())
        assert len({end["round"] for end in run.ends()}) == 1
        assert all(line.get("waited", 0) < 10 for host in range(HOSTS) for line in run.said(host))
