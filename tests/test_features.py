"""Tests that docs/features.md is what scripts/features.py writes, and that its tests, targets and links exist."""

import dataclasses
import re

import pytest
from commands import ROOT
from helpers import load_script

from jaxcgx.plan import environment
from jaxcgx.wan.geomx.environment import VARIABLES

with pytest.MonkeyPatch.context() as patch:
    features = load_script(ROOT / "scripts/features.py", patch)
FOUND = [(system, row) for system, each in features.rows().items() for _, rows in each.values() for row in rows]
ROWS = [pytest.param(*row, id=f"{system}: {row[0]}") for system, row in FOUND]


def test_the_page_is_new():
    assert features.PAGE.read_text() == features.render(), "run `.venv/bin/python scripts/features.py`"
    assert not features.broken(features.PAGE.read_text())


def test_every_row_is_there_once():
    ids = [param.id for param in ROWS]
    assert len(ids) == len(set(ids)) >= 200


@pytest.mark.parametrize("says, here, test", ROWS)
def test_a_row(says, here, test):
    """It has a test that exists. Otherwise it is about GPUs, or says that it isn't here, and why."""
    assert says and here and not features.broken(here) and "|" not in says + here
    assert here.startswith("no: ") == (test == features.ABSENT)
    if test == features.GPUS:
        assert "GPU" in says + here or "NCCL" in says + here
    elif test:
        tests = test.split(", ")
        assert not [each for each in tests if features.missing(each)]
        paths = [each.partition("::")[0] for each in tests if not each.startswith("make ")]
        source = "".join((features.ROOT / path).read_text() for path in paths)
        for name in re.findall(r"\b(?:CGX_|(?=ENABLE_|DMLC_|MXNET_|MAX_|ADAPTIVE_))([A-Z0-9_]+)", says):
            assert name in source, f"none of {paths} has {name}"


def test_every_variable_has_a_row():
    text = features.DATA.read_text()
    fields = dataclasses.fields(environment.Environment)
    known = VARIABLES.keys() | {field.metadata["variable"] for field in fields}
    assert not [name for name in known if f"`{name}" not in text]


def test_their_papers_are_cited():
    text = " ".join((features.PAGE.parent / "references.md").read_text().split())
    titles = "CGX: Adaptive System Support", "BAGUA: Scaling up", "Deep Gradient Compression: Reducing"
    for title in *titles, "exceeding LAN speed", "DGT: A contribution", "TSEngine: Enable", "Priority-based Parameter":
        assert title in text, title
