"""Optimizers and the schedules of their rates."""

from typing import Any

import jax
import optax
from checks import call, choose


def make(
    schedule: Any, moves: bool, clips: bool, *, name: str, clip: float, **section: Any
) -> tuple[Any, dict[str, Any]]:
    """The optimizer of a config's section `optimizer`, and the options that the exchange of gradients gets instead.

    Args:
      schedule: of the rate.
      moves: whether the exchange has the momentum.
      clips: whether the exchange clips.
      name: one of `OPTIMIZERS`.
      clip: the largest norm of the mean gradient; 0: any.
      **section: the options of the optimizer.
    """
    function = choose(OPTIMIZERS, name, "config.optimizer.name")
    optimizer, moved = call(function, "config.optimizer", schedule, moves, **section)
    if clip and clips:
        moved["clip_global_norm"] = clip
    elif clip:
        optimizer = optax.chain(optax.clip_by_global_norm(clip), optimizer)
    return optimizer, moved


def sgd(
    schedule: Any, moves: bool, *, momentum: float, nesterov: bool, weight_decay: float, decay_1d: bool
) -> tuple[Any, dict[str, Any]]:
    """SGD with momentum, and weight decay as part of the gradient. decay_1d: of biases and norms, too."""
    mask = None if decay_1d else matrices
    if not moves:
        decay = optax.add_decayed_weights(weight_decay, mask)
        return optax.chain(decay, optax.sgd(schedule, momentum, nesterov)), {}
    moved = dict(momentum=momentum, nesterov=nesterov)
    if weight_decay:
        moved |= dict(weight_decay=weight_decay, weight_decay_mask=mask)
    return optax.sgd(schedule), moved


def adamw(schedule: Any, moves: bool, *, b1: float, b2: float, weight_decay: float) -> tuple[Any, dict[str, Any]]:
    """Adam with weight decay of matrices. Where the exchange has the momentum, Adam has none."""
    optimizer = optax.adamw(schedule, 0.0 if moves else b1, b2, weight_decay=weight_decay, mask=matrices)
    return optimizer, dict(momentum=b1) if moves else {}


def matrices(params: Any) -> Any:
    """Which parameters are neither biases nor of norms."""
    return jax.tree.map(lambda x: x.ndim > 1, params)


def make_schedule(each: int, num_epochs: float, *, name: str, **section: Any) -> Any:
    """The schedule of a config's section `schedule`.

    Args:
      each: steps of an epoch.
      num_epochs: of the training.
      name: one of `SCHEDULES`.
      **section: the options of the schedule.
    """
    return call(choose(SCHEDULES, name, "config.schedule.name"), "config.schedule", each, num_epochs, **section)


def steps(
    each: int, num_epochs: float, *, rate: float, warmup_epochs: float, drops: tuple[float, ...], factor: float
) -> Any:
    """`rate`, multiplied by `factor` after each of `drops`, shares of the training, behind a linear warm-up from 0."""
    lower = optax.piecewise_constant_schedule(rate, {round(drop * num_epochs * each): factor for drop in drops})
    warm = int(warmup_epochs * each)
    return lambda step: lower(step) * jax.numpy.minimum(1.0, (step + 1) / max(warm, 1))


def cosine(each: int, num_epochs: float, *, rate: float, warmup_epochs: float) -> Any:
    """Half a cosine from `rate` to 0, behind a linear warm-up from 0."""
    warm, last = int(warmup_epochs * each), int(num_epochs * each)
    return optax.warmup_cosine_decay_schedule(0.0 if warm else rate, rate, warm, max(last, warm + 1))


OPTIMIZERS = {"adamw": adamw, "sgd": sgd}
SCHEDULES = {"cosine": cosine, "steps": steps}
