"""A warm-up of 5 epochs."""

import dgc
from ml_collections import ConfigDict


def update(config: ConfigDict) -> None:
    dgc.compress(config, warmup_epochs=5)
