"""A small network on scikit-learn's handwritten digits: a first run, which takes a minute."""

import configs
from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    config = configs.get_config()
    config.data = ConfigDict(dict(name="digits", synthetic=False))
    config.model = ConfigDict(dict(name="mlp", hidden=(256, 64)))
    config.schedule = ConfigDict(dict(name="cosine", rate=0.05, warmup_epochs=0.0))
    config.train.batch_size = 64
    config.train.num_epochs = 60
    config.train.test_every = 5
    return config
