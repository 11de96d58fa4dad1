"""Tests exchanges between centers over Tcp: they continue during the next steps, with the bits of plain axes."""

import json
import pathlib

import pytest
from helpers import load_script
from started import Processes, free_port

RANK = pathlib.Path(__file__).with_name("diloco_rank.py")
LIMIT = 700  # seconds, after which processes count as hung


def results(form, local, folder):
    """Returns the result of each rank of two centers, or None for a rank that ended without a result."""
    port, found = free_port(), []
    words = [(RANK, form, port, rank, 2, local, folder) for rank in range(2 * local)]
    with Processes(*words, limit=LIMIT) as ranks:
        for process in ranks.running:
            output, _ = process.communicate()
            lines = [line for line in output.splitlines() if line.startswith("RESULT ")]
            found.append(json.loads(lines[0].removeprefix("RESULT ")) if lines else None)
    return found


@pytest.mark.parametrize("form, local", [("streaming", 1), ("streaming", 2), ("eager", 1)])
def test_an_exchange_crosses_steps(form, local, tmp_path, monkeypatch):
    """The second center takes part after the first one has gone on. A state in mid-exchange continues as before it."""
    found = {}
    for result in results(form, local, tmp_path):
        assert result, "a rank failed, see above"
        digests, restored = result
        assert restored == ([True, [False, False, True]] if form == "streaming" else None)
        found |= digests
    assert found == load_script(RANK, monkeypatch).train("dc", 2, local, form)


def test_a_center_that_dies_in_mid_round(tmp_path, monkeypatch):
    """The other center's step raises before the timeout. Its inputs, which it didn't donate, can be saved."""
    script = load_script(RANK, monkeypatch)
    (error, step, seconds, saved), nothing = results("dies", 1, tmp_path)
    assert "rank 0 waits for rank 1" in error and "has ended or left" in error
    assert script.DIES < step <= script.DIES + 4 and seconds < script.LIMIT
    assert saved and nothing is None
