"""Raw: no compression."""

import dataclasses

import numpy as np

from jaxcgx.codecs.attribute import Kind, native_codec
from jaxcgx.codecs.base import Codec
from jaxcgx.typing import DType


@dataclasses.dataclass(frozen=True)
class Raw(Codec):
    """No compression: every element is sent unchanged."""

    raw = True

    @property
    def native(self) -> dict[str, np.generic]:
        """The attribute that describes the codec to the kernels."""
        return native_codec(Kind.RAW)

    def code_bytes(self, n: int, dtype: DType) -> int:
        return n * dtype.itemsize
