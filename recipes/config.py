"""Configs from Python files, with changes from the command line.

An example of a command line:

    --config=recipes/configs/cifar/resnet20.py --config.compression=dgc --config.train.num_epochs=500 --suffix=x

One as that of the authors of Deep Gradient Compression, whose files are in recipes/dgc/:

    --configs configs/cifar/resnet20.py configs/dgc/wm5.py --configs.train.num_epochs 500 --suffix .e500
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
from launch import cgx_variables, under_mpirun
from ml_collections import ConfigDict

HERE = pathlib.Path(__file__).resolve().parent
SECTIONS = "compression", "data", "model", "optimizer", "schedule", "train"


class Command(NamedTuple):
    """The contents of a command line."""

    config: Any  # a ConfigDict
    name: str  # of the run's folder, such as cifar-resnet20-dgc-x
    arguments: tuple[str, ...]
    devices: int | None
    nodes: int | None
    locals: int | None
    launch: str
    runs: pathlib.Path
    evaluate: bool = False
    init: pathlib.Path | None = None  # the folder of another run
    publish: str = ""  # an address or a directory

    def with_compression(self, word: str) -> str:
        """Returns the same command with another compression, and without options for the compression."""
        given, kept = list(self.arguments), []
        while given:
            argument = given.pop(0)
            taken = [argument] if "=" in argument or not given else [argument, given.pop(0)]
            if not re.match(r"--(configs?\.)?compression\b", argument):
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
    files = parser.add_mutually_exclusive_group(required=True)
    files.add_argument("--config", metavar="FILE", help="one of recipes/configs/*/*.py")
    files.add_argument("--configs", nargs="+", metavar="FILE", help="several, of which later ones change the first")
    parser.add_argument("--evaluate", action="store_true", help="tests the last checkpoint, and trains no further")
    parser.add_argument("--compression", metavar="WORD", help=f"as --config.compression=WORD: {words}")
    parser.add_argument("--suffix", default="", help="of the run's folder")
    parser.add_argument("--devices", type=int, help="virtual devices of one process without accelerators (4)")
    parser.add_argument("--nodes", type=int, metavar="N", help="ranks are on N nodes: uncompressed sums inside them")
    parser.add_argument("--locals", type=int, metavar="N", help="ranks are on nodes of N ranks")
    parser.add_argument(
        "--launch",
        choices=("auto", "local", "mpi", "distributed"),
        default="auto",
        help="who started this process: nobody (local), mpirun, or one that jax.distributed knows",
    )
    parser.add_argument("--init", type=pathlib.Path, metavar="RUN", help="begins with the weights of another run")
    parser.add_argument(
        "--publish", default="", metavar="WHERE", help="sends bfloat16 weights to sample.py: HOST:PORT, or a directory"
    )
    parser.add_argument("--runs", type=pathlib.Path, default="runs", metavar="FOLDER", help="the folder of all runs")
    given = [argument.partition("=")[0] for argument in arguments if argument.startswith("--")]
    if twice := [name for name in given if given.count(name) > 1]:
        raise Wrong(f"{twice[0]}: it is given twice")
    known, rest = parser.parse_known_args(arguments)
    changes = _changes(rest)
    if known.compression is not None:
        if "compression" in changes:
            raise Wrong(
                f"--compression={known.compression}: --config.compression={changes['compression']} is given, too"
            )
        changes["compression"] = known.compression
    if "compression" not in changes and not known.configs and under_mpirun() and cgx_variables():
        changes["compression"] = "cgx"
    path, *more = [_find(name, known.configs) for name in known.configs or [known.config]]
    config: Any = make_config(str(path), changes, *more)
    words = [each.stem for each in more] or [config.compression.word]
    name = "-".join(filter(None, (path.parent.name, path.stem, *words, known.suffix))).replace("-.", ".")
    if pathlib.Path(name).name != name:
        raise Wrong(f"--suffix: expected the end of a folder's name, got {known.suffix!r}")
    there = dict[str, Any](devices=known.devices, nodes=known.nodes, locals=known.locals, launch=known.launch)
    there |= dict(runs=known.runs, evaluate=known.evaluate, init=known.init, publish=known.publish)
    return Command(config, name, tuple(arguments), **there)


def _find(name: str, several: Any) -> pathlib.Path:
    """Returns the path of a config file: of --configs one in recipes/dgc/, else in the current folder, else of ours."""
    given = pathlib.Path(name)
    places = [*([HERE / "dgc" / name] if several else []), given, HERE.parent / name]
    return next((path for path in places if path.is_file()), given)


def make_config(file: str, changes: dict[str, str], *more: pathlib.Path) -> ConfigDict:
    """Returns the config of a file with changes, such as {"train.num_epochs": "500"}.

    The files `more`, in their order, change the first one.

    The change "compression" names a file in configs/compression. The change "data" names a data set, or is "synthetic".
    """
    config = load(pathlib.Path(file), "--config")
    for path in more:
        load(path, "--configs", config)
    if set(config) != set(SECTIONS):
        raise Wrong(f"{file}: expected the sections {', '.join(SECTIONS)}, got {', '.join(sorted(config))}")
    changes = dict(changes)
    made = isinstance(config.compression, ConfigDict) and "compression" not in changes  # by one of `more`
    word = config.compression.word if made else changes.pop("compression", config.compression)
    if not isinstance(word, str) or pathlib.Path(word).name != word or "compression.word" in changes:
        raise Wrong("config.compression: expected a word, the name of a file in recipes/configs/compression")
    config = config.copy_and_resolve_references()
    with config.ignore_type():
        config.compression = (
            config.compression if made else load(HERE / f"configs/compression/{word}.py", "config.compression")
        )
    with config.compression.unlocked():
        config.compression.word = word
    if (data := changes.pop("data", None)) is not None:
        changes |= {"data.synthetic": "True"} if data == "synthetic" else {"data.name": data}
    config.lock()
    for key, text in changes.items():
        _change(config, key, text)
    return config


def load(path: pathlib.Path, place: str, *config: ConfigDict) -> Any:
    """Returns the result of get_config() in a Python file. With a config, calls update(config) there."""
    function = "update" if config else "get_config"
    if not path.is_file():
        near = sorted(each.stem for each in path.parent.glob("*.py") if each.stem != "__init__")
        raise Wrong(f"{place}: there is no file {path}" + (f"; its folder has {', '.join(near)}" if near else ""))
    spec = importlib.util.spec_from_file_location(f"config_{path.stem}", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        if not hasattr(module, function):
            raise Wrong(f"{place}: {path} has no {function}({'config' if config else ''})")
        return getattr(module, function)(*config)
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
    """Returns {KEY: VALUE} of the arguments --config.KEY=VALUE, --config.KEY VALUE, and those of --configs.KEY."""
    found, rest = {}, list(rest)
    while rest:
        key, equals, value = rest.pop(0).partition("=")
        if not re.match(r"--configs?\.", key):
            raise Wrong(f"{key}: train.py has no such argument; --help lists all")
        if not equals:
            if not rest:
                raise Wrong(f"{key}: expected a value")
            value = rest.pop(0)
        word = key.partition(".")[2].replace("train.compression.compress_ratio", "compression.ratio")  # DGC's name
        if word in found:
            raise Wrong(f"{key}: it is given twice")
        found[word] = value
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
