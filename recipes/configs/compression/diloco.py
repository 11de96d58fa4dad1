"""DiLoCo: every rank trains on its own, and all ranks exchange 4-bit outer gradients every 50 steps."""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    return ConfigDict(dict(kind="diloco", every=50, outer="sgd", codec=dict(name="MaxMin", bits=4, bucket_size=512)))
