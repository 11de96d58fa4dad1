"""Eden's 4 bits of rotated blocks: unbiased, with an error of its own on each rank."""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    return ConfigDict(dict(kind="plan", codec=dict(name="Eden", bits=4), feedback=False))
