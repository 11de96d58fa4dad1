"""A digest of the values that all ranks of an exchange must share. They compare it before they use any bytes."""

import dataclasses
import hashlib
from typing import Any

import numpy as np


def digest(*what: Any) -> np.int64:
    """Returns a number that differs if any of the values differs. It is the same in every process.

    Values without a plain form, such as functions in a user's codec, count only as their types. Their texts would
    contain addresses, which differ between processes.
    """
    return np.frombuffer(hashlib.sha256(repr(_plain(what)).encode()).digest(), "<i8")[0]


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, np.dtype):
        return value.name
    if isinstance(value, tuple | list):
        return [_plain(each) for each in value]
    if isinstance(value, dict):
        return [[_plain(key), _plain(each)] for key, each in value.items()]
    fields = dataclasses.fields(value) if dataclasses.is_dataclass(value) else ()
    return [type(value).__qualname__, *([field.name, _plain(getattr(value, field.name))] for field in fields)]
