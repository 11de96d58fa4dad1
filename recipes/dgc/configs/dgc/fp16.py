"""Values travel as float16."""

import dgc
from ml_collections import ConfigDict


def update(config: ConfigDict) -> None:
    dgc.compress(config, values=ConfigDict(dict(name="Cast", dtype="float16")))
