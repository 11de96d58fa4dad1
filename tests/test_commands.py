"""Tests that every command on a page or in a docstring exists: its programs, files, targets and options.

`make test-commands` runs the commands (heavy_commands.py).
"""

import importlib.util
import itertools
import re
import tomllib

import commands
import pytest
from commands import ROOT
from helpers import load_script

from jaxcgx import __main__

ALL = [(script.page.stem, words) for script in commands.scripts() for words in script.commands]
OURS = [(page, words) for page, words in ALL if commands.why_not_run(words) != commands.FOREIGN]
SHOWN = [pytest.param(words, id=f"{page}: {' '.join(words)}") for page, words in OURS]
READERS = "train.py", "centers.py", "hosts"  # files that the reader has
VARIABLE = re.compile(r"([A-Z_]+)=")
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


@pytest.mark.parametrize("words", SHOWN)
def test_what_it_names_exists(words, monkeypatch):
    words = list(itertools.dropwhile(lambda word: word in ("sudo", "env") or VARIABLE.match(word), words))
    words = words[: words.index("...")] if "..." in words else words
    assert not any(word.startswith("[") for word in words), "an option in brackets isn't valid as printed"
    program, *rest = words
    if program in ("mpirun", "mpiexec", "srun"):
        python = next((i for i, word in enumerate(rest) if word.endswith("python")), None)
        program, *rest = ["python"] if python is None else rest[python:]
    if program == "make":
        check_make(rest)
    elif program == "pip":
        check_pip(rest)
    elif program.endswith("python"):
        check_python(rest, monkeypatch)
    elif program == "docker":
        check_docker(rest)
    elif "/" in program:
        assert (ROOT / program).is_file()
    elif program in ("sbatch", "kubectl"):
        assert all((ROOT / word).is_file() for word in rest if "/" in word)
    else:
        assert program in ("tensorboard", "curl", "kill", "sysctl", "tc", "ip", "ulimit"), "add a check of this program"


def check_make(words):
    text = (ROOT / "Makefile").read_text()
    for word in words:
        variable = VARIABLE.match(word)
        assert f"$({variable[1]})" in text or f"{variable[1]} " in text if variable else f"\n{word}:" in text, word


def check_pip(words):
    assert words[0] in ("install", "-v")
    for word in words[1:]:
        extras = re.fullmatch(r"\.\[(.*)\]", word)
        assert extras is None or set(extras[1].split(",")) <= set(EXTRAS)
        setting = re.fullmatch(r"-Ccmake\.define\.(\w+)=.*", word)
        assert setting is None or setting[1] in (ROOT / "CMakeLists.txt").read_text()


def check_docker(words):
    text = (ROOT / "Dockerfile").read_text()
    if words[0] == "build":
        assert f" AS {words[words.index('--target') + 1]}\n" in text
    for word in words:
        _, option, config = word.partition("--config=")
        assert not option or (ROOT / config).is_file(), word


def check_python(words, monkeypatch):
    while words[:2] == ["-m", "mpi4py"]:
        words = words[2:]
    if words[:2] == ["-m", "jaxcgx"]:
        for name, (_, *rest) in __main__.COMMANDS.items():
            monkeypatch.setitem(__main__.COMMANDS, name, (lambda options: 0, *rest))
        if len(words) > 3 or words[2] == "doctor":
            assert __main__.main(words[2:]) == 0
        else:
            assert words[2] in __main__.COMMANDS, words
    elif words[:1] == ["-m"]:
        assert importlib.util.find_spec(words[1])
        assert all((ROOT / word).is_file() for word in words if word.endswith(".py"))
    elif words and words[0] not in READERS:
        check_script(ROOT / words[0], words[1:], monkeypatch)


def check_script(path, words, monkeypatch):
    assert path.is_file()
    if path.parent.name == "recipes" and path.name != "sample.py":  # it has no options of configs
        pytest.importorskip("ml_collections", reason="needs the extra `recipes`")
        monkeypatch.chdir(ROOT)
        own = path.read_text()
        others = [word for word in words if "..." not in word and f'"{word.partition("=")[0]}"' not in own]
        load_script(ROOT / "recipes/config.py", monkeypatch).parse(others)
        return
    code = "".join(near.read_text() for near in (path, path.parent / "common.py") if near.is_file())
    for word in words:
        assert not word.startswith("--") or f'"{word.partition("=")[0]}"' in code, word


def test_every_program_is_known():
    for page, words in ALL:
        program = next(word for word in words if not VARIABLE.match(word))
        assert re.fullmatch(commands.PROGRAMS, program), f"add it to commands.py: {words} on {page}"
