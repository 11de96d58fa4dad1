"""compressed_psum, compressed_pmean: lax.psum and lax.pmean that send a fraction of the bytes."""

import jax
import jax.numpy as jnp

from jaxcgx.collectives.arguments import Call, check_summable
from jaxcgx.exchange.carry import Carry
from jaxcgx.exchange.reduce import check_input, reduce
from jaxcgx.exchange.routes import Routes, Way
from jaxcgx.plan import Plan
from jaxcgx.plan.by_axis import Codecs
from jaxcgx.plan.phases import check_plan
from jaxcgx.typing import AxisName, Key, PyTree


def compressed_psum(
    x: PyTree, axis_name: AxisName, plan: Codecs | Plan, *, key: Key | None = None, carry: Carry | None = None
) -> PyTree:
    """Returns the sum of `x` over a named axis, like `jax.lax.psum`, but sends compressed bytes.

    Every rank gets the same bits. For derivatives, the function counts as lax.psum (straight-through).

    Args:
      x: a pytree of arrays. Leaves of float32, bfloat16 and float16 are compressed. Other leaves go through lax.psum,
        or are an error with a strict plan.
      axis_name: one name, or a tuple of names, outermost first; or an MPI communicator, or `jaxcgx.mpi.hierarchy()`.
      plan: a codec, a dict or a `Plan`. A codec is for one exchange over all axes together. A dict has a codec per
        axis, such as `{"node": MaxMin(4), "local": Raw()}`. It sums over the inner axes by reduce-scatter, sums each
        shard over the outermost axis by a compressed exchange, and gathers the shards over the inner axes. A `Plan`
        gives each leaf its codec or dict, and says how messages travel. `Plan.every(codec, schedule="ring")` is a
        codec with options.
      key: a random key for codecs that round stochastically. It must be the same on every rank, and different in every
        step.
      carry: what earlier calls kept, a `Carry`. The result is then a pair, the sum and the new carry. Each of its trees
        is like `x`, or None. None in place of a leaf means that the leaf keeps nothing. `init_carry` makes the first.
        `residuals` are the compression errors of earlier calls, which this call adds to `x` (error feedback). Summed
        over all ranks, sum + new residuals = x + residuals. With own="encoded", the error of encoding the sum is not
        kept. In a hierarchy, the errors of the inner axes are not kept.
        `momentum` is this rank's momentum, for the momentum masking of Deep Gradient Compression. For leaves with
        sparse codecs (`TopK`), the array comes back with 0 where an element of this rank was sent. It needs residuals.
        `factors` are what `PowerSGD` starts from, the same on every rank. Without them, every call restarts from the
        same guess and approximates worse.
    """
    return _reduce("compressed_psum", x, axis_name, plan, key=key, carry=carry, mean=False)


def compressed_pmean(
    x: PyTree, axis_name: AxisName, plan: Codecs | Plan, *, key: Key | None = None, carry: Carry | None = None
) -> PyTree:
    """Returns the mean of `x` over a named axis, like `jax.lax.pmean`, but sends compressed bytes.

    The sum is divided in float32 before its last encoding.

    Args:
      x: a pytree of arrays.
      axis_name: one name, or a tuple of names, outermost first; or an MPI communicator, or `jaxcgx.mpi.hierarchy()`.
      plan: a codec, {axis name: codec} or a `Plan`.
      key: a random key, as in `compressed_psum`.
      carry: what earlier calls kept, as in `compressed_psum`. Summed over all ranks, ranks * mean + new residuals =
        x + residuals.
    """
    return _reduce("compressed_pmean", x, axis_name, plan, key=key, carry=carry, mean=True)


def _reduce(
    op: str, x: PyTree, axis_name: AxisName, plan: Codecs | Plan, key: Key | None, carry: Carry | None, *, mean: bool
) -> PyTree:
    check_summable(op, x)
    call, given = Call.of(op, x, axis_name, plan, key=key, carry=carry), carry or Carry()
    check_input(call.x, given, call.over(Way(mean=mean)))
    travel = call.over(Way(mean=mean, fed=call.routes.feeds_raw(given.residuals)))
    total, kept = reduce(call.x, given, travel, call.key)
    return total if carry is None else (total, kept)


def init_carry(plan: Codecs | Plan, x: PyTree, *, residuals: bool = True, momentum: bool = False) -> Carry:
    """Returns the `carry` of a first call: zeros, and None for leaves that keep nothing.

    Args:
      plan: the codec, {axis name: codec} or `Plan` of the call.
      x: a pytree of arrays or jax.ShapeDtypeStruct.
      residuals: whether compression errors are kept.
      momentum: whether leaves have momentum.
    """
    op = "init_carry"
    shapes = Routes.of(op, check_plan(op, plan), x).carry(residuals=residuals, momentum=momentum)
    return jax.tree_util.tree_map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
