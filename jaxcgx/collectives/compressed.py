"""The collectives of jax.lax, which here send a fraction of the bytes."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jaxcgx.checks import check_choice
from jaxcgx.collectives.arguments import Call, as_pairs, check_summable
from jaxcgx.exchange import rows
from jaxcgx.exchange.message import Carry
from jaxcgx.exchange.reduce import reduce
from jaxcgx.exchange.routes import Routes, Way
from jaxcgx.plan import Plan
from jaxcgx.plan.leaves import Codecs
from jaxcgx.plan.plan import as_plan
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
      x, axis_name, plan, key: as in `compressed_psum`.
      carry: what earlier calls kept, as in `compressed_psum`. Summed over all ranks, ranks * mean + new residuals =
        x + residuals.
    """
    return _reduce("compressed_pmean", x, axis_name, plan, key=key, carry=carry, mean=True)


def _reduce(
    op: str, x: PyTree, axis_name: AxisName, plan: Codecs | Plan, key: Key | None, carry: Carry | None, *, mean: bool
) -> PyTree:
    check_summable(op, x)
    return _sum(Call.of(op, x, axis_name, plan, key=key, carry=carry), Way(mean=mean), carry)


def _sum(call: Call, way: Way, carry: Carry | None) -> PyTree:
    """Returns the sums or, if the caller has a carry, the sums and the new carry."""
    total, kept = reduce(call.x, carry or Carry(), call.travel(way, carry), call.key)
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
    shapes = Routes.of(op, as_plan(op, plan), x).carry(residuals=residuals, momentum=momentum)
    return jax.tree_util.tree_map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)


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
      scatter_dimension, tiled: as in jax.lax. The dimension may be a tree like `x` with one for each leaf.
      backward_plan: the plan of the transpose, a `compressed_all_gather`; by default `plan`.
    """
    op = "compressed_psum_scatter"
    check_summable(op, x)
    settings = dict(carry=carry, scatter_dimension=scatter_dimension, tiled=tiled)
    call = Call.of(op, x, axis_name, plan, key=key, backward_plan=backward_plan, **settings)
    call.check_rows()
    dims = call.per_leaf("scatter_dimension", scatter_dimension)
    call.check_divisible("scatter_dimension", dims, tiled)
    return _sum(call, Way(mean=False, dims=dims, tiled=tiled), carry)


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
      axis, tiled, to: as in jax.lax. `axis` may be a tree like `x` with one for each leaf.
      backward_plan: the plan of the transpose, a `compressed_psum_scatter`; by default `plan`.
    """
    op = "compressed_all_gather"
    call = Call.of(op, x, axis_name, plan, key=key, backward_plan=backward_plan, axis=axis, tiled=tiled)
    call.check_rows()
    check_choice(op, "to", to, ("varying", "invarying"))
    dims = call.per_leaf("axis", axis, extra=0 if tiled else 1)
    return rows.gather(call.x, call.travel(Way(rows=True, dims=dims, tiled=tiled)), call.key, to=to)


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
      split_axis, concat_axis, tiled: as in jax.lax.
      plan: as in `compressed_psum`. With a dict of codecs, slices are exchanged over one axis after another, innermost
        first.
      key: a random key for codecs that round stochastically.
      backward_plan: the plan of the transpose, the exchange back; by default `plan`.
    """
    op = "compressed_all_to_all"
    settings = dict(split_axis=split_axis, concat_axis=concat_axis, tiled=tiled)
    call = Call.of(op, x, axis_name, plan, key=key, backward_plan=backward_plan, **settings)
    call.check_rows()
    split, concat = call.per_leaf("split_axis", split_axis), call.per_leaf("concat_axis", concat_axis)
    call.check_divisible("split_axis", split, tiled)
    return rows.all_to_all(call.x, call.travel(Way(rows=True, dims=split, tiled=tiled)), call.key, concat)


def compressed_ppermute(
    x: PyTree,
    axis_name: AxisName,
    perm: Sequence[tuple[int, int]],
    plan: Codecs | Plan,
    *,
    key: Key | None = None,
    backward_plan: Codecs | Plan | None = None,
) -> PyTree:
    """Sends `x` from rank to rank, like `jax.lax.ppermute`: along a pipeline, or around a ring.

    A rank to which no rank sends gets zeros. A rank that sends to itself gets what a receiver would get.

    Args:
      x: a pytree of arrays.
      axis_name: one name, or a tuple of names, outermost first; or an MPI communicator, or `jaxcgx.mpi.hierarchy()`.
        The ranks of several axes are numbered in the order of the names.
      perm: pairs (sender, receiver). No rank is the sender, or the receiver, of two pairs.
      plan: as in `compressed_psum`, with one codec over all axes together.
      key: a random key for codecs that round stochastically.
      backward_plan: the plan of the transpose, which sends cotangents from receivers to senders; by default `plan`.
    """
    op = "compressed_ppermute"
    call = Call.of(op, x, axis_name, plan, key=key, backward_plan=backward_plan, perm=perm)
    call.check_rows(by_axis=False)
    return rows.permute(call.x, call.travel(Way(rows=True)), call.key, as_pairs(op, perm, call.net.size))
