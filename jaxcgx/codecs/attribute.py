"""The attribute `codec` of every native operation, which describes a codec to the kernels.

The fields are listed here and in xla_ffi/codec/fields.h. A handler refuses an attribute whose fields have other names
or types.
"""

import enum
from collections.abc import Mapping
from typing import Any

import numpy as np


class Kind(enum.IntEnum):
    """The codec that the kernels run, as Kind in xla_ffi/codec/base.h."""

    RAW = 0
    MAXMIN = 1
    BYTEGRAD = 2
    ABSMAX = 3
    FLOAT8 = 4
    CAST = 5
    SIGN = 6
    TOPK = 7
    EDEN = 8
    MICRO = 9
    LOSSLESS = 10


# {name: type on the FFI boundary}. Flags and enumerations are int32 there.
DENSE: dict[str, type[np.generic]] = dict(
    kind=np.int32,
    bits=np.int32,
    bucket_size=np.int64,
    stochastic=np.int32,
    skip_incomplete=np.int32,
    compatible=np.int32,
    rotate=np.int32,
)
_SPARSE: dict[str, type[np.generic]] = dict(
    ratio=np.float64,
    lists=np.int64,
    top=np.int32,
    select=np.int32,
    share=np.float64,
    lower=np.float64,
    refinements=np.int32,
)
# Those of a sparse codec have the fields of the codec of its values, too.
FIELDS: dict[str, type[np.generic]] = DENSE | _SPARSE | {f"values_{name}": dtype for name, dtype in DENSE.items()}


def attribute(fields: Mapping[str, Any]) -> dict[str, np.generic]:
    return {name: dtype(fields.get(name, 0)) for name, dtype in FIELDS.items()}
