"""Gradients that one step computes and the next step applies."""

import dataclasses
import functools
from typing import Any, NamedTuple, NoReturn

import jax

from jaxcgx.checks import wrong
from jaxcgx.optim.halves import Halves


class Pending(NamedTuple):
    """Gradients that a step has computed, and the next step sends: with overlap="priority", a part of the state.

    Attributes:
      gradients: a tree like the trained parameters, `[ranks, *shape]`, sharded over the ranks.
      loss: the loss of these gradients.
    """

    gradients: Any
    loss: jax.Array

    @property
    def per_rank(self) -> dict[str, str]:
        """The fields with arrays per rank, and whether `reshard_state` keeps their sum or their mean over the ranks."""
        return {"gradients": "mean"}

    @property
    def replicated(self) -> tuple[str, ...]:
        """The fields that are trees like the parameters, without a row per rank."""
        return ()


@functools.partial(jax.tree_util.register_dataclass, data_fields=["values", "loss"], meta_fields=["halves"])
@dataclasses.dataclass(frozen=True)
class InFlight:
    """Sums that a step has begun, and the next step ends in the same process, with the state of their exchange."""

    values: list[Any]  # the values between the halves, [ranks, ...], sharded over the ranks
    loss: jax.Array  # the loss of the gradients
    halves: Halves

    @property
    def per_rank(self) -> NoReturn:
        expected, got = "a state whose gradients have arrived", "one whose gradients are on their way"
        raise wrong("reshard_state", "opt_state", expected, got, "call train.finish(params, opt_state) before")


def check_arrived(opt_state: Any) -> None:
    """Refuses a state with pending gradients, which a step without priority would never apply."""
    if any(isinstance(each, Pending | InFlight) for each in opt_state):
        expected, got = (
            "a state whose gradients have arrived",
            'one whose gradients are on their way (overlap="priority")',
        )
        remedy = "call finish(params, opt_state) of the train step that sent them before"
        raise wrong("train.step", "opt_state", expected, got, remedy)
