"""optax transformations and training steps."""

from jaxcgx.optim.backward import backward_order
from jaxcgx.optim.bsc import bsc
from jaxcgx.optim.compress import compress_gradients, compressed
from jaxcgx.optim.dgc import dgc
from jaxcgx.optim.gather import gather_state
from jaxcgx.optim.model_state import PerRank
from jaxcgx.optim.mpq import mpq
from jaxcgx.optim.reshard import reshard_state
from jaxcgx.optim.restore import restore_state
from jaxcgx.optim.sharded import shard_specs
from jaxcgx.optim.specs import state_specs
from jaxcgx.optim.state import CompressState
from jaxcgx.optim.telemetry import Telemetry
from jaxcgx.optim.train import TrainStep, make_train_step
from jaxcgx.optim.training import Metrics

__all__ = [
    "CompressState",
    "Metrics",
    "PerRank",
    "Telemetry",
    "TrainStep",
    "backward_order",
    "bsc",
    "compress_gradients",
    "compressed",
    "dgc",
    "gather_state",
    "make_train_step",
    "mpq",
    "reshard_state",
    "restore_state",
    "shard_specs",
    "state_specs",
]
