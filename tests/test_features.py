"""Tests that docs/features.md is what scripts/features.py writes, and that its tests exist."""

import pathlib

import pytest
from helpers import load_script

with pytest.MonkeyPatch.context() as patch:
    features = load_script(pathlib.Path(__file__).parents[1] / "scripts/features.py", patch)


def test_the_page_is_new():
    assert features.PAGE.read_text() == features.render(), "run `.venv/bin/python scripts/features.py`"


@pytest.mark.parametrize("system", features.rows())
def test_every_feature_has_its_test(system):
    """Without one, the row is about GPUs."""
    page, rows = features.rows()[system]
    assert (features.PAGE.parent / page).is_file() and len(rows) == len({row[0] for row in rows})
    for feature, here, test in rows:
        assert feature and here
        assert not features.missing(test) if test else "GPU" in feature + here or "NCCL" in here, feature
