"""A small network on Fashion-MNIST."""

import configs
from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    config = configs.get_config()
    config.data = ConfigDict(
        dict(name="fashion_mnist", synthetic=False, folder="/usr/share/datasets/fashion-mnist", augment=False)
    )
    config.model = ConfigDict(dict(name="mlp", hidden=(256, 128)))
    config.schedule = ConfigDict(dict(name="cosine", rate=0.05, warmup_epochs=0.0))
    config.train.batch_size = 64
    config.train.num_epochs = 10
    return config
