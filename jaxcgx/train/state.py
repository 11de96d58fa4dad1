"""The values that travel between the rooms of a step."""

import dataclasses
from typing import NamedTuple

import jax

from jaxcgx.typing import Params, PyTree, Specs



@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ExchangeState:
    """The state of an exchange. `own` has a row for each rank, [ranks, ...]; `shared` is the same on every rank."""

    own: PyTree
    shared: PyTree


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """Everything that training changes. `pending` is None, or gradients that the next step applies (priority)."""

    params: Params
    model_state: PyTree
    opt_state: PyTree
    exchange: PyTree
    pending: PyTree = None

    def replace(self, **changes: PyTree) -> "TrainState":
        return dataclasses.replace(self, **changes)


class Metrics(NamedTuple):
    loss: jax.Array
    aux: PyTree


@dataclasses.dataclass(frozen=True)
class Sharding:
    """How a step divides its arrays over the mesh. None: whole parameters and state; batches along their first dimension."""

    params: Specs = None
    optimizer: Specs = None
    batch: Specs = None
    gather: object = None

