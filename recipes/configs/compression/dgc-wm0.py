"""Deep Gradient Compression without a warm-up."""

from configs.compression import dgc
from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    config = dgc.get_config()
    config.warmup_epochs = 0
    return config
