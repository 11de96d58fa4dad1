"""VGG-16 with batch norm on ImageNet: 90 epochs."""

import dgc
from configs import imagenet
from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    config = imagenet.get_config()
    config.model = ConfigDict(dict(name="vgg16", hidden=4096, dropout=0.5, norm=True))
    config.optimizer.weight_decay, config.optimizer.decay_1d = 5e-5, False
    return dgc.as_there(config, rate=0.0125, batch_size=32, num_epochs=90)
