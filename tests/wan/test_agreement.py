"""Tests that processes whose settings of Diloco or HFA differ get an error before the first step."""

import json
import os
import pathlib
import random
import subprocess
import sys

RANK = pathlib.Path(__file__).with_name("agreement_rank.py")
LIMIT = 300  # seconds, after which processes count as hung


def test_settings_that_differ_are_an_error():
    # XLA crashes if it has to keep a program of several processes.
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_ENABLE_COMPILATION_CACHE": "false"}
    command = [sys.executable, RANK, str(random.randrange(20_000, 32_000))]
    running = [
        subprocess.Popen(
            [*command, str(rank)], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, env=environment
        )
        for rank in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=LIMIT)[0] for process in running]
    finally:
        for process in running:
            process.kill()
            process.wait()
    for rank, output in enumerate(outputs):
        lines = [line for line in output.splitlines() if line.startswith("RESULT ")]
        assert lines, "a rank failed, see above"
        found = json.loads(lines[0].removeprefix("RESULT "))
        both = lambda mine, other, rank=rank: (
            f"expected the same value in all processes, got {(mine, other)[rank]} in this process and "
            f"{(other, mine)[rank]} in process {1 - rank}; pass the same arguments to"
        )
        assert found["every"] == f"Diloco: argument 'every': {both(10, 5)} Diloco in every process"
        assert found["fragments"].startswith(f"Diloco: argument 'fragments': {both(2, 1)}")
        assert found["alpha"].startswith(f"Diloco: argument 'alpha': {both(0.0, 0.5)}")
        assert found["k2"] == f"HFA: argument 'k2': {both(2, 3)} HFA in every process"
        assert "expected the same value in all processes" in found["form"]
        for name in ("outer", "rate"):
            assert found[name].startswith("Diloco: argument 'outer': expected the same value in all processes")
        assert found["same"] == found["explicit"] == "none"
