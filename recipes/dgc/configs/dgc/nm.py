"""Momentum isn't masked."""

import dgc
from ml_collections import ConfigDict


def update(config: ConfigDict) -> None:
    dgc.compress(config, masking=False)
