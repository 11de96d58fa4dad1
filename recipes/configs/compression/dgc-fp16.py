"""Deep Gradient Compression with values that travel as float16."""

from configs.compression import dgc
from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    config = dgc.get_config()
    config["values"] = ConfigDict(dict(name="Cast", dtype="float16"))
    return config
