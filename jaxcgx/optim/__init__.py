"""optax transformations and training steps."""

from jaxcgx.optim.compress import CompressState, compress_gradients, compressed
from jaxcgx.optim.dgc import bsc, dgc
from jaxcgx.optim.state import reshard_state, state_specs
from jaxcgx.optim.telemetry import Telemetry
from jaxcgx.optim.train import Metrics, TrainStep, make_train_step

__all__ = [
    "CompressState",
    "Metrics",
    "Telemetry",
    "TrainStep",
    "bsc",
    "compress_gradients",
    "compressed",
    "dgc",
    "make_train_step",
    "reshard_state",
    "state_specs",
]
