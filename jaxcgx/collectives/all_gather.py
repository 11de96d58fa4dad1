"""compressed_all_gather: lax.all_gather that sends a fraction of the bytes."""

from jaxcgx.checks import check_choice
from jaxcgx.collectives.arguments import Call
from jaxcgx.exchange import rows
from jaxcgx.exchange.carry import Carry
from jaxcgx.exchange.reduce import check_input
from jaxcgx.exchange.routes import Way
from jaxcgx.plan import Plan
from jaxcgx.plan.leaves import Codecs
from jaxcgx.typing import AxisName, Key, PyTree


def compressed_all_gather(
    x: PyTree,
    axis_name: AxisName,
    plan: Codecs | Plan,
    *,
    key: Key | None = None,
    axis: PyTree = 0,
    tiled: bool = False,
    to: str = "varying",
    backward_plan: Codecs | Plan | None = None,
) -> PyTree:
    """Returns every rank's `x`, like `jax.lax.all_gather`.

    Each rank also decodes its own bytes, so all ranks get the same arrays.

    Args:
      x: a pytree of arrays.
      axis_name: one name, or a tuple of names, outermost first; or an MPI communicator, or `jaxcgx.mpi.hierarchy()`.
      plan: as in `compressed_psum`. With a dict of codecs, ranks gather over the outermost axis first. There, each
        inner rank gathers a share.
      key: a random key for codecs that round stochastically.
      axis: as in jax.lax; or a tree like `x` with an axis for each leaf.
      tiled: as in jax.lax.
      to: as in jax.lax, "varying" or "invarying".
      backward_plan: the plan of the transpose, a `compressed_psum_scatter`; by default `plan`.
    """
    op = "compressed_all_gather"
    call = Call.of(op, x, axis_name, plan, key=key, backward_plan=backward_plan, axis=axis, tiled=tiled)
    call.check_rows()
    check_choice(op, "to", to, ("varying", "invarying"))
    dims = call.per_leaf("axis", axis, extra=0 if tiled else 1)
    travel = call.over(Way(rows=True, dims=dims, tiled=tiled))
    check_input(call.x, Carry(), travel)
    return rows.gather(call.x, travel, call.key, to=to)
