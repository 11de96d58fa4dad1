"""No warm-up."""

import dgc
from ml_collections import ConfigDict


def update(config: ConfigDict) -> None:
    dgc.compress(config, warmup_epochs=0)
