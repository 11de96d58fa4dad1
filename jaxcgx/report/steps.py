"""The time of a training step, from the time of its computation and of its exchanges. docs/planner.md derives it."""

import math
from collections.abc import Sequence

from jaxcgx.exchange.costs import Time

BACKWARD = 2 / 3  # of the computation: two products of matrices for each one of the forward pass


def step_seconds(compute: float, messages: Sequence[tuple[float, Time]], overlap: bool) -> float:
    """The seconds of a step.

    Args:
      compute: the seconds of the forward and the backward pass.
      messages: of each message the part of the backward pass that makes it, and its time, in the order in which they
        are sent.
      overlap: whether a message is sent while the backward pass goes on. Kernels take turns with it.
    """
    if not overlap:
        return compute + sum(each.total for _, each in messages)
    computed, received = (1 - BACKWARD) * compute, 0.0
    for part, each in messages:
        computed += BACKWARD * compute * part + each.kernels
        received = max(received, computed) + each.wire
    return max(computed, received)


def local_steps(compute: float, exchange: float, every: int, overlap: bool) -> float:
    """The seconds of a step where ranks exchange after `every` steps of their own, as DiLoCo does.

    With `overlap`, the exchange goes on during the next steps, whose number is `every`.
    """
    computed = every * compute
    return (max(computed, exchange) if overlap else computed + exchange) / every


def slowest(compute: float, ranks: int, spread: float) -> float:
    """The computation of the slowest rank, for which all others wait.

    It is the expected largest of normally distributed times. `spread` is their standard deviation over their mean.
    """
    return compute * (1 + spread * math.sqrt(2 * math.log(ranks)))
