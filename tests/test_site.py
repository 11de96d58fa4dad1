"""Tests that the site has every page of docs/, and that its API pages have every public name."""

import ast
import pkgutil
import re

import commands
import pytest
from documented import named_on_pages, public, results, undocumented
from helpers import load_script

import jaxcgx

DOCS = commands.ROOT / "docs"
API = "\n".join(path.read_text() for path in sorted(DOCS.glob("api/*.md")))
RESULTS = re.findall(r"^\.\. autoclass:: (\w+\.[\w.]+)\.(\w+)$", API, re.MULTILINE)
SCOPES = "jaxcgx.compressed_psum.down", "jaxcgx.two_shot.MaxMin_bits_4"  # in explain.md, names in compiled programs


def test_every_page_is_in_the_contents():
    contents = re.search(r"^PAGES = (\{.*?^\})", (DOCS / "conf.py").read_text(), re.MULTILINE | re.DOTALL)[1]
    names = " ".join(ast.literal_eval(contents).values()).split()
    others = commands.ROOT / "CONTRIBUTING.md", commands.ROOT / "benchmarks/README.md"
    assert sorted((DOCS / f"{name}.md").resolve() for name in names) == sorted([*DOCS.glob("*.md"), *others])


@pytest.mark.parametrize("page", commands.PAGES, ids=lambda page: page.stem)
def test_code_is_at_most_88_columns_wide(page):
    """As wide as a page of the site. What programs print may be wider."""
    fences = [(match[2], match[3]) for match in commands.FENCE.finditer(page.read_text())]
    code = "".join(code for kind, code in fences if kind in ("python", "shell") and not code.startswith(">>>"))
    wide = [line for line in code.splitlines() if len(line) > 88]
    assert not wide, f"write comments above their lines, and break lines: {wide}"


def test_outputs_are_those_of_examples(monkeypatch):
    """`make gallery` makes the pages of all examples. Its outputs are those of the examples' code."""
    gallery, examples = load_script(commands.ROOT / "scripts/gallery.py", monkeypatch), commands.ROOT / "examples"
    printed = {path.stem: path.read_text() for path in (examples / "output").glob("*.txt")}
    paths = {path.stem: path for path in examples.rglob("*.py") if path.stem not in gallery.HELPERS | gallery.MODULES}
    assert set(printed) == set(paths)
    for name, text in printed.items():
        digest, command, rest = text.split("\n", 2)
        assert digest == f"code {gallery.digest(paths[name])}", f"old: run `.venv/bin/python scripts/gallery.py {name}`"
        assert re.match(rf"\$ (sudo env PATH=\S+ )?(CGX_\S+ mpirun .*)?python .*\b{name}\.py", command), command
        assert ("sudo" in command) + ("--local" in command) == gallery.between_hosts(paths[name]), name
        assert len(rest) > 50 and "The curves are in" not in rest, name


def test_the_api_pages_have_every_public_name():
    listed = re.findall(r"^\.\. auto(?:function|class|data):: (\w+)$", API, re.MULTILINE)
    names = {*public(jaxcgx)} - {"patch", "wan"}
    assert {*listed} >= names, f"add `.. autoclass:: {' '.join(sorted(names - {*listed}))}` to docs/api/"
    assert sorted(listed) == sorted(names), "docs/api/ has names that jaxcgx doesn't have, or has a name twice"


@pytest.fixture(params=["jaxcgx", "jaxcgx.patch", "jaxcgx.wan", "jaxcgx.lab", "jaxcgx.mpi"])
def module(request):
    if request.param == "jaxcgx.mpi":
        pytest.importorskip("mpi4jax", reason="needs the extra `mpi`")
    return pkgutil.resolve_name(request.param)


def test_every_public_name_is_documented(module):
    """With the members of classes."""
    missing = undocumented(public(module))
    assert not missing, f"every public name, argument and member has a docstring or a line of one: {missing}"


@pytest.mark.parametrize("module", ["jaxcgx", "jaxcgx.wan", "jaxcgx.patch", "jaxcgx.lab"], indirect=True)
def test_the_api_pages_have_every_result(module):
    of_jaxcgx = {*public(jaxcgx).values()}
    assert {(kind.__module__, kind.__name__) for kind in results(module) - of_jaxcgx} <= {*RESULTS}


@pytest.mark.parametrize("module, name", RESULTS)
def test_every_result_is_documented(module, name):
    kind = pkgutil.resolve_name(f"{module}:{name}")
    assert kind.__module__ == module
    assert not undocumented({name: kind})


@pytest.mark.parametrize("name", sorted({*named_on_pages("jaxcgx")} - {*SCOPES}))
def test_names_on_pages_exist(name):
    if name.startswith("jaxcgx.mpi"):
        pytest.importorskip("mpi4jax", reason="needs the extra `mpi`")
    assert pkgutil.resolve_name(name) is not None
