"""Checkpoints of Orbax that are anchors and patches. This module needs Orbax; `jaxcgx.patch` doesn't import it."""

import dataclasses
import os
import pathlib
from typing import Any

import jax
import orbax.checkpoint as ocp

from jaxcgx.checks import unexpected
from jaxcgx.patch.carriers import Directory
from jaxcgx.patch.publisher import Publisher
from jaxcgx.patch.subscriber import Subscriber
from jaxcgx.patch.versions import File, shortest
from jaxcgx.typing import PyTree


def handler(folder: str | os.PathLike[str], *, anchor_every: int = 100) -> ocp.CheckpointHandler:
    """Makes a handler for Orbax's `CheckpointManager`, which saves weights as patches.

        handler = checkpoints.handler("/runs/7/patches")
        with ocp.CheckpointManager("/runs/7/checkpoints", item_handlers=handler) as manager:
            manager.save(step, args=checkpoints.Save(weights))
            weights = manager.restore(step, args=checkpoints.Restore(weights))

    A checkpoint has hard links to an anchor and to the patches that lead from there to its weights. So each of them can
    be restored, and the last one that needs a file frees its space. The first checkpoint of a handler is an anchor.

    Args:
      folder: a folder for the files that the next checkpoint may need, on the file system of the checkpoints. The file
        system must have hard links.
      anchor_every: the number of checkpoints from one anchor to the next.
    """
    return _Handler(pathlib.Path(folder).absolute(), anchor_every)


class _Handler(ocp.CheckpointHandler):
    def __init__(self, folder: pathlib.Path, anchor_every: int) -> None:
        self._folder = folder
        self._publisher = Publisher(folder, anchor_every=anchor_every, keep=1)

    def save(self, directory: Any, args: "Save") -> None:
        if jax.process_index() > 0:
            return
        self._publisher.publish(args.item)
        sizes = File.of(Directory(self._folder).names())
        for file in shortest(sizes, max(sizes).run, 0):
            os.link(self._folder / str(file), pathlib.Path(directory) / str(file))

    def restore(self, directory: Any, args: "Restore") -> PyTree:
        newest = max((file.version for file in File.of(Directory(directory).names())), default=1)
        with Subscriber(directory, args.item, every=None, timeout=0) as subscriber:
            try:
                return subscriber.latest(newest)
            except TimeoutError as error:
                expected, remedy = f"the whole weights in {directory}", "restore another checkpoint"
                raise unexpected("checkpoints.Restore", expected, error, remedy) from None


@ocp.args.register_with_handler(_Handler, for_save=True)
@dataclasses.dataclass
class Save(ocp.args.CheckpointArgs):
    """What a `handler` saves: a tree of arrays that the first process has whole."""

    item: PyTree


@ocp.args.register_with_handler(_Handler, for_restore=True)
@dataclasses.dataclass
class Restore(ocp.args.CheckpointArgs):
    """What a `handler` restores: a tree of arrays or jax.ShapeDtypeStructs, in any sharding, as for a `Subscriber`."""

    item: PyTree
