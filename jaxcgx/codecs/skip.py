"""Skip: a plan's word for leaves that are frozen."""

import dataclasses

from jaxcgx.codecs.base import Codec
from jaxcgx.typing import DTypeLike


@dataclasses.dataclass(frozen=True)
class Skip(Codec):
    """Nothing is sent, and nothing is kept: for leaves that are not trained, in a rule or as the default of a `Plan`.

    The sum or mean of such a leaf is zeros. `make_train_step` leaves such parameters as they are.
    """

    raw = True
    skips = True

    def wire_bytes(self, shape: tuple[int, ...], dtype: DTypeLike) -> int:
        return 0
