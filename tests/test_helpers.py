"""Tests that the helpers of the other tests can fail."""

import pathlib
import sys

import numpy as np
import pytest
import ranks
from helpers import assert_same_trees, assert_trees, run

TESTS = pathlib.Path(__file__).parent


@pytest.mark.parametrize("empty", [{}, [], None, {"w": None}, ({}, [None])], ids=repr)
def test_trees_without_leaves(empty):
    for compare in (assert_same_trees, lambda a, b: assert_trees(np.testing.assert_array_equal, a, b)):
        with pytest.raises(AssertionError, match="no leaves"):
            compare(empty, empty)
    with pytest.raises(AssertionError, match="no cases"):
        ranks.assert_same({}, {})


SKIPS = """
import pytest
{module}
@pytest.mark.skip(reason="needs nvcc")
def test_expected():
    pass
@pytest.mark.xfail
def test_fails():
    assert False
def test_unexpected():
    pytest.importorskip("no_such_package", reason="needs the extra `test`")
"""


def pytest_in(folder, **options):
    words = ["-p", "conftest", "--continue-on-collection-errors", "-c", "pyproject.toml", "--rootdir", folder, folder]
    return run(sys.executable, "-m", "pytest", *words, cwd=TESTS.parent, **options)


def test_an_unexpected_skip_is_a_failure_if_all_tests_are_required(tmp_path):
    (tmp_path / "test_some.py").write_text(SKIPS.format(module=""))
    (tmp_path / "test_none.py").write_text(SKIPS.format(module='pytest.importorskip("no_such_package")'))
    found = pytest_in(tmp_path, env=dict(PYTHONPATH=str(TESTS), JAXCGX_REQUIRE_TESTS="1"), status=1).stdout
    assert "1 skipped" in found
    for words in "could not import 'no_such_package'", "needs the extra `test`":
        assert f"skipped, which is a failure in `make test`: {words}" in found


def test_another_jaxcgx_is_installed(tmp_path):
    """Tests of this folder would import its package, which has no native module."""
    for name, text in ("jaxcgx/__init__.py", ""), ("jaxcgx-1.dist-info/METADATA", "Name: jaxcgx\nVersion: 1\n"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(text)
    said = pytest_in(tmp_path, env=dict(PYTHONPATH=f"{tmp_path}:{TESTS}"), status=4).stderr
    assert f"import {TESTS.parent}/jaxcgx/__init__.py, but jaxcgx is installed as {tmp_path}/jaxcgx/" in said
    assert "python -P -m pytest" in said
