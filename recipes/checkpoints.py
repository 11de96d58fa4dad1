"""Checkpoints in Orbax's format. A checkpoint is either complete or absent."""

import os
import pathlib
import re
import shutil
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import jax
import orbax.checkpoint as ocp
from checks import Wrong
from launch import World

import jaxcgx as cgx

KEEP = 2  # checkpoints
OWN_FILES = 64 << 10  # bytes of a checkpoint beside its arrays, at most about


class Checkpoints:
    """The last checkpoints of a run, in FOLDER/STEP."""

    def __init__(self, folder: pathlib.Path, world: World, say: Callable[[str], None]) -> None:
        self.folder, self.world, self.say = folder.resolve(), world, say
        self._unreadable: set[int] = set()  # steps

    def steps(self) -> list[int]:
        """Returns the steps that have a checkpoint, in increasing order, without those that couldn't be read."""
        return sorted({int(path.name) for path in self.folder.glob("*") if path.name.isdigit()} - self._unreadable)

    def save(self, step: int, tree: Any) -> None:
        """Saves a pytree of arrays, and then removes old checkpoints. All processes must call this method."""
        if self.world.comm is not None:
            tree = cgx.gather_state(tree, self.world.comm)
        with self.world.together():
            if self.world.speaks and (why := self._no_space(tree)):
                raise self._cant_save(step, why)
        if self.world.comm is None:  # Orbax has barriers of its own
            self._write(step, tree)
        else:
            with self.world.together():
                if self.world.speaks:
                    self._write(step, tree)
        self._unreadable.discard(step)
        if self.world.speaks:
            for old in self.steps()[:-KEEP]:
                shutil.rmtree(self.folder / str(old))

    def restore(self, template: Any) -> tuple[int, Any]:
        """Returns (step, tree) of the last readable checkpoint. Without checkpoints, returns (0, template).

        All processes must call this method. If there are checkpoints and none can be read, it raises `Wrong`. With
        jax.distributed, it raises if the last one that all processes see can't be read: Orbax has barriers of its own,
        so a process that fails in them can't agree with the others on another one.
        """
        step, why = sys.maxsize, ""
        # A process may not yet see the files that another one does, so they agree on each step that they try.
        while step := max(self.world.gather(max((each for each in self.steps() if each < step), default=0))):
            found, why, path = None, "another process can't read it", self.folder / str(step)
            if self.world.all(path.is_dir()):
                try:
                    found = cgx.restore_state(path, template, comm=self.world.comm)
                except Exception as error:  # Orbax and TensorStore raise many types
                    why = _line(error)
                    if self.world.comm is None and jax.process_count() > 1:
                        raise Wrong(
                            f"{path} can't be read ({why}); to continue from the one before, remove it"
                        ) from error
                if self.world.all(found is not None):
                    return step, found
            self._unreadable.add(step)
            self.say(f"the checkpoint of step {step} can't be read ({why}): trying the one before")
        if why:
            raise Wrong(f"{self.folder}: no checkpoint can be read ({why}); to begin anew, remove this folder")
        return 0, template

    def _write(self, step: int, tree: Any) -> None:
        try:
            with ocp.StandardCheckpointer() as checkpointer:
                checkpointer.save(self.folder / str(step), tree, force=True)
        except Exception as error:  # Orbax and the libraries under it raise many types
            raise self._cant_save(step, _line(error)) from error
        finally:
            if self.world.speaks:
                self._remove_halves()

    def _no_space(self, tree: Any) -> str:
        """Returns why the disk has no space for the tree, or "".

        It reserves the space for a moment: on a full disk, Orbax's threads write pages of errors.
        """
        needed = OWN_FILES + sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))
        try:
            self.folder.mkdir(exist_ok=True)
            with tempfile.TemporaryFile(dir=self.folder) as file:
                os.posix_fallocate(file.fileno(), 0, needed)
        except OSError as error:
            return f"{error.strerror} (it has up to {needed:,} bytes)"
        return ""

    def _cant_save(self, step: int, why: str) -> Wrong:
        good = [each for each in self.steps() if each != step]
        last = f"the last good one is that of step {good[-1]}" if good else "there is no other"
        return Wrong(f"{self.folder}: can't save the checkpoint of step {step}: {why}; {last}")

    def _remove_halves(self) -> None:
        for path in self.folder.glob("*.orbax-checkpoint-tmp*"):
            shutil.rmtree(path, ignore_errors=True)


def _line(error: Exception) -> str:
    """Returns the operating system's reason if the error has one, else the first line of the error."""
    text = str(error).strip()
    reason = re.search(r"[^:\n]+(?= \[os_error_code)", text)
    return reason.group().strip() if reason else text.partition("\n")[0][:200]
