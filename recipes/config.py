"""Configs from Python files, with changes from the command line.

An example of a command line:

    --config=recipes/configs/cifar/resnet20.py --config.compression=dgc --config.train.num_epochs=500 --suffix=x
"""

import argparse
import ast
import importlib.util
import json
import pathlib
import re
import shlex
import shutil
import sys
import traceback
from typing import Any, NamedTuple

from checks import Wrong
from ml_collections import ConfigDict

HERE = pathlib.Path(__file__).resolve().parent
SECTIONS = "compression", "data", "model", "optimizer", "schedule", "train"


class Command(NamedTuple):
    """The contents of a command line."""

    config: Any  # a ConfigDict
    name: str  # of the run's folder, such as cifar-resnet20-dgc-x
    arguments: tuple[str, ...]
    devices: int | None
    launch: str
    runs: pathlib.Path

    def with_compression(self, word: str) -> str:
        """Returns the same command with another compression, and without options for the compression."""
        given, kept = list(self.arguments), []
        while given:
            argument = given.pop(0)
            taken = [argument] if "=" in argument or not given else [argument, given.pop(0)]
            if not re.match(r"--(config\.)?compression\b", argument):
                kept += taken
        python = "python" if shutil.which("python") == sys.executable else _spell(sys.executable)
        return shlex.join([python, _spell(HERE / "train.py"), *kept, f"--compression={word}"])


def parse(arguments: list[str]) -> Command:
    """Parses a command line."""
    parser = argparse.ArgumentParser(
        prog="train.py",
        description="Trains a named network on named data with compressed gradients.",
        epilog="--config.SECTION.KEY=VALUE changes a value of the config: --config.train.num_epochs=500. The same "
        "command goes on where an interrupted run stopped.",
        allow_abbrev=False,
    )
    words = ", ".join(sorted(path.stem for path in (HERE / "configs/compression").glob("*.py")))
    parser.add_argument("--config", required=True, metavar="FILE", help="one of recipes/configs/*/*.py")
    parser.add_argument("--compression", metavar="WORD", help=f"as --config.compression=WORD: {words}")
    parser.add_argument("--suffix", default="", help="of the run's folder")
    parser.add_argument("--devices", type=int, help="virtual devices of one process without accelerators (4)")
    parser.add_argument(
        "--launch",
        choices=("auto", "local", "mpi", "distributed"),
        default="auto",
        help="who started this process: nobody (local), mpirun, or one that jax.distributed knows",
    )
    parser.add_argument("--runs", type=pathlib.Path, default="runs", metavar="FOLDER", help="the folder of all runs")
    known, rest = parser.parse_known_args(arguments)
    changes = _changes(rest)
    if known.compression is not None:
        if "compression" in changes:
            raise Wrong(
                f"--compression={known.compression}: --config.compression={changes['compression']} is given, too"
            )
        changes["compression"] = known.compression
    path, ours = pathlib.Path(known.config), HERE.parent / known.config
    if ours.is_file() and not path.is_file():  # recipes/configs/..., in a folder that isn't the repository's
        path = ours
    config: Any = make_config(str(path), changes)
    name = "-".join(filter(None, (path.parent.name, path.stem, config.compression.word, known.suffix)))
    if pathlib.Path(name).name != name:
        raise Wrong(f"--suffix: expected the end of a folder's name, got {known.suffix!r}")
    return Command(config, name, tuple(arguments), devices=known.devices, launch=known.launch, runs=known.runs)


def make_config(file: str, changes: dict[str, str]) -> ConfigDict:
    """Returns the config of a file with changes, such as {"train.num_epochs": "500"}.

    The change "compression" names a file in configs/compression. The change "data" names a data set, or is "synthetic".
    """
    config = load(pathlib.Path(file), "--config")
    if set(config) != set(SECTIONS):
        raise Wrong(f"{file}: expected the sections {', '.join(SECTIONS)}, got {', '.join(sorted(config))}")
    changes = dict(changes)
    word = changes.pop("compression", config.compression)
    if not isinstance(word, str) or pathlib.Path(word).name != word or "compression.word" in changes:
        raise Wrong("config.compression: expected a word, the name of a file in recipes/configs/compression")
    config = config.copy_and_resolve_references()
    with config.ignore_type():
        config.compression = load(HERE / f"configs/compression/{word}.py", "config.compression")
    with config.compression.unlocked():
        config.compression.word = word
    if (data := changes.pop("data", None)) is not None:
        changes |= {"data.synthetic": "True"} if data == "synthetic" else {"data.name": data}
    config.lock()
    for key, text in changes.items():
        _change(config, key, text)
    return config


def load(path: pathlib.Path, place: str) -> ConfigDict:
    """Returns the result of get_config() in a Python file."""
    if not path.is_file():
        near = sorted(each.stem for each in path.parent.glob("*.py") if each.stem != "__init__")
        raise Wrong(f"{place}: there is no file {path}" + (f"; its folder has {', '.join(near)}" if near else ""))
    spec = importlib.util.spec_from_file_location(f"config_{path.stem}", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        if not hasattr(module, "get_config"):
            raise Wrong(f"{place}: {path} has no get_config()")
        return module.get_config()
    except Wrong:
        raise
    except Exception as error:  # the file may raise anything
        is_here = lambda name: name is not None and pathlib.Path(name).resolve() == path.resolve()
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if is_here(frame.filename)]
        if isinstance(error, SyntaxError) and is_here(error.filename):
            lines.append(error.lineno)
        where = f"{path}, line {lines[-1]}" if lines else str(path)
        raise Wrong(f"{place}: {where}: {' '.join(str(error).split())}") from error


def spell(config: ConfigDict) -> str:
    """Returns a config as JSON."""
    return json.dumps(config.to_dict(), indent=1, sort_keys=True)


def _spell(path: str | pathlib.Path) -> str:
    """Returns a path as a user would type it: relative, if it is inside the current folder."""
    path, here = pathlib.Path(path), pathlib.Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def _changes(rest: list[str]) -> dict[str, str]:
    """Returns {KEY: VALUE} of the arguments --config.KEY=VALUE and --config.KEY VALUE."""
    found, rest = {}, list(rest)
    while rest:
        key, equals, value = rest.pop(0).partition("=")
        if not key.startswith("--config."):
            raise Wrong(f"{key}: train.py has no such argument; --help lists all")
        if not equals:
            if not rest:
                raise Wrong(f"{key}: expected a value")
            value = rest.pop(0)
        found[key.removeprefix("--config.")] = value
    return found


def _change(config: ConfigDict, key: str, text: str) -> None:
    *path, last = key.split(".")
    section: Any = config
    for depth, part in enumerate([*path, last]):
        if not isinstance(section, ConfigDict) or part not in section:
            place = ".".join(["config", *path[:depth]])
            has = ", ".join(sorted(section)) if isinstance(section, ConfigDict) else "no keys"
            raise Wrong(f"config.{key}: there is no such key; {place} has {has}")
        section = section[part] if depth < len(path) else section
    old = section[last]
    if isinstance(old, ConfigDict):
        raise Wrong(f"config.{key}: expected a key of this section, as --config.{key}.{next(iter(old))}=...")
    try:
        value = text if isinstance(old, str) else ast.literal_eval(text)
        value = (value,) if isinstance(old, tuple) and not isinstance(value, tuple | list) else value
        if isinstance(old, bool) != isinstance(value, bool):
            raise TypeError
        section[last] = value
    except (SyntaxError, TypeError, ValueError):
        raise Wrong(f"config.{key}: expected a value like {old!r}, got {text!r}") from None
