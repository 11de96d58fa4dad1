"""A training, as a config describes it: data, model, schedule, exchange and step."""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import data
import exchanges
import models
import optimizers
from checks import Wrong, call, check_least
from launch import World

import jaxcgx as cgx


@dataclasses.dataclass(frozen=True, kw_only=True)
class Train:
    """The section `train` of a config. configs/__init__.py says what each key means."""

    batch_size: int
    per_rank: bool
    num_epochs: float
    steps: int
    seed: int
    log_every: int
    test_every: float
    test_examples: int
    save_every: int

    def __post_init__(self) -> None:
        for name in ("batch_size", "num_epochs", "log_every", "test_every", "save_every"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"expected a positive {name}, got {getattr(self, name)}")
        check_least(0, steps=self.steps, seed=self.seed, test_examples=self.test_examples)
        if self.seed >= 2**32:
            raise ValueError(f"expected a seed below 2^32, got {self.seed}")


class Job(NamedTuple):
    """All that a training needs, before its first step."""

    settings: Train
    dataset: data.Dataset
    model: models.Model
    schedule: Any  # from a step to its learning rate
    exchange: exchanges.Exchange
    make_step: Any  # from the argument `exchange` of make_train_step to a TrainStep
    steps_per_epoch: int
    share: slice  # this process's part of a batch
    examples: int  # per step, of all ranks together
    stop: int  # the number of steps

    def sent(self, programs: list[Any], *args: Any) -> dict[str, float]:
        """Returns {"bytes": ..., "raw_bytes": ...}: the bytes a rank sends per step, with and without compression.

        Both are for steps after any warm-up. If not every step runs all programs, "bytes" is the mean over all steps.

        Args:
          programs: the compiled programs of this job's step.
          args: the arguments of the step.
        """
        if self.exchange.settled:
            programs = self.make_step(self.exchange.settled).step.programs(*args)
        first, *others = (cgx.explain(each, show=False) for each in programs)
        sent = first.bytes + sum(each.bytes for each in others) / self.exchange.every
        return dict(bytes=sent, raw_bytes=sum(each.raw_bytes for each in (first, *others)))


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
    if settings.per_rank:
        settings = dataclasses.replace(settings, batch_size=settings.batch_size * world.ranks, per_rank=False)
    dataset = call(data.load, "config.data", **sections["data"])
    model = call(models.make, "config.model", dataset, settings.seed, **sections["model"])
    each = len(dataset.train) // settings.batch_size
    if not each:
        raise Wrong(f"config.train.batch_size: expected at most {len(dataset.train)} examples of {dataset.name}")
    length = optimizers.Length(each, settings.num_epochs, world.ranks)
    schedule = call(optimizers.make_schedule, "config.schedule", length, **sections["schedule"])
    kind = sections["compression"].get("kind", "")
    applies = optimizers.Applied(momentum=exchanges.has_momentum(kind), clip=kind == "dgc")
    optimizer, moved = call(optimizers.make, "config.optimizer", schedule, applies, **sections["optimizer"])
    around = exchanges.Around(moved, each, world.axes)
    exchange = call(exchanges.make, "config.compression", around, **sections["compression"])
    make_step = functools.partial(
        cgx.make_train_step,
        model.loss,
        optimizer,
        world.mesh or world.nodes or world.comm,
        sharding=world.sharding,
        model_state="mean",
    )
    share, examples = world.share(settings.batch_size), settings.batch_size // world.ranks * world.ranks
    stop = _last_step(settings, each, exchange.every)
    return Job(settings, dataset, model, schedule, exchange, make_step, each, share, examples, stop)


def _last_step(settings: Train, each: int, every: int) -> int:
    """Returns the number of steps. The last one ends with an exchange: what ranks learn after it would be lost."""
    epochs = max(int(settings.num_epochs * each), 1)
    steps = min(settings.steps or epochs, epochs)
    if steps < every:
        raise Wrong(f"config.train.steps: expected at least {every}, with exchanges every {every} steps, got {steps}")
    return steps - steps % every
