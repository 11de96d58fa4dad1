"""ResNet-20 on Fashion-MNIST, for machines without the CIFAR archives."""

from configs.fashion_mnist import mlp
from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    config = mlp.get_config()
    config.data.augment = True
    config.model = ConfigDict(dict(name="resnet", depth=20))
    config.schedule = ConfigDict(dict(name="cosine", rate=0.1, warmup_epochs=1.0))
    config.train.batch_size = 128
    config.train.num_epochs = 30
    return config
