"""What CGX's environment variables say, as in CGX. Without variables, gradients travel with all their bits."""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    return ConfigDict(dict(kind="cgx"))
