"""ResNet-20 on CIFAR-10."""

from ml_collections import ConfigDict

from configs import cifar


def get_config() -> ConfigDict:
    config = cifar.get_config()
    config.model = ConfigDict(dict(name="resnet", depth=20))
    return config
