"""compressed_all_to_all: lax.all_to_all that sends a fraction of the bytes."""

from jaxcgx.collectives.arguments import Call
from jaxcgx.exchange import rows
from jaxcgx.exchange.carry import Carry
from jaxcgx.exchange.reduce import check_input
from jaxcgx.exchange.routes import Way
from jaxcgx.plan import Plan
from jaxcgx.plan.leaves import Codecs
from jaxcgx.typing import AxisName, Key, PyTree


def compressed_all_to_all(
    x: PyTree,
    axis_name: AxisName,
    split_axis: int,
    concat_axis: int,
    plan: Codecs | Plan,
    *,
    key: Key | None = None,
    tiled: bool = False,
    backward_plan: Codecs | Plan | None = None,
) -> PyTree:
    """Sends slice r of `x` to rank r, and returns the received slices, like `jax.lax.all_to_all`.

    `x` is cut into slices along `split_axis`. The received slices are joined along `concat_axis`.

    Args:
      x: a pytree of arrays.
      axis_name: one name, or a tuple of names, outermost first; or an MPI communicator, or `jaxcgx.mpi.hierarchy()`.
      split_axis: as in jax.lax.
      concat_axis: as in jax.lax.
      plan: as in `compressed_psum`. With a dict of codecs, slices are exchanged over one axis after another, innermost
        first.
      key: a random key for codecs that round stochastically.
      tiled: as in jax.lax.
      backward_plan: the plan of the transpose, the exchange back; by default `plan`.
    """
    op = "compressed_all_to_all"
    settings = dict(split_axis=split_axis, concat_axis=concat_axis, tiled=tiled)
    call = Call.of(op, x, axis_name, plan, key=key, backward_plan=backward_plan, **settings)
    call.check_rows()
    split, concat = call.per_leaf("split_axis", split_axis), call.per_leaf("concat_axis", concat_axis)
    call.check_divisible("split_axis", split, tiled)
    travel = call.over(Way(rows=True, dims=split, tiled=tiled))
    check_input(call.x, Carry(), travel)
    return rows.all_to_all(call.x, travel, call.key, concat)
