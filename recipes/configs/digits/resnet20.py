"""ResNet-20 on scikit-learn's handwritten digits: few and small images, for a run of minutes on a CPU."""

from configs.digits import mlp
from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    config = mlp.get_config()
    config.model = ConfigDict(dict(name="resnet", depth=20))
    config.schedule = ConfigDict(dict(name="cosine", rate=0.1, warmup_epochs=1.0))
    config.train.num_epochs = 30
    return config
