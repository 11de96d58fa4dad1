"""GeoMX's bidirectional sparsification: compress_gradients with its plan and momentum."""

from typing import TYPE_CHECKING, Any

from jaxcgx.optim.compress import compress_with
from jaxcgx.optim.dgc import refuse_plan
from jaxcgx.optim.settings import check_ranks
from jaxcgx.plan import Plan
from jaxcgx.plan.sparsification import sparsification

if TYPE_CHECKING:
    import jax
    import optax

OP = "bsc"


def bsc(
    axis_name: Any,
    threshold: float = 0.01,
    size_bound: int = 200_000,
    *,
    momentum: "float | jax.Array" = 0.9,
    momentum_masking: bool = True,
    pull: str = "all",
    select: Any = "sampled",
    **options: Any,
) -> "optax.GradientTransformation":
    """GeoMX's bidirectional sparsification: every rank sends the largest elements of each large leaf.

    The largest are those after momentum and with all that was not sent before, as in `dgc`. The optimizer behind can be
    any, but should have no momentum of its own: optax.adam(rate, b1=0).

    Args:
      axis_name: the axis of the data centers, or a tuple in which it is the outermost. The inner axes sum everything.
        Or an MPI communicator, or `jaxcgx.mpi.hierarchy()`, whose nodes are the data centers.
      threshold: the share of a leaf's elements that is sent, above 0.
      size_bound: leaves of up to `size_bound` elements travel raw.
      momentum: the factor of momentum, as in `compress_gradients`.
      momentum_masking: momentum becomes 0 where an element was sent.
      pull: what comes back: "all" elements that any rank sent, or the "top" of the sum; its owner keeps the rest.
      select: as in `TopK`.
      **options: all other options of `compress_gradients`.
    """
    refuse_plan(OP, options, "threshold, size_bound, pull and select")
    names = check_ranks(OP, axis_name).levels or None
    plan = Plan(**sparsification(OP, threshold, size_bound, axis_name=names, pull=pull, select=select))
    return compress_with(OP, axis_name, plan, momentum=momentum, momentum_masking=momentum_masking, **options)
