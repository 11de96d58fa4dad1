"""CGX's 4 bits per element, with stochastic rounding and without error feedback, as in CGX's results."""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    return ConfigDict(
        dict(kind="plan", codec=dict(name="MaxMin", bits=4, bucket_size=1024, rounding="stochastic"), keep=False)
    )
