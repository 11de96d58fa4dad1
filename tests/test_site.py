"""The site has every page of docs/, and its API page every public name."""

import ast
import inspect
import pathlib
import re

import pytest

import jaxcgx
from jaxcgx import lab, wan

DOCS = pathlib.Path(__file__).parent.parent / "docs"


def test_every_page_is_in_the_contents():
    (pages,) = [
        ast.literal_eval(node.value)
        for node in ast.parse((DOCS / "conf.py").read_text()).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "PAGES"
    ]
    assert sorted(" ".join(pages.values()).split()) == sorted(path.stem for path in DOCS.glob("*.md"))


def test_the_api_page_has_every_public_name():
    listed = re.findall(r"^\.\. auto(?:function|class):: (\w+)$", (DOCS / "api.md").read_text(), re.MULTILINE)
    assert sorted([*listed, "wan"]) == sorted(jaxcgx.__all__)


@pytest.mark.parametrize("module", [jaxcgx, wan, lab], ids=lambda module: module.__name__)
def test_every_public_name_is_documented(module):
    for name in module.__all__:
        thing = getattr(module, name)
        assert inspect.getdoc(thing), name
        if inspect.isfunction(thing):
            described = re.findall(r"^ {2}(\*{0,2}\w+):", inspect.getdoc(thing), re.MULTILINE)
            given = set(inspect.signature(thing).parameters)
            assert not described or {d.lstrip("*") for d in described} >= given, name
