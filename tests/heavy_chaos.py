"""Trains between hosts whose links are slow, lossy, cut or half open: `make test-chaos`, which needs root.

Where training can go on, all replicas agree. Where it can't, each rank gets an error within its limit. Nothing hangs.
"""

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


class Run(Lab):
    """A lab with a program in every host. `late`: the seconds by which the last one comes later."""

    def __init__(self, folder, links, role, count, late=0):
        super().__init__(HOSTS, links)
        self.folder, self.late = folder, late
        addresses = [f"{self.address(host)}:{PORT}" for host in range(HOSTS)]
        self.words = [role, count, *([addresses[0], HOSTS] if role == "tcp" else addresses)]

    def __enter__(self):
        super().__enter__()
        env = os.environ | dict(JAX_PLATFORMS="cpu", JAX_ENABLE_COMPILATION_CACHE="false")
        for host in range(HOSTS):
            time.sleep(self.late if host == HOSTS - 1 else 0)
            words = [sys.executable, "-P", PROGRAM, self.folder, host, *self.words]
            self.start(host, words, env=env, stdout=subprocess.DEVNULL)
        return self

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
            words = f"ip -n {self.namespace(host)} route {action} blackhole {self.address(other)}/32"
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
        run.cut(1)
        time.sleep(SILENCE / 3)
        run.mend(1)
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
        run.silence(2, True) if half else run.cut(2)
        event = time.monotonic()
        ends = run.ends()
    for end in ends:
        assert "UNAVAILABLE: jaxcgx_tcp" in end["error"] and end["at"] - event < SILENCE + MARGIN, ends
    assert any(f"rank 2 (process 2 at {run.address(2)})" in end["error"] for end in ends[:2])


def test_decoupled_centers_go_on(tmp_path):
    """One comes late. Then one is cut off, and another one half open. Each comes back and has the same parameters."""
    with Run(tmp_path, BAD, "center", 60, late=10) as run:

        def rounds(centers, count):
            """Waits until as many further rounds of as many centers have ended."""
            last = max((line["round"] for line in run.said(0)), default=0)
            run.until(lambda line: line["round"] >= last + count and len(line.get("centers", ())) == centers)

        rounds(3, 1)
        run.cut(1)
        rounds(2, 3)
        run.mend(1)
        rounds(3, 1)
        run.silence(2, True)
        rounds(2, 3)
        run.silence(2, False)
        rounds(3, 1)
        ends = run.ends()
        one_digest(ends)
        assert len({end["round"] for end in ends}) == 1
        assert all(line.get("waited", 0) < 10 for host in range(HOSTS) for line in run.said(host))
