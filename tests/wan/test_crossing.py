"""Tests centers that are processes. Over Tcp, exchanges continue during the next steps, with the bits of plain axes."""

import pathlib

import pytest
from errors import check, says
from helpers import load_script
from started import free_port, results

RANK = pathlib.Path(__file__).with_name("diloco_rank.py")
LIMIT = 700  # seconds, after which processes count as hung


def of_two_centers(form, local, folder):
    port = free_port()
    return results(*((RANK, form, port, rank, 2, local, folder) for rank in range(2 * local)), limit=LIMIT)


@pytest.mark.parametrize("form, local", [("streaming", 1), ("streaming", 2), ("eager", 1)])
def test_an_exchange_crosses_steps(form, local, tmp_path, monkeypatch):
    """The second center takes part after the first one has gone on. A state in mid-exchange continues as before it."""
    found = {}
    for result in of_two_centers(form, local, tmp_path):
        assert result, "a rank failed, see above"
        digests, restored = result
        assert restored == ([True, [False, False, True]] if form == "streaming" else None)
        found |= digests
    assert found == load_script(RANK, monkeypatch).train("dc", 2, local, form)


def test_a_center_that_dies_in_mid_round(tmp_path, monkeypatch):
    """The other center's step raises before the timeout. Its inputs, which it didn't donate, can be saved."""
    script = load_script(RANK, monkeypatch)
    (error, step, seconds, saved), nothing = of_two_centers("dies", 1, tmp_path)
    assert "rank 0 waits for rank 1" in error and "has ended or left" in error
    assert script.DIES < step <= script.DIES + 4 and seconds < script.LIMIT
    assert saved and nothing is None


def test_settings_that_differ_are_an_error(tmp_path):
    for rank, found in enumerate(of_two_centers("settings", 1, tmp_path)):
        assert found, "a rank failed, see above"
        for name, values in dict(every=(10, 5), fragments=(2, 1), alpha=(0.0, 0.5), k2=(2, 3)).items():
            got = f"{values[rank]} in this process and {values[1 - rank]} in process {1 - rank}"
            check(found[name], says("HFA" if name == "k2" else "Diloco", name, got=got, remedy="every process"))
        for name in ("outer", "rate"):
            check(found[name], says("Diloco", "outer"))
        assert "same value in all processes" in found["form"]
        assert found["same"] == found["explicit"] == "none"
