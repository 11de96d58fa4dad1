"""GeoMX's bidirectional sparsification: `compress_gradients` with GeoMX's plan and momentum."""

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
    """Makes GeoMX's bidirectional sparsification: every rank sends the largest elements of each large leaf.

    As in `dgc`, elements are compared after momentum, and with the residuals of earlier steps added. Any optimizer may
    follow, but it should have no momentum of its own: optax.adam(rate, b1=0).

    Args:
      axis_name: the axis of the data centers, or a tuple with this axis outermost. Over the inner axes, all elements
        are summed. Or an MPI communicator, or `jaxcgx.mpi.hierarchy()`, whose nodes are the data centers.
      threshold: the fraction of a leaf's elements that is sent, above 0.
      size_bound: leaves of up to `size_bound` elements travel raw.
      momentum: the factor of momentum, as in `compress_gradients`.
      momentum_masking: whether momentum becomes 0 where an element was sent.
      pull: the elements of the sum that ranks get back. "all": every element that any rank sent. "top": only the
        largest elements of the sum; the rank that owns the sum keeps the other elements for the next step.
      select: how the largest elements are found, as in `TopK`.
      warmup_epochs: the number of epochs in which the fraction decreases to `threshold`, as in `dgc`.
      warmup_coeff: the fraction in each epoch of the warm-up, as in `dgc`.
      steps_per_epoch: the number of steps in an epoch of the warm-up.
      **options: all other options of `compress_gradients`.
    """
    shares = warm_up(threshold, warmup_epochs, coeff=warmup_coeff, steps_per_epoch=steps_per_epoch, function=OP)
    large = dict(size_bound=size_bound, pull=pull, select=select)
    given = dict(momentum=momentum, momentum_masking=momentum_masking, **options)
    return sparsified(bsc, axis_name, shares=shares, large=large, options=given)


def sparsified(
    maker: Any, axis_name: AxisName, *, shares: dict[int, float], large: dict[str, Any], options: dict[str, Any]
) -> "optax.GradientTransformation":
    """Makes a `compress_gradients` that sends the largest elements of large leaves.

    Args:
      maker: the public function, which errors name.
      axis_name: the `axis_name` of that function.
      shares: {first step: the fraction of a leaf's elements that is sent from this step on}.
      large: the other arguments of `sparsification`.
      options: the options of `compress_gradients`.
    """
    function = maker.__name__
    refuse_plan(function, options, "threshold, size_bound, pull and select")
    names = check_ranks(function, axis_name).levels or None
    plans = {
        start: Plan(**sparsification(function, share, axis_name=names, **large)) for start, share in shares.items()
    }
    # If every element is always sent, no codec is sparse, and masking would be an error.
    masking = options["momentum_masking"] if min(shares.values()) < 1 else False
    return compress_with(function, axis_name, plans, maker=maker, **options | dict(momentum_masking=masking))
