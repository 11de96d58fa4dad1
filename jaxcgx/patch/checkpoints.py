"""Checkpoints of Orbax that are anchors and patches. This module needs Orbax; `jaxcgx.patch` doesn't import it."""

import dataclasses
import errno
import functools
import os
import pathlib
from typing import Any

import jax
import orbax.checkpoint as ocp

from jaxcgx.checks import unexpected, wrong
from jaxcgx.patch.carriers import Directory
from jaxcgx.patch.publisher import Publisher
from jaxcgx.patch.subscriber import Subscriber
from jaxcgx.patch.trees import leaves_of
from jaxcgx.patch.versions import File, shortest
from jaxcgx.typing import PyTree

SAVE = "checkpoints.Save"
VERSION = "version"  # the name of the file that has the version of a checkpoint
UNLINKED = (errno.EXDEV, errno.EPERM, errno.ENOTSUP)  # what `os.link` says if it can't make a link there


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
    if "://" in str(folder):
        remedy = "mount the bucket, and pass the path of the mount"
        raise wrong("checkpoints.handler", "folder", "a path", repr(folder), remedy)
    return _Handler(pathlib.Path(folder).absolute(), anchor_every)


class _Handler(ocp.CheckpointHandler):
    def __init__(self, folder: pathlib.Path, anchor_every: int) -> None:
        self._folder = folder
        self._begin = functools.partial(Publisher, folder, anchor_every=anchor_every, keep=1)
        self._publisher = self._begin()

    def save(self, directory: Any, args: "Save") -> None:
        leaves_of(SAVE, "item", args.item)
        if jax.process_index() > 0:
            return
        version, files = self._published(args.item)
        if not files:  # another program has removed an older one, so this version begins anew
            self._publisher = self._begin()
            version, files = self._published(args.item)
        try:
            if not files:
                raise FileNotFoundError
            for file in files:
                os.link(self._folder / str(file), pathlib.Path(directory) / str(file))
        except FileNotFoundError:
            expected, remedy = f"the files of version {version} in {self._folder}", "keep other programs from it"
            raise unexpected(SAVE, expected, "none, or a part of them", remedy, kind=RuntimeError) from None
        except OSError as error:
            if error.errno not in UNLINKED:
                raise
            expected = f"a folder on the file system of {directory}, which has hard links"
            raise wrong("checkpoints.handler", "folder", expected, error, "pass another one", kind=OSError) from None
        (pathlib.Path(directory) / VERSION).write_text(str(version))

    def restore(self, directory: Any, args: "Restore") -> PyTree:
        try:
            version = int((pathlib.Path(directory) / VERSION).read_text())
            with Subscriber(directory, args.item, every=None, timeout=0) as subscriber:
                return subscriber.latest(version)
        except (FileNotFoundError, TimeoutError) as error:
            expected, remedy = f"the whole weights in {directory}", "restore another checkpoint"
            raise unexpected("checkpoints.Restore", expected, error, remedy) from None

    def _published(self, tree: PyTree) -> tuple[int, list[File]]:
        """Publishes a tree. Returns its version and the files that lead there, none if one of them is missing."""
        version = self._publisher.publish(jax.device_get(tree))  # the publisher keeps it in host memory
        sizes = File.of(Directory(self._folder).names())
        files = shortest(sizes, next((file.run for file in sizes if file.version == version), ""), 0)
        return version, files if files and files[-1].version == version else []


@ocp.args.register_with_handler(_Handler, for_save=True)
@dataclasses.dataclass
class Save(ocp.args.CheckpointArgs):
    """What a `handler` saves: a tree of arrays that each process has whole. The first process writes it."""

    item: PyTree


@ocp.args.register_with_handler(_Handler, for_restore=True)
@dataclasses.dataclass
class Restore(ocp.args.CheckpointArgs):
    """What a `handler` restores: a tree of arrays or jax.ShapeDtypeStructs, in any sharding, as for a `Subscriber`."""

    item: PyTree
