"""A training, as a config describes it: data, model, schedule, exchange and step."""

import dataclasses
import functools
from typing import Any, NamedTuple

import data
import exchanges
import models
import optimizers
from checks import Wrong, call
from launch import World

import jaxcgx as cgx


@dataclasses.dataclass(frozen=True, kw_only=True)
class Train:
    """The section `train` of a config. configs/__init__.py says what each key means."""

    batch_size: int
    num_epochs: float
    steps: int
    seed: int
    log_every: int
    test_every: float
    test_examples: int
    save_every: int

    def __post_init__(self) -> None:
        for name in ("batch_size", "num_epochs", "log_every", "test_every", "save_every"):
            if getattr(self, name) <= 0:
                raise ValueError(f"expected a positive {name}, got {getattr(self, name)}")
        for name in ("steps", "seed", "test_examples"):
            if getattr(self, name) < 0:
                raise ValueError(f"expected a {name} of at least 0, got {getattr(self, name)}")


class Job(NamedTuple):
    """All that a training needs, before its first step."""

    settings: Train
    dataset: data.Dataset
    model: models.Model
    schedule: Any  # from a step to its learning rate
    exchange: exchanges.Exchange
    make_step: Any  # from the options of an exchange to a training step
    steps_per_epoch: int
    share: slice  # this process's part of a batch
    examples: int  # per step, of all ranks together

    @property
    def stop(self) -> int:
        """The number of steps."""
        epochs = max(int(self.settings.num_epochs * self.steps_per_epoch), 1)
        return min(self.settings.steps or epochs, epochs)

    def sent(self, compiled: Any, args: tuple[Any, ...]) -> dict[str, float]:
        """Returns {"bytes": ..., "raw_bytes": ...}: the bytes a rank sends per step, with and without compression.

        Both are for steps after any warm-up. If not every step exchanges, "bytes" is the mean over all steps.

        Args:
          compiled: the compiled step of this job.
          args: its arguments.
        """
        settled = self.exchange.settled
        step = self.make_step(**settled).step.lower(*args) if settled else compiled
        found = cgx.explain(step, show=False)
        return dict(bytes=found.bytes / self.exchange.every, raw_bytes=found.raw_bytes)


def check_same(content: dict[str, int], world: World) -> None:
    """Raises `Wrong` in all processes if they have different data, of which each would train on wrong shares."""
    found = world.gather([*content.values()])
    with world.together():
        for number, values in enumerate(found):
            for key, first, other in zip(content, found[0], values):
                if first != other:
                    raise Wrong(
                        f"config.data: process 0 has other data than process {number}: {key} is {first} and {other}; "
                        "all hosts need the same files"
                    )


def prepare(config: Any, world: World) -> Job:
    """Returns the job of a config for the ranks of `world`."""
    sections = {name: section.to_dict() for name, section in config.items()}
    settings = call(Train, "config.train", **sections["train"])
    dataset = data.load(**sections["data"])
    model = models.make(dataset, settings.seed, **sections["model"])
    each = len(dataset.train) // settings.batch_size
    if not each:
        raise Wrong(f"config.train.batch_size: expected at most {len(dataset.train)} examples of {dataset.name}")
    schedule = optimizers.make_schedule(each, settings.num_epochs, **sections["schedule"])
    kind = sections["compression"]["kind"]
    optimizer, moved = optimizers.make(
        schedule, exchanges.has_momentum(kind), clips=kind == "dgc", **sections["optimizer"]
    )
    exchange = exchanges.make(exchanges.Around(optimizer, moved, each), **sections["compression"])
    make_step = functools.partial(
        cgx.make_train_step, model.loss, optimizer, world.mesh, data_axis=world.data_axis, model_state="mean"
    )
    share, examples = world.share(settings.batch_size), settings.batch_size // world.ranks * world.ranks
    return Job(settings, dataset, model, schedule, exchange, make_step, each, share, examples)
