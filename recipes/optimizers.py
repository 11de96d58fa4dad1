"""Optimizers and the schedules of their learning rates."""

from typing import Any, NamedTuple

import jax
import optax
from checks import call, check_least, check_shares, choose


class Applied(NamedTuple):
    """What the exchange of gradients applies in place of the optimizer."""

    momentum: bool
    clip: bool


class Moved(NamedTuple):
    """The fields of `jaxcgx.DGC` and other exchanges with momentum that they apply in place of the optimizer."""

    momentum: float = 0.9
    nesterov: bool = False
    weight_decay: float | None = None
    weight_decay_mask: Any = None
    clip_global_norm: float | None = None  # of DGC alone


def make(schedule: Any, applied: Applied, *, name: str, clip: float, **section: Any) -> tuple[Any, Moved | None]:
    """Returns (optimizer, what the exchange applies in its place) for a config's section `optimizer`.

    Args:
      schedule: the schedule of the learning rate.
      applied: what the exchange applies.
      name: one of `OPTIMIZERS`.
      clip: the largest norm of the mean gradient; 0: no clipping.
      **section: the options of the optimizer.
    """
    check_least(0, clip=clip)
    function = choose(OPTIMIZERS, name, "config.optimizer.name")
    optimizer, moved = call(function, "config.optimizer", schedule, applied.momentum, **section)
    if clip and applied.clip:
        moved = moved._replace(clip_global_norm=clip)
    elif clip:
        optimizer = optax.chain(optax.clip_by_global_norm(clip), optimizer)
    return optimizer, moved


def sgd(
    schedule: Any, moves: bool, *, momentum: float, nesterov: bool, weight_decay: float, decay_1d: bool
) -> tuple[Any, Moved | None]:
    """Returns (SGD with momentum, what the exchange applies). Weight decay is a part of the gradient.

    decay_1d: whether biases and norms have weight decay, too.
    """
    check_shares(momentum=momentum)
    check_least(0, weight_decay=weight_decay)
    mask = None if decay_1d else matrices
    if not moves:
        decay = optax.add_decayed_weights(weight_decay, mask)
        return optax.chain(decay, optax.sgd(schedule, momentum, nesterov)), None
    moved = Moved(momentum, nesterov)
    if weight_decay:
        moved = moved._replace(weight_decay=weight_decay, weight_decay_mask=mask)
    return optax.sgd(schedule), moved


def adamw(schedule: Any, moves: bool, *, b1: float, b2: float, weight_decay: float) -> tuple[Any, Moved | None]:
    """Returns (Adam, what the exchange applies). Only matrices decay. If the exchange has momentum, Adam has none."""
    check_shares(b1=b1, b2=b2)
    check_least(0, weight_decay=weight_decay)
    optimizer = optax.adamw(schedule, 0.0 if moves else b1, b2, weight_decay=weight_decay, mask=matrices)
    return optimizer, Moved(momentum=b1) if moves else None


def matrices(params: Any) -> Any:
    """Returns a mask that is False for the parameters of biases and norms."""
    return jax.tree.map(lambda x: x.ndim > 1, params)


class Length(NamedTuple):
    """What schedules depend on."""

    each: int  # steps in an epoch
    num_epochs: float  # of the training
    ranks: int


def make_schedule(length: Length, *, name: str, **section: Any) -> Any:
    """Returns the schedule of a config's section `schedule`.

    Args:
      length: the length of the training.
      name: one of `SCHEDULES`.
      **section: the options of the schedule.
    """
    return call(choose(SCHEDULES, name, "config.schedule.name"), "config.schedule", length, **section)


def steps(length: Length, *, rate: float, warmup_epochs: float, drops: tuple[float, ...], factor: float) -> Any:
    """Returns the schedule that multiplies `rate` by `factor` after each of `drops`, after a linear warm-up from 0.

    drops: fractions of the training.
    """
    each, num_epochs, _ = length
    check_least(0, rate=rate, warmup_epochs=warmup_epochs, factor=factor)
    if len(set(drops)) < len(drops) or not all(0 < drop < 1 for drop in drops):
        raise ValueError(f"expected different numbers between 0 and 1 as drops, got {drops}")
    lower = optax.piecewise_constant_schedule(rate, {round(drop * num_epochs * each): factor for drop in drops})
    warm = int(warmup_epochs * each)
    return lambda step: lower(step) * jax.numpy.minimum(1.0, (step + 1) / max(warm, 1))


def cosine(length: Length, *, rate: float, warmup_epochs: float, first: float = 0.0) -> Any:
    """Returns the schedule of half a cosine from `rate` to 0, after a linear warm-up from the rate `first`."""
    check_least(0, rate=rate, warmup_epochs=warmup_epochs, first=first)
    warm, last = int(warmup_epochs * length.each), int(length.num_epochs * length.each)
    return optax.warmup_cosine_decay_schedule(first if warm else rate, rate, warm, max(last, warm + 1))


def scaled(length: Length, *, rate: float, warmup_epochs: float) -> Any:
    """Returns the schedule of half a cosine from `rate` times the ranks to 0, after a linear warm-up from `rate`."""
    return cosine(length, rate=rate * length.ranks, warmup_epochs=warmup_epochs, first=rate)


OPTIMIZERS = {"adamw": adamw, "sgd": sgd}
SCHEDULES = {"cosine": cosine, "scaled": scaled, "steps": steps}
