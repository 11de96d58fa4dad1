"""python full_probe.py CLASS ARGUMENTS: runs recipes/train.py on a disk that is full when a checkpoint is saved.

From then on, no file can have more than a few bytes. CLASS says whose method `save` finds the disk full: "Checkpoints",
or Orbax's "PyTreeCheckpointHandler" if other programs fill the disk while Orbax writes.
"""

import os
import pathlib
import resource
import sys

os.environ.pop("JAX_COMPILATION_CACHE_DIR", None)  # the folder that tests use is on the full disk, too
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "recipes"))

import orbax.checkpoint as ocp
import train


def full(*args, **kwargs):
    resource.setrlimit(resource.RLIMIT_FSIZE, (256, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    return save(*args, **kwargs)


place = {each.__name__: each for each in (train.Checkpoints, ocp.PyTreeCheckpointHandler)}[sys.argv[1]]
save, place.save = place.save, full
train.main(sys.argv[2:])
