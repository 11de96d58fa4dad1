"""CGX's 4 bits, rounded stochastically, without error feedback, as CGX's own results have it."""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    return ConfigDict(
        dict(kind="plan", codec=dict(name="MaxMin", bits=4, bucket_size=1024, rounding="stochastic"), feedback=False)
    )
