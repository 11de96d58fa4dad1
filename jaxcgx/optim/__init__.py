"""optax transformations and training steps."""
from jaxcgx.optim.compress import CompressState, compress_gradients, compressed
from jaxcgx.optim.state import reshard_state, state_specs
from jaxcgx.optim.telemetry import Telemetry

__all__ = ["CompressState", "Telemetry", "compress_gradients", "compressed", "reshard_state", "state_specs"]
