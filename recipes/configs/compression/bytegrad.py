"""Bagua's ByteGrad: 8 bits per element, for all leaves."""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    return ConfigDict(dict(kind="plan", codec=dict(name="ByteGrad"), keep=False, min_size=0, skip_1d=False))
