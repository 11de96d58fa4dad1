"""Tests that processes whose settings of Diloco or HFA differ get an error before the first step."""

import json
import pathlib

from errors import check, says
from started import Processes, free_port

RANK = pathlib.Path(__file__).with_name("agreement_rank.py")


def test_settings_that_differ_are_an_error():
    port = free_port()
    with Processes(*([RANK, port, rank] for rank in range(2))) as ranks:
        outputs = [process.communicate()[0] for process in ranks.running]
    for rank, output in enumerate(outputs):
        lines = [line for line in output.splitlines() if line.startswith("RESULT ")]
        assert lines, "a rank failed, see above"
        found = json.loads(lines[0].removeprefix("RESULT "))
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
