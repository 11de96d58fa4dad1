"""The folder of a run: its config, data.json, log.txt, metrics.jsonl, TensorBoard's events, checkpoints/, plot.png."""

import contextlib
import fcntl
import json
import os
import pathlib
import time
from collections.abc import Generator
from typing import Any

import config
from checks import Wrong
from launch import World
from ml_collections import ConfigDict
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto import event_pb2
from tensorboardX.summary import scalar
from tqdm import tqdm

PROTO: Any = event_pb2  # type checkers don't see its classes, which are made at run time

# The keys of a config that may change when a run is continued.
FREE = {"data.folder", "data.threads", "train.log_every", "train.save_every", "train.steps", "train.test_examples"}

PATIENCE = 120  # seconds for a killed process of the same run to end; a file server may keep its lock for 90
PAUSE = 0.1  # seconds between two looks at the lock


class RunFolder:
    """The files of a run. Only one process writes them."""

    def __init__(self, path: pathlib.Path, settings: ConfigDict, content: dict[str, int], world: World) -> None:
        """Opens the folder. All processes must do so. One process writes, and the others only read.

        content: numbers of the run's data. A run can't continue with other data.
        """
        self.path, self.writes = path, world.speaks
        self.metrics = path / "metrics.jsonl"
        self._events: Any = None
        self._locked: Any = None
        try:
            with world.together():
                if self.writes:
                    self._open({"config": config.spell(settings), "data": json.dumps(content, indent=1)})
        except BaseException:
            self.close()
            raise

    def say(self, text: str) -> None:
        """Prints a line, and adds it to log.txt."""
        if self.writes:
            tqdm.write(text)
            _append(self.path / "log.txt", f"{time.strftime('%F %T')} {text}\n")

    def begin(self, step: int) -> None:
        """Starts to write metrics. Removes the metrics of later steps, because these steps run again."""
        if self.writes:
            lines = [line for line in self.read() if line["step"] <= step]
            _replace(self.metrics, "".join(f"{json.dumps(line)}\n" for line in lines))
            # A SummaryWriter would write in a thread. When the thread fails, as on a full disk, this one waits forever.
            self._events = EventsWriter(str(self.path / "events"))
            begins = PROTO.SessionLog(status=PROTO.SessionLog.START)  # TensorBoard forgets the steps from this one on
            self._events.write_event(PROTO.Event(wall_time=time.time(), step=step + 1, session_log=begins))

    def write(self, step: int, **values: float) -> None:
        """Adds a line to metrics.jsonl, and the values to TensorBoard's events."""
        if self.writes:
            _append(self.metrics, f"{json.dumps(dict(step=step, **values))}\n")
            with _naming(self.path / "events.out.tfevents.*"):
                for name, value in values.items():
                    self._events.write_event(PROTO.Event(wall_time=time.time(), step=step, summary=scalar(name, value)))
                self._events.flush()

    def read(self) -> list[dict[str, float]]:
        """Returns the lines of metrics.jsonl, without an incomplete last line."""
        if not self.metrics.exists():
            return []
        text = self.metrics.read_text()
        return [_json(self.metrics, line) for line in text[: text.rfind("\n") + 1].splitlines()]

    def close(self) -> None:
        """Closes the file of TensorBoard's events, and lets another process train in this folder."""
        if self._events is not None:
            with contextlib.suppress(OSError):  # of a full disk, which `write` has named
                self._events.close()
        if self._locked is not None:
            self._locked.close()

    def _open(self, texts: dict[str, str]) -> None:
        """Checks and writes {NAME: the text of NAME.json}."""
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock()
        for name, text in texts.items():
            self._check(name, json.loads(text))
        for name, text in texts.items():
            _replace(self.path / f"{name}.json", text)

    def _lock(self) -> None:
        """Raises `Wrong` if another process trains in this folder. The lock ends with this process at the latest."""
        self._locked = (self.path / "lock").open("a")
        why, began = f"{self.path}: another process trains in this folder", time.monotonic()
        with contextlib.suppress(OSError):  # of a file system without locks
            while True:
                try:
                    fcntl.flock(self._locked, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    return
                except BlockingIOError:
                    if (waited := time.monotonic() - began) > PATIENCE:
                        raise Wrong(f"{why}; start another run by --suffix=...") from None
                    if waited < PAUSE:
                        tqdm.write(f"{why}: waiting for up to {PATIENCE} s until it ends")
                time.sleep(PAUSE)

    def _check(self, name: str, new: dict[str, Any]) -> None:
        """Raises `Wrong` if NAME.json of a run with checkpoints has other values."""
        path = self.path / f"{name}.json"
        if not (path.exists() and any(self.path.glob("checkpoints/*"))):
            return
        old, new = _flat(_json(path, path.read_text())), _flat(new)
        for key in sorted((old.keys() | new.keys()) - FREE):
            if old.get(key) != new.get(key):
                raise Wrong(
                    f"{name}.{key}: the run in {self.path} has {old.get(key)!r}, got {new.get(key)!r}; start another "
                    "run by --suffix=..., or remove the folder"
                )


@contextlib.contextmanager
def _naming(path: pathlib.Path) -> Generator[None]:
    """Names the file in an OSError of this block. That of a full disk doesn't."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def _append(path: pathlib.Path, text: str) -> None:
    with _naming(path), path.open("a") as file:
        file.write(text)


def _replace(path: pathlib.Path, text: str) -> None:
    """Replaces a file. It has the old text until the new text is complete."""
    new = path.with_name(f"{path.name}.new")
    with _naming(path):
        new.write_text(text)
        with new.open() as file:
            os.fsync(file.fileno())
        new.replace(path)


def _json(path: pathlib.Path, text: str) -> Any:
    """Returns the value of a text in a file of a run."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise Wrong(f"{path}: {error.msg}: {text[:40]!r}; mend the file, or remove the folder of the run") from None


def _flat(tree: dict[str, Any], place: str = "") -> dict[str, Any]:
    found = {}
    for key, value in tree.items():
        found |= _flat(value, f"{place}{key}.") if isinstance(value, dict) else {f"{place}{key}": value}
    return found
