"""The configs of the program that the authors of Deep Gradient Compression published, for `train.py --configs`."""

import pathlib
from typing import Any

from ml_collections import ConfigDict

HERE = pathlib.Path(__file__).parent


def as_there(config: ConfigDict, *, rate: float, batch_size: int, num_epochs: int) -> ConfigDict:
    """Sets a batch for each rank, and half a cosine of a rate that is multiplied by the ranks, after 5 epochs."""
    config.schedule = ConfigDict(dict(name="scaled", rate=rate, warmup_epochs=5.0))
    config.train.batch_size, config.train.per_rank, config.train.num_epochs = batch_size, True, num_epochs
    return config


def compress(config: ConfigDict, **changes: Any) -> None:
    """Sets Deep Gradient Compression with changes, or makes them if an earlier config has set it."""
    from configs.compression import dgc

    if isinstance(config.compression, str):
        with config.ignore_type():
            config.compression = ConfigDict(dgc.get_config().to_dict() | {"word": "dgc"})
    for name, value in changes.items():
        config.compression[name] = value
