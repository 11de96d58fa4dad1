"""Transformer-XL with the sizes and the optimizer of its base model on WikiText-103."""

import pathlib

import configs
from ml_collections import ConfigDict

FILES = "data/wikitext-103/wiki.train.tokens"  # if it is there; else the documentation of the Python language


def get_config() -> ConfigDict:
    config = configs.get_config()
    files = FILES if pathlib.Path(FILES).is_file() else ""
    # A window of the text has two segments: the second one sees the first one.
    config.data = ConfigDict(dict(name="text", synthetic=False, files=files, context=300, tokens=1024))
    config.model = ConfigDict(
        dict(name="transformer_xl", layers=16, width=410, heads=10, inner=2100, segment=150, dropout=0.1)
    )
    config.optimizer = ConfigDict(dict(name="adamw", b1=0.9, b2=0.999, weight_decay=0.0, clip=0.25))
    config.schedule = ConfigDict(dict(name="cosine", rate=2.5e-4, warmup_epochs=0.0))
    config.train.batch_size = 60
    config.train.num_epochs = 10
    return config
