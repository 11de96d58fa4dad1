"""No compression: gradients travel with all their bits."""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    return ConfigDict(dict(kind="plan", codec=dict(name="Raw"), keep=False))
