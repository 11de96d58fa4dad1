"""GeoMX's bidirectional sparsification and mixed-precision quantization: they send few elements of large leaves."""

import dataclasses
from typing import Any, ClassVar

from jaxcgx.codecs.base import Codec
from jaxcgx.codecs.cast import Cast
from jaxcgx.codecs.raw import Raw
from jaxcgx.codecs.topk import Sampled
from jaxcgx.plan import Plan
from jaxcgx.plan.plan import sparsification
from jaxcgx.train.sparse import Sparse


@dataclasses.dataclass(frozen=True)
class BSC(Sparse):
    """GeoMX's bidirectional sparsification: every rank sends the largest elements of each large leaf.

    As in `DGC`, elements are compared after momentum, and with the residuals of earlier steps added. Any optimizer may
    follow, but it should have no momentum of its own: optax.adam(rate, b1=0). Over several axes, all elements are
    summed over the inner axes, those inside data centers.

    Args:
      threshold: the fraction of a leaf's elements that is sent, above 0.
      size_bound: leaves of up to `size_bound` elements travel raw.
      momentum: the factor of momentum, as in `Momentum`.
      masking: whether momentum becomes 0 where an element was sent.
      warm_up: a `WarmUp` of the fraction, or None.
      pull: the elements of the sum that ranks get back. "all": every element that any rank sent. "top": only the
        largest elements of the sum; the rank that owns the sum keeps the other elements for the next step.
      select: how the largest elements are found, as in `TopK`.
    The other arguments are those of `Momentum`, and `schedule`, `own`, `leader`, `strict` and `fusion_mb` of a `Plan`.
    """

    threshold: float = 0.01
    size_bound: int = 200_000
    _: dataclasses.KW_ONLY
    pull: str = "all"
    select: str | Sampled = "sampled"
    _tiny: ClassVar[Codec] = Raw()  # of small leaves, over all axes

    def __post_init__(self) -> None:
        self._plan_of(self.threshold, ())  # checks the threshold before the warm-up uses it
        # If every element is always sent, no codec is sparse, and masking would be an error.
        if min(self._shares.values()) == 1:
            object.__setattr__(self, "masking", False)
        super().__post_init__()

    @property
    def _share(self) -> float:
        return self.threshold

    def _plan_of(self, share: float, names: tuple[Any, ...]) -> Plan:
        fields = sparsification(
            self.op, share, self.size_bound, names or None, pull=self.pull, select=self.select, tiny=self._tiny
        )
        return Plan(**fields, **self._fields)


@dataclasses.dataclass(frozen=True)
class MPQ(BSC):
    """GeoMX's mixed-precision quantization: as `BSC`, but small leaves travel as float16, inside data centers too."""

    _tiny: ClassVar[Codec] = Cast("float16")
