"""CIFAR-10 as in "Deep Residual Learning for Image Recognition", section 4.2: about 64,000 steps of 128 images."""

from ml_collections import ConfigDict

import configs


def get_config() -> ConfigDict:
    config = configs.get_config()
    config.data = ConfigDict(dict(name="cifar10", synthetic=False, folder="data", augment=True))
    config.schedule.drops = (0.5, 0.75)  # after about 32,000 and 48,000 steps
    config.train.num_epochs = 164
    return config
