"""ResNet-50 on ImageNet."""

from ml_collections import ConfigDict

from configs import imagenet


def get_config() -> ConfigDict:
    config = imagenet.get_config()
    config.model = ConfigDict(dict(name="resnet50"))
    config.optimizer.nesterov = True
    config.optimizer.decay_1d = False
    return config
