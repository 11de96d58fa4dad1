"""Tests that the docstrings of jaxcgx.mpi leave nothing out."""

import pkgutil

import pytest
from documented import lines, named_on_pages, undocumented

pytest.importorskip("mpi4jax", reason="needs the extra `mpi`")
from jaxcgx import mpi


def test_every_public_name_is_documented():
    assert not undocumented(mpi)


def test_times_are_documented():
    assert {"WAIT", "MEET"} <= lines(mpi.__doc__) and mpi.WAIT < mpi.MEET


@pytest.mark.parametrize("name", named_on_pages("jaxcgx.mpi"))
def test_names_on_pages_exist(name):
    assert pkgutil.resolve_name(name) is not None
