"""A warm-up of 5 epochs in which everything is sent."""

import dgc
from ml_collections import ConfigDict


def update(config: ConfigDict) -> None:
    dgc.compress(config, warmup_epochs=5, warmup_coeff=(1.0,) * 5)
