"""GeoMX's FP16: all leaves travel as float16."""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    return ConfigDict(
        dict(
            kind="plan", codec=dict(name="Cast", dtype="float16"), keep=False, min_size=0, skip_1d=False, prefer="bytes"
        )
    )
