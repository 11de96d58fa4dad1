"""compressed_psum_scatter: lax.psum_scatter that sends a fraction of the bytes."""

from jaxcgx.collectives.arguments import Call, check_summable
from jaxcgx.exchange.carry import Carry
from jaxcgx.exchange.reduce import check_input, reduce
from jaxcgx.exchange.routes import Way
from jaxcgx.plan import Plan
from jaxcgx.plan.leaves import Codecs
from jaxcgx.typing import AxisName, Key, PyTree


def compressed_psum_scatter(
    x: PyTree,
    axis_name: AxisName,
    plan: Codecs | Plan,
    *,
    key: Key | None = None,
    carry: Carry | None = None,
    scatter_dimension: PyTree = 0,
    tiled: bool = False,
    backward_plan: Codecs | Plan | None = None,
) -> PyTree:
    """Returns this rank's slice of the sum of `x` over a named axis, like `jax.lax.psum_scatter`.

    Args:
      x: a pytree of arrays.
      axis_name: one name, or a tuple of names, outermost first; or an MPI communicator, or `jaxcgx.mpi.hierarchy()`.
      plan: as in `compressed_psum`. With a dict of codecs, ranks scatter over the innermost axis first, so only a
        share travels over each of the other axes. Every slice goes straight to its owner, except with the schedule
        "ring".
      key: a random key for codecs that round stochastically.
      carry: error feedback, as in `compressed_psum`: a `Carry` with residuals like `x`. The result is then a pair, the
        slices and the new carry. Summed over all ranks, slices + new residuals = x + residuals. The schedule must not
        be "ring", and there must be one codec over all axes together.
      scatter_dimension: as in jax.lax; or a tree like `x` with a dimension for each leaf.
      tiled: as in jax.lax.
      backward_plan: the plan of the transpose, a `compressed_all_gather`; by default `plan`.
    """
    op = "compressed_psum_scatter"
    check_summable(op, x)
    settings = dict(carry=carry, scatter_dimension=scatter_dimension, tiled=tiled)
    call, given = Call.of(op, x, axis_name, plan, key=key, backward_plan=backward_plan, **settings), carry or Carry()
    call.check_rows()
    dims = call.per_leaf("scatter_dimension", scatter_dimension)
    call.check_divisible("scatter_dimension", dims, tiled)
    travel = call.over(Way(mean=False, dims=dims, tiled=tiled))
    check_input(call.x, given, travel)
    slices, kept = reduce(call.x, given, travel, call.key)
    return slices if carry is None else (slices, kept)
