"""Tests that the figures of README and docs are those of results and of the library, as scripts/figures.py writes them.

tests/train/test_sharded.py has the table of docs/fsdp.md.
"""

import pytest
from commands import ROOT
from helpers import load_script

import jaxcgx as cgx

with pytest.MonkeyPatch.context() as patch:
    figures = load_script(ROOT / "scripts/figures.py", patch)


@pytest.fixture(scope="module")
def known():
    return figures.numbers()


@pytest.mark.parametrize("page", figures.PAGES, ids=lambda page: page.name)
def test_no_figure_is_old(page, known):
    assert figures.render(page, known) == page.read_text(), "run `.venv/bin/python scripts/figures.py`"


def test_the_error_of_stochastic_rounding_is_twice_as_large():
    nearest, stochastic = (figures.lost(cgx.MaxMin(4, rounding=rounding)) for rounding in ("nearest", "stochastic"))
    assert 1.95 < stochastic / nearest < 2.05
