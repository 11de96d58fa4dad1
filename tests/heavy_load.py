"""Tests that other programs hardly change the planner's answer. `make test-load` runs it, on an idle machine."""

import json
import subprocess
import sys

from helpers import run

SPIN = "while True: pass"
WORDS = "plan 25M --link 1gbit --world 4 --over tcp --json --codecs MaxMin(4) MaxMin(2) TopK(0.01)"


def interval(load, folder):
    """Returns the ends of the best step's interval in ms, measured beside `load` programs."""
    others = [subprocess.Popen([sys.executable, "-c", SPIN]) for _ in range(load)]
    try:
        done = run(sys.executable, "-m", "jaxcgx", *WORDS.split(), env=dict(XDG_CACHE_HOME=str(folder)))
    finally:
        for each in others:
            each.kill()
            each.wait()
    found = json.loads(done.stdout)
    print(f"{load} other programs: {found['verdict']}")
    low, high = (1e3 * (1 + sign * found["best"]["off"]) * found["best"]["exposed"] for sign in (-1, 1))
    return low, high


def test_answers_under_load_agree(tmp_path):
    """The intervals overlap, and under a load of 4 and of 12 they are at most 1.5 and 3 times as wide as without."""
    found = {load: interval(load, tmp_path / str(load)) for load in (0, 4, 12)}
    assert max(low for low, _ in found.values()) <= min(high for _, high in found.values()), found
    width = {load: high - low for load, (low, high) in found.items()}
    assert width[4] <= 1.5 * width[0] and width[12] <= 3 * width[0], found
