"""ImageNet as in "Accurate, Large Minibatch SGD": 90 epochs, with a learning rate of 0.1."""

from ml_collections import ConfigDict

import configs


def get_config() -> ConfigDict:
    config = configs.get_config()
    config.data = ConfigDict(dict(name="imagenet", synthetic=False, folder="data/imagenet", size=224, threads=8))
    config.schedule.warmup_epochs = 5
    config.schedule.drops = (30 / 90, 60 / 90, 80 / 90)
    config.train.batch_size = 256  # for other sizes, set schedule.rate to 0.1 * batch_size / 256
    config.train.num_epochs = 90
    return config
