"""Training steps: how every rank's gradients are found, exchanged and applied.

A step has five rooms: loop.py (jit, donation, the order of the others), division.py (the part of the batch and of the
parameters that a rank has), gradient.py, exchange.py and update.py.
"""

from jaxcgx.train.check_loss import check_loss
from jaxcgx.train.feedback import Feedback, Telemetry
from jaxcgx.train.gradient import backward_order
from jaxcgx.train.loop import make_train_step
from jaxcgx.train.momentum import Momentum
from jaxcgx.train.saved import gather_state, reshard_state, restore_state, state_specs
from jaxcgx.train.sharded import shard_specs
from jaxcgx.train.sparse import BSC, DGC, MPQ, WarmUp
from jaxcgx.train.state import ExchangeState, Metrics, PerRank, Priority, Sharding, TrainState
from jaxcgx.train.transformation import compress_gradients
from jaxcgx.train.value_and_grad import grad, value_and_grad

__all__ = [
    "BSC",
    "DGC",
    "MPQ",
    "ExchangeState",
    "Feedback",
    "Metrics",
    "Momentum",
    "PerRank",
    "Priority",
    "Sharding",
    "Telemetry",
    "TrainState",
    "WarmUp",
    "backward_order",
    "check_loss",
    "compress_gradients",
    "gather_state",
    "grad",
    "make_train_step",
    "reshard_state",
    "restore_state",
    "shard_specs",
    "state_specs",
    "value_and_grad",
]
