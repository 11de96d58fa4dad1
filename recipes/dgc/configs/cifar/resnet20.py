"""ResNet-20 on CIFAR-10: 200 epochs."""

import dgc
from configs import cifar
from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    config = cifar.get_config()
    config.model = ConfigDict(dict(name="resnet", depth=20))
    return dgc.as_there(config, rate=0.1, batch_size=128, num_epochs=200)
