"""GeoMX's bidirectional sparsification: leaves above `size_bound` elements send 1 % of their elements."""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    return ConfigDict(dict(kind="bsc", threshold=0.01, size_bound=10_000, warmup_epochs=0))
