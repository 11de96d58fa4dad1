"""Tests that exchanges between centers over Tcp continue during the next steps, with the bits of plain axes."""

import json
import os
import pathlib
import random
import subprocess
import sys

import pytest
from helpers import load_script

RANK = pathlib.Path(__file__).with_name("diloco_rank.py")
LIMIT = 300  # seconds, after which processes count as hung


@pytest.mark.parametrize("local", [1, 2])
def test_an_exchange_crosses_steps(local, tmp_path, monkeypatch):
    """The second center takes part only after the first one has continued.

    If an exchange blocked, both would wait forever. A state that was saved in mid-exchange continues as if the exchange
    had not begun: the outer parameters and the state of the exchanges stay as they are, and centers keep what they have
    learnt.
    """
    # XLA crashes if it has to keep a program of several processes.
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_ENABLE_COMPILATION_CACHE": "false"}
    command = [sys.executable, RANK, str(random.randrange(20_000, 32_000))]
    running = [
        subprocess.Popen(
            [*command, str(rank), "2", str(local), tmp_path],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for rank in range(2 * local)
    ]
    try:
        found = {}
        for process in running:
            output, _ = process.communicate(timeout=LIMIT)
            lines = [line for line in output.splitlines() if line.startswith("RESULT ")]
            assert lines, "a rank failed, see above"
            digests, (begun, changed) = json.loads(lines[0].removeprefix("RESULT "))
            assert begun and changed == [False, False, True]
            found |= digests
    finally:
        for process in running:
            process.kill()
            process.wait()
    assert found == load_script(RANK, monkeypatch).train("dc", 2, local)
