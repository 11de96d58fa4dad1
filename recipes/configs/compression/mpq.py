"""GeoMX's mixed-precision quantization: 1 % of leaves above `size_bound` elements, others as float16."""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    return ConfigDict(dict(kind="mpq", threshold=0.01, size_bound=10_000, warmup_epochs=0))
