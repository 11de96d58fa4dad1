"""Eden: 4 bits per element of rotated blocks, unbiased, with independent errors on different ranks."""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    return ConfigDict(dict(kind="plan", codec=dict(name="Eden", bits=4), keep=False))
