"""BERT-base that answers questions on texts, with the sizes and the schedule of BERT on SQuAD 1.1, from scratch."""

import pathlib

import configs
from ml_collections import ConfigDict

FOLDER = "data/squad"  # SQuAD, if it is there; else sentences of the documentation of the Python language


def get_config() -> ConfigDict:
    config = configs.get_config()
    folder = FOLDER if pathlib.Path(FOLDER).is_dir() else ""
    config.data = ConfigDict(dict(name="squad", synthetic=False, folder=folder, length=384, tokens=1024))
    config.model = ConfigDict(dict(name="bert", layers=12, width=768, heads=12, dropout=0.1))
    config.optimizer = ConfigDict(dict(name="adamw", b1=0.9, b2=0.999, weight_decay=0.01, clip=1.0))
    config.schedule = ConfigDict(dict(name="cosine", rate=5e-5, warmup_epochs=0.3))
    config.train.batch_size = 32
    config.train.num_epochs = 3
    return config
