"""VGG-16 on ImageNet, as in "Very Deep Convolutional Networks", configuration D: 74 epochs, 3 drops of the rate."""

from ml_collections import ConfigDict

from configs import imagenet


def get_config() -> ConfigDict:
    config = imagenet.get_config()
    config.model = ConfigDict(dict(name="vgg16", hidden=4096, dropout=0.5))
    config.optimizer.weight_decay = 5e-4
    config.schedule.rate = 0.01
    config.schedule.warmup_epochs = 0
    config.schedule.drops = (25 / 74, 50 / 74, 65 / 74)
    config.train.num_epochs = 74
    return config
