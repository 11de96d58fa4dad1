"""PowerSGD of rank 4, with error feedback."""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    return ConfigDict(dict(kind="plan", codec=dict(name="PowerSGD", rank=4), keep=True))
