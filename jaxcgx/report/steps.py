"""Predicts the time of a training step from its computation and its exchanges. docs/planner.md has the formulas."""

import math
from collections.abc import Sequence

from jaxcgx.exchange.costs import Time

BACKWARD = 2 / 3  # the fraction of the computation; it has two matrix products for each one of the forward pass


def step_seconds(compute: float, messages: Sequence[tuple[float, Time]], overlap: bool) -> float:
    """Returns the seconds of a step.

    Args:
      compute: the seconds of the forward and the backward pass.
      messages: (the fraction of the backward pass that computes it, its time) of each message, in the order in which
        messages are sent.
      overlap: whether messages are sent during the backward pass. Kernels still take turns with the backward pass.
    """
    if not overlap:
        return compute + sum(each.total for _, each in messages)
    computed, received = (1 - BACKWARD) * compute, 0.0
    for part, each in messages:
        ready = computed + BACKWARD * compute * part
        received = max(received + each.wire, ready + each.total)
        computed = ready + each.kernels
    return max(computed, received)


def local_steps(compute: float, exchange: float, every: int, overlap: bool) -> float:
    """Returns the seconds of a step if ranks exchange once after `every` local steps, as with DiLoCo.

    With `overlap`, the exchange continues during the next `every` steps.
    """
    computed = every * compute
    return (max(computed, exchange) if overlap else computed + exchange) / every


def slowest(compute: float, ranks: int, spread: float) -> float:
    """Returns the time of the slowest rank's computation, for which all other ranks wait.

    It is about the expected maximum of normally distributed times. `spread` is their standard deviation divided by
    their mean.
    """
    return compute * (1 + spread * math.sqrt(2 * math.log(ranks)))
