"""Raw: no compression. Skip: marks leaves in a plan that are not sent."""

import dataclasses

from jaxcgx.codecs.attribute import Kind
from jaxcgx.codecs.base import Codec
from jaxcgx.typing import DType, DTypeLike


@dataclasses.dataclass(frozen=True)
class Raw(Codec):
    """No compression: every element is sent unchanged."""

    raw = True
    kind = Kind.RAW

    def code_bytes(self, n: int, dtype: DType) -> int:
        return n * dtype.itemsize


@dataclasses.dataclass(frozen=True)
class Skip(Codec):
    """Sends nothing and keeps no residual, for leaves that are not trained.

    It is used in a rule or as the default of a `Plan`. The sum or mean of such a leaf is zeros. `make_train_step`
    doesn't change such parameters.
    """

    raw = True
    skips = True

    def wire_bytes(self, shape: tuple[int, ...], dtype: DTypeLike) -> int:
        return 0
