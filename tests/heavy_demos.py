"""Runs every wide-area demonstration between hosts, as users do: `make test-demos`, which needs root."""

import pathlib
import sys

import pytest
from helpers import run

from jaxcgx.lab import why_not

FOLDER = pathlib.Path(__file__).parents[1] / "examples/wan"
DEMOS = sorted(path.stem for path in FOLDER.glob("*.py") if "demonstrate(__doc__, TECHNIQUES)" in path.read_text())
LIMIT = 600  # seconds

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())


@pytest.mark.parametrize("name", DEMOS)
def test_demonstration(name, tmp_path):
    """Its table has the bytes of every technique's steps and a finite loss, and its plot is a picture."""
    words = "--epoch", "1", "--rate", "200mbit", "--out", tmp_path
    env = {"JAX_ENABLE_COMPILATION_CACHE": "false"}  # as in transports/test_tcp.py
    printed = run(sys.executable, FOLDER / f"{name}.py", *words, timeout=LIMIT, env=env).stdout.splitlines()
    start = next(i for i, line in enumerate(printed) if line.startswith("technique"))
    rows = [line.rsplit(maxsplit=3) for line in printed[start + 1 : printed.index("", start)]]
    assert len(rows) >= 2
    for technique, megabytes, seconds, loss in rows:
        assert technique and float(megabytes) > 0 and float(seconds) > 0 and 0 < float(loss) < 5
    assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
