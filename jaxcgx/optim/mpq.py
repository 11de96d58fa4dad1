"""GeoMX's mixed-precision quantization: compress_gradients with its plan, and the momentum of its sparsification."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jaxcgx.codecs.cast import Cast
from jaxcgx.optim.bsc import sparsified
from jaxcgx.optim.warmup import warm_up
from jaxcgx.typing import AxisName

if TYPE_CHECKING:
    import jax
    import optax

OP = "mpq"


def mpq(
    axis_name: AxisName,
    threshold: float = 0.01,
    size_bound: int = 200_000,
    *,
    momentum: "float | jax.Array" = 0.9,
    momentum_masking: bool = True,
    pull: str = "all",
    select: Any = "sampled",
    warmup_epochs: int = 0,
    warmup_coeff: float | Sequence[float] | None = None,
    steps_per_epoch: int | None = None,
    **options: Any,
) -> "optax.GradientTransformation":
    """GeoMX's mixed-precision quantization: the largest elements of each large leaf, and the others as float16.

    Between data centers, every rank sends the largest elements of each large leaf. Small leaves travel as float16
    everywhere. The largest are those after momentum and with all that was not sent before, as in `dgc`. Any optimizer
    may follow, but it should have no momentum of its own: optax.adam(rate, b1=0).

    Args:
      axis_name: the axis of the data centers, or a tuple in which it is the outermost. The inner axes sum everything.
        Or an MPI communicator, or `jaxcgx.mpi.hierarchy()`, whose nodes are the data centers.
      threshold: the share of a leaf's elements that is sent, above 0.
      size_bound: leaves of up to `size_bound` elements travel as float16, inside data centers too.
      momentum: the factor of momentum, as in `compress_gradients`.
      momentum_masking: momentum becomes 0 where an element was sent.
      pull: what comes back: "all" elements that any rank sent, or the "top" of the sum; its owner keeps the rest.
      select: as in `TopK`.
      warmup_epochs: the number of epochs in which the share comes down to `threshold`, as in `dgc`.
      warmup_coeff: the share in each of these epochs, as in `dgc`.
      steps_per_epoch: the number of steps in an epoch of the warm-up.
      **options: all other options of `compress_gradients`.
    """
    shares = warm_up(threshold, warmup_epochs, coeff=warmup_coeff, steps_per_epoch=steps_per_epoch, function=OP)
    large = dict(size_bound=size_bound, pull=pull, select=select, tiny=Cast("float16"))
    given = dict(momentum=momentum, momentum_masking=momentum_masking, **options)
    return sparsified(OP, axis_name, shares=shares, large=large, options=given)
