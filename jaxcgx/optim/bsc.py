"""GeoMX's bidirectional sparsification: compress_gradients with its plan and momentum."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jaxcgx.optim.compress import compress_with
from jaxcgx.optim.dgc import refuse_plan
from jaxcgx.optim.settings import check_ranks
from jaxcgx.optim.warmup import warm_up
from jaxcgx.plan import Plan
from jaxcgx.plan.sparsification import sparsification
from jaxcgx.typing import AxisName

if TYPE_CHECKING:
    import jax
    import optax

OP = "bsc"


def bsc(
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
    """GeoMX's bidirectional sparsification: every rank sends the largest elements of each large leaf.

    The largest are those after momentum and with all that was not sent before, as in `dgc`. Any optimizer may follow,
    but it should have no momentum of its own: optax.adam(rate, b1=0).

    Args:
      axis_name: the axis of the data centers, or a tuple in which it is the outermost. The inner axes sum everything.
        Or an MPI communicator, or `jaxcgx.mpi.hierarchy()`, whose nodes are the data centers.
      threshold: the share of a leaf's elements that is sent, above 0.
      size_bound: leaves of up to `size_bound` elements travel raw.
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
    large = dict(size_bound=size_bound, pull=pull, select=select)
    given = dict(momentum=momentum, momentum_masking=momentum_masking, **options)
    return sparsified(OP, axis_name, shares=shares, large=large, options=given)


def sparsified(
    function: str, axis_name: AxisName, *, shares: dict[int, float], large: dict[str, Any], options: dict[str, Any]
) -> "optax.GradientTransformation":
    """`compress_gradients` of large leaves' largest elements, for the public function `function`.

    Args:
      function: its name, which errors have.
      axis_name: its axis.
      shares: of a leaf's elements, by the step from which on they are sent.
      large: what `sparsification` is told besides.
      options: those of `compress_gradients`.
    """
    refuse_plan(function, options, "threshold, size_bound, pull and select")
    names = check_ranks(function, axis_name).levels or None
    plans = {
        start: Plan(**sparsification(function, share, axis_name=names, **large)) for start, share in shares.items()
    }
    masking = options["momentum_masking"] if min(shares.values()) < 1 else False
    return compress_with(function, axis_name, plans, **options | dict(momentum_masking=masking))
