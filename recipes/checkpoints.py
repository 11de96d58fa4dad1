"""Checkpoints in Orbax's format. A checkpoint is either complete or absent."""

import contextlib
import logging
import os
import pathlib
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Generator
from typing import Any

import jax
import orbax.checkpoint as ocp
from checks import Wrong
from etils import epath
from launch import World

import jaxcgx as cgx

KEEP = 2  # checkpoints
HALF = ".orbax-checkpoint-tmp"  # the end of the name of a checkpoint that isn't complete, for Orbax, too
SEEN = 5  # seconds until a shared folder shows another host's files
OWN_FILES = 64 << 10  # bytes of a checkpoint beside its arrays, at most about

# A save that fails is an error of one line. Orbax's threads would log it, too, each with its traceback, and those of
# TensorStore go on after it.
for logger in "absl", "asyncio":
    logging.getLogger(logger).setLevel(logging.CRITICAL)
shown = sys.unraisablehook
sys.unraisablehook = lambda error: None if str(error.exc_value) == "Event loop is closed" else shown(error)


class Checkpoints:
    """The last checkpoints of a run, in FOLDER/STEP."""

    def __init__(self, folder: pathlib.Path, world: World, say: Callable[[str], None]) -> None:
        self.folder, self.world, self.say = folder.resolve(), world, say

    def steps(self) -> list[int]:
        """Returns the steps that have a checkpoint, in increasing order, without those that couldn't be read."""
        return sorted(int(path.name) for path in self.folder.glob("*") if path.name.isdigit())

    def save(self, step: int, tree: Any) -> None:
        """Saves a pytree of arrays, and then removes old checkpoints.

        All processes must call this method. If one can't save, it raises `Wrong` in all. A Checkpointer of Orbax would
        let the others wait for this process. So this method calls Orbax's handler, and agrees after each part.
        """
        if self.world.comm is not None:
            tree = cgx.gather_state(tree, self.world.comm)
        half, handler = epath.Path(self.folder / f"{step}{HALF}"), ocp.PyTreeCheckpointHandler()
        try:
            with self._writing(step):
                if self.world.speaks:
                    self._begin(half, tree)
            with self._writing(step):
                if self.world.comm is None:
                    _wait(half)
            with self._writing(step):
                if self.world.comm is None or self.world.speaks:  # over MPI, this process has the rows of all
                    handler.save(half, args=ocp.args.PyTreeSave(tree))
            with self._writing(step):
                if self.world.speaks:
                    handler.finalize(half)
                    shutil.rmtree(self.folder / str(step), ignore_errors=True)  # one that couldn't be read
                    half.rename(self.folder / str(step))
                    for old in self.steps()[:-KEEP]:  # first a new name: what is half removed is no checkpoint
                        with contextlib.suppress(OSError):
                            (self.folder / str(old)).rename(self.folder / f"{old}{HALF}")
        finally:
            if self.world.speaks:
                self._remove_halves()

    def restore(self, template: Any) -> tuple[int, Any]:
        """Returns (step, tree) of the last readable checkpoint. Without checkpoints, returns (0, template).

        All processes must call this method, and get the same step. Later checkpoints, which couldn't be read, become
        STEP.unreadable, so that they don't count any more. If there are checkpoints and none can be read, it raises
        `Wrong`.
        """
        step, why, bad, reads = sys.maxsize, "", [], False
        # A process may not yet see the files that another one does, so they agree on each step that they try.
        while step := max(self.world.gather(max((each for each in self.steps() if each < step), default=0))):
            found, why = None, "another process can't read it"
            try:
                found = cgx.restore_state(self.folder / str(step), template, comm=self.world.comm)
            except Exception as error:  # Orbax and TensorStore raise many types
                why = _line(error)
            if self.world.all(found is not None):
                with self.world.together():
                    if self.world.speaks:
                        self._set_aside(bad)
                return step, found
            bad.append(step)
            reads |= found is not None
            self.say(f"the checkpoint of step {step} can't be read ({why}): trying the one before")
        if why:
            good = any(self.world.gather(reads))
            remedy = "all hosts must see --runs" if good else "to begin anew, remove this folder"
            with self.world.together():
                raise Wrong(f"{self.folder}: no checkpoint can be read ({why}); {remedy}")
        return 0, template

    @contextlib.contextmanager
    def _writing(self, step: int) -> Generator[None]:
        """Raises `Wrong` in all processes if one raises in this block."""
        with self.world.together():
            try:
                yield
            except Exception as error:  # Orbax and the libraries under it raise many types
                good = [each for each in self.steps() if each != step]
                last = f"the last good one is that of step {good[-1]}" if good else "there is no other"
                why = f"can't save the checkpoint of step {step}: {_line(error)}"
                raise Wrong(f"{self.folder}: {why}; {last}") from error

    def _set_aside(self, steps: list[int]) -> None:
        """Renames checkpoints that can't be read."""
        for step in steps:
            new = self.folder / f"{step}.unreadable"
            shutil.rmtree(new, ignore_errors=True)
            with contextlib.suppress(FileNotFoundError):  # only another process sees it
                (self.folder / str(step)).rename(new)

    def _begin(self, half: epath.Path, tree: Any) -> None:
        """Makes the folder for half a checkpoint, if the disk has space for the whole one."""
        needed = OWN_FILES + sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))
        self.folder.mkdir(exist_ok=True)
        self._remove_halves()
        half.mkdir()
        try:
            with tempfile.TemporaryFile(dir=self.folder) as file:
                os.posix_fallocate(file.fileno(), 0, needed)
        except OSError as error:
            raise Wrong(f"{error.strerror} (it has up to {needed:,} bytes)") from error
        # Other processes wait in Orbax for this folder, for up to 10 minutes if this one fails before it makes it.
        (half / "array_metadatas").mkdir()

    def _remove_halves(self) -> None:
        for path in self.folder.glob(f"*{HALF}*"):
            shutil.rmtree(path, ignore_errors=True)


def _wait(half: epath.Path) -> None:
    """Waits until this process sees the folder that another one has made."""
    until = time.monotonic() + SEEN
    while not half.exists():
        if time.monotonic() > until:
            raise Wrong("a process doesn't see the folder of another one; all hosts must see --runs")
        time.sleep(0.1)


def _line(error: Exception) -> str:
    """Returns the operating system's reason if the error has one, else the first line of the error."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    text = str(error).strip()
    reason = re.search(r"[^:\n]+(?= \[os_error_code)", text)
    return reason.group().strip() if reason else text.partition("\n")[0][:200]
