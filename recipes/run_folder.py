"""The folder of a run: config.json, log.txt, metrics.jsonl, TensorBoard's events, checkpoints/ and plot.png."""

import json
import pathlib
import time
from typing import Any

import config
from checks import Wrong
from launch import World
from ml_collections import ConfigDict
from tensorboardX import SummaryWriter
from tqdm import tqdm

# What may change where a run goes on.
FREE = {"data.folder", "train.log_every", "train.save_every", "train.steps", "train.test_examples"}


class RunFolder:
    """The files of a run, which one process writes."""

    def __init__(self, path: pathlib.Path, settings: ConfigDict, world: World) -> None:
        """All processes of the world call it. One of them writes, and the others only read."""
        self.path, self.writes = path, world.speaks
        self.metrics = path / "metrics.jsonl"
        self._events: Any = None
        error: Exception = Wrong(f"{path}: another process can't begin there; its error says why")
        ready = True
        if self.writes:
            try:
                path.mkdir(parents=True, exist_ok=True)
                self._check_config(settings)
                _replace(path / "config.json", config.spell(settings))
            except (Wrong, OSError) as found:
                error, ready = found, False
        if not world.all(ready):  # or else the other processes would wait for this one
            raise error

    def say(self, text: str) -> None:
        """Shows a line, and adds it to log.txt."""
        if self.writes:
            tqdm.write(text)
            with (self.path / "log.txt").open("a") as file:
                file.write(f"{time.strftime('%F %T')} {text}\n")

    def begin(self, step: int) -> None:
        """Forgets the metrics of later steps, which will come again."""
        if self.writes:
            lines = [line for line in self.read() if line["step"] <= step]
            _replace(self.metrics, "".join(f"{json.dumps(line)}\n" for line in lines))
            self._events = SummaryWriter(str(self.path), purge_step=step + 1)

    def write(self, step: int, **values: float) -> None:
        """Adds a line to metrics.jsonl, and the values to TensorBoard's events."""
        if self.writes:
            with self.metrics.open("a") as file:
                file.write(f"{json.dumps(dict(step=step, **values))}\n")
            for name, value in values.items():
                self._events.add_scalar(name, value, step)

    def read(self) -> list[dict[str, float]]:
        """The lines of metrics.jsonl. A last line that was cut off is left out."""
        if not self.metrics.exists():
            return []
        text = self.metrics.read_text()
        return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]

    def close(self) -> None:
        """Writes what waits to be written."""
        if self._events is not None:
            self._events.close()

    def _check_config(self, settings: ConfigDict) -> None:
        path = self.path / "config.json"
        if not (path.exists() and any(self.path.glob("checkpoints/*"))):
            return
        old, new = (_flat(json.loads(text)) for text in (path.read_text(), config.spell(settings)))
        for key in sorted((old.keys() | new.keys()) - FREE):
            if old.get(key) != new.get(key):
                raise Wrong(
                    f"config.{key}: the run in {self.path} has {old.get(key)!r}, got {new.get(key)!r}; start another "
                    "run by --suffix=..., or remove the folder"
                )


def _replace(path: pathlib.Path, text: str) -> None:
    """Writes a file, which has the old text until the new one is whole."""
    new = path.with_name(f"{path.name}.new")
    new.write_text(text)
    new.replace(path)


def _flat(tree: dict[str, Any], place: str = "") -> dict[str, Any]:
    found = {}
    for key, value in tree.items():
        found |= _flat(value, f"{place}{key}.") if isinstance(value, dict) else {f"{place}{key}": value}
    return found
