"""Gradients that a step has found and another one applies."""

import dataclasses
import functools
from typing import Any, NamedTuple, NoReturn

import jax

from jaxcgx.checks import wrong
from jaxcgx.optim.halves import Halves


class Pending(NamedTuple):
    """What a step has found and the next one sends."""

    gradients: Any  # of every rank, like the trained parameters, [ranks, *shape], sharded over the ranks
    loss: jax.Array  # that they are of

    @property
    def per_rank(self) -> dict[str, str]:
        """The fields per rank, and what of each reshard_state preserves over the ranks."""
        return {"gradients": "mean"}

    @property
    def replicated(self) -> tuple[str, ...]:
        """The fields like the parameters."""
        return ()


@functools.partial(jax.tree_util.register_dataclass, data_fields=["values", "loss"], meta_fields=["halves"])
@dataclasses.dataclass(frozen=True)
class InFlight:
    """What a step has sent and the next one receives, in this process. It has the state of the exchange in it."""

    values: list[Any]  # of every rank, [ranks, ...], sharded over the ranks
    loss: jax.Array  # of the gradients
    halves: Halves

    @property
    def per_rank(self) -> NoReturn:
        expected, got = "a state whose gradients have arrived", "one whose gradients are on their way"
        raise wrong("reshard_state", "opt_state", expected, got, "call train.finish(params, opt_state) before")


def check_arrived(opt_state: Any) -> None:
    """Refuses a state with gradients that a step without priority would leave behind."""
    if any(isinstance(each, Pending | InFlight) for each in opt_state):
        expected, got = (
            "a state whose gradients have arrived",
            'one whose gradients are on their way (overlap="priority")',
        )
        remedy = "call finish(params, opt_state) of the train step that sent them before"
        raise wrong("train.step", "opt_state", expected, got, remedy)
