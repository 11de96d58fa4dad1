"""ResNet-18 on ImageNet: 90 epochs."""

import dgc
from configs import imagenet
from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    config = imagenet.get_config()
    config.model = ConfigDict(dict(name="resnet18"))
    config.optimizer.weight_decay, config.optimizer.decay_1d = 5e-5, False
    config.optimizer.nesterov = True
    return dgc.as_there(config, rate=0.0125, batch_size=32, num_epochs=90)
