"""Tests that the docstrings of jaxcgx.mpi leave nothing out."""

import pytest
from documented import undocumented

pytest.importorskip("mpi4jax", reason="needs the extra `mpi`")
from jaxcgx import mpi


def test_every_public_name_is_documented():
    assert not undocumented(mpi)
