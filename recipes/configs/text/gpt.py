"""A transformer on the bytes of text, with GPT-2's initialization and GPT-3's optimizer."""

import configs
from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    config = configs.get_config()
    # files="": the documentation of the Python language, which comes with Python. tokens=256: each byte is a token.
    config.data = ConfigDict(dict(name="text", synthetic=False, files="", context=128, tokens=256))
    config.model = ConfigDict(dict(name="gpt", layers=4, width=256, heads=4, dropout=0.1))
    config.optimizer = ConfigDict(dict(name="adamw", b1=0.9, b2=0.95, weight_decay=0.1, clip=1.0))
    config.schedule = ConfigDict(dict(name="cosine", rate=1e-3, warmup_epochs=0.5))
    config.train.batch_size = 32
    config.train.num_epochs = 10
    return config
