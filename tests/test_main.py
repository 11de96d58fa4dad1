"""Tests the command line itself: its help, version and completion. The tests of its commands are those of report/."""

import importlib.metadata
import pkgutil
import sys
import tomllib

import pytest
from commands import ROOT
from helpers import run

from jaxcgx import __main__

SCRIPT = "import sys; sys.argv[:1] = ['/somewhere/bin/jaxcgx']; from jaxcgx.__main__ import main; sys.exit(main())"


@pytest.mark.parametrize("way", [("-m", "jaxcgx"), ("-c", SCRIPT)], ids=["module", "script"])
@pytest.mark.parametrize("words", ["--help", "--version", "plan --help", "completion bash"])
def test_help_needs_no_jax(way, words):
    done = run(sys.executable, "-P", "-X", "importtime", *way, *words.split())
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "jaxcgx" in imported and not imported & {"jax", "jaxlib", "numpy"}
    assert done.stdout.startswith(("usage: jaxcgx ", "jaxcgx ")) or way[0] == "-m" or "complete" in done.stdout


def test_the_entry_point(capsys):
    place = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]["jaxcgx"]
    with pytest.raises(SystemExit) as ended:
        pkgutil.resolve_name(place)(["--version"])
    version = importlib.metadata.version("jaxcgx")
    assert ended.value.code == 0 and capsys.readouterr().out == f"jaxcgx {version}\n"


@pytest.mark.parametrize(
    ("words", "expected"), [("d", "doctor"), ("plan --li", "--link"), ("tune --b", "--budget --bits"), ("no -", "")]
)
def test_completion(capsys, words, expected):
    __main__.main(["completion", "bash"])
    bash = capsys.readouterr().out
    asked = f'COMP_WORDS=(jaxcgx {words}); COMP_CWORD={len(words.split())}; _jaxcgx; echo "${{COMPREPLY[@]}}"'
    assert run("bash", "-c", f"{bash}{asked}").stdout == f"{expected}\n"
    __main__.main(["completion", "zsh"])
    first, zsh = capsys.readouterr().out.split("_jaxcgx", 1)
    assert "bashcompinit" in first and bash == f"_jaxcgx{zsh}"


@pytest.mark.parametrize("words", [["jaxcgx"], ["-m", "app", "-m", "jaxcgx"]], ids=["file", "option"])
def test_other_programs_have_the_package(tmp_path, words):
    """Also those whose file or option is called jaxcgx."""
    (tmp_path / "app").mkdir()
    (tmp_path / "app/__init__.py").write_text("import jaxcgx as cgx\n")
    (tmp_path / "app/__main__.py").write_text("from app import cgx\nprint(cgx.MaxMin(4).bits)\n")
    (tmp_path / "jaxcgx").write_text("import jaxcgx as cgx\nprint(cgx.MaxMin(4).bits)\n")
    assert run(sys.executable, *words, cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)}).stdout == "4\n"
