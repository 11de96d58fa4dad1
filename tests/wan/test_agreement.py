"""Tests that processes whose settings of Diloco or HFA differ get an error before the first step."""

import pathlib

from errors import check, says
from started import free_port, results

RANK = pathlib.Path(__file__).with_name("agreement_rank.py")


def test_settings_that_differ_are_an_error():
    port = free_port()
    for rank, found in enumerate(results(*([RANK, port, rank] for rank in range(2)))):
        assert found, "a rank failed, see above"
        for name, function, values in (
            ("every", "Diloco", (10, 5)),
            ("fragments", "Diloco", (2, 1)),
            ("alpha", "Diloco", (0.0, 0.5)),
            ("k2", "HFA", (2, 3)),
        ):
            got = f"{values[rank]} in this process and {values[1 - rank]} in process {1 - rank}"
            check(found[name], says(function, name, got=got, remedy="every process"))
        for name in ("outer", "rate"):
            check(found[name], says("Diloco", "outer"))
        assert "same value in all processes" in found["form"]
        assert found["same"] == found["explicit"] == "none"
