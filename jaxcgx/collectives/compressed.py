"""The collectives of jax.lax, which here send a fraction of the bytes."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jaxcgx.checks import MOST, as_array, as_whole, check_choice, check_flag, check_integer, spell_array, wrong
from jaxcgx.collectives.arguments import Call, as_pairs, check_summable, shared_key
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


def init_carry(
    plan: Codecs | Plan, x: PyTree, *, residuals: bool = True, momentum: bool = False, ends: bool = False
) -> Carry:
    """Returns the `carry` of a first call: zeros, and None for leaves that keep nothing.

    Args:
      plan: the codec, {axis name: codec} or `Plan` of the call.
      x: a pytree of arrays or jax.ShapeDtypeStruct.
      residuals: whether compression errors are kept.
      momentum: whether leaves have momentum.
      ends: whether leaves have `sent` and `received`, for `compressed_ppermute`. It has no residuals.
    """
    op = "init_carry"
    shapes = Routes.of(op, as_plan(op, plan), x).carry(residuals=residuals and not ends, momentum=momentum, ends=ends)
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)


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
      x, axis_name, key: as in `compressed_psum`.
      plan: as in `compressed_psum`. With a dict of codecs, ranks scatter over the innermost axis first, so only a
        part is sent over each of the other axes. Every slice goes straight to its owner, except with the schedule
        "ring".
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
    as_parts: bool = False,
    backward_plan: Codecs | Plan | None = None,
) -> PyTree:
    """Returns every rank's `x`, like `jax.lax.all_gather`.

    Each rank also decodes its own bytes, so all ranks get the same arrays.

    Args:
      x, axis_name, key: as in `compressed_psum`.
      plan: as in `compressed_psum`. With a dict of codecs, ranks gather over the outermost axis first. There, each
        inner rank gathers a part.
      axis, tiled, to: as in jax.lax. `axis` may be a tree like `x` with one for each leaf.
      as_parts: whether compressed leaves are returned as `Quantized`: the numbers and scales that were sent, with
        `dequantize()`. It is for `Float8`, `Micro` and `AbsMax`, and leaves whose last dimension has whole blocks.
      backward_plan: the plan of the transpose, a `compressed_psum_scatter`; by default `plan`.
    """
    op = "compressed_all_gather"
    settings = dict(axis=axis, tiled=tiled, as_parts=as_parts)
    call = Call.of(op, x, axis_name, plan, key=key, backward_plan=backward_plan, **settings)
    call.check_rows()
    check_choice(op, "to", to, ("varying", "invarying"))
    dims = call.per_leaf("axis", axis, extra=0 if tiled else 1)
    if check_flag(op, "as_parts", as_parts):
        call.check_parts("axis", dims, tiled)
    return rows.gather(call.x, call.travel(Way(rows=True, dims=dims, tiled=tiled)), call.key, to=to, as_parts=as_parts)


def compressed_all_to_all(
    x: PyTree,
    axis_name: AxisName,
    split_axis: int,
    concat_axis: int,
    plan: Codecs | Plan,
    *,
    key: Key | None = None,
    tiled: bool = False,
    as_parts: bool = False,
    backward_plan: Codecs | Plan | None = None,
) -> PyTree:
    """Sends slice r of `x` to rank r, and returns the received slices, like `jax.lax.all_to_all`.

    `x` is cut into slices along `split_axis`. The received slices are joined along `concat_axis`.

    Args:
      x, axis_name, key: as in `compressed_psum`.
      split_axis, concat_axis, tiled: as in jax.lax.
      plan: as in `compressed_psum`. With a dict of codecs, slices are exchanged over one axis after another, innermost
        first.
      as_parts: as in `compressed_all_gather`. The last dimension of a slice must have whole blocks.
      backward_plan: the plan of the transpose, the exchange back; by default `plan`.
    """
    op = "compressed_all_to_all"
    settings = dict(split_axis=split_axis, concat_axis=concat_axis, tiled=tiled, as_parts=as_parts)
    call = Call.of(op, x, axis_name, plan, key=key, backward_plan=backward_plan, **settings)
    call.check_rows()
    split, concat = call.per_leaf("split_axis", split_axis), call.per_leaf("concat_axis", concat_axis)
    call.check_divisible("split_axis", split, tiled)
    if check_flag(op, "as_parts", as_parts):
        call.check_parts("concat_axis", concat, tiled, split=split)
    travel = call.travel(Way(rows=True, dims=split, tiled=tiled))
    return rows.all_to_all(call.x, travel, call.key, concat, as_parts=as_parts)


def compressed_pbroadcast(
    x: PyTree,
    axis_name: AxisName,
    source: int,
    plan: Codecs | Plan,
    *,
    key: Key | None = None,
    to: str = "varying",
    backward_plan: Codecs | Plan | None = None,
) -> PyTree:
    """Returns the `x` of one rank on all ranks, like `jax.lax.pbroadcast`: parameters, or a checkpoint.

    All ranks get the same bits. The source also gets what its bytes decode to.

    Args:
      x, axis_name, key: as in `compressed_psum`.
      source: the rank whose `x` is sent. The ranks of several axes are numbered in the order of the names.
      plan: as in `compressed_psum`, with one codec over all axes together.
      to: as in `jax.lax.all_gather`. With "invarying", the result has the type of a value that all ranks share.
      backward_plan: the plan of the transpose, which sums the cotangents of all ranks on the source; by default `plan`.
    """
    op = "compressed_pbroadcast"
    check_summable(op, x)
    call = Call.of(op, x, axis_name, plan, key=key, backward_plan=backward_plan, source=source)
    call.check_rows(by_axis=False)
    check_choice(op, "to", to, ("varying", "invarying"))
    source = check_integer(op, "source", source, 0, call.net.size - 1)
    return rows.broadcast(call.x, call.travel(Way(rows=True, join=True)), call.key, source, to=to)


def compressed_ppermute(
    x: PyTree,
    axis_name: AxisName,
    perm: Sequence[tuple[int, int]],
    plan: Codecs | Plan,
    *,
    key: Key | None = None,
    carry: Carry | None = None,
    backward_plan: Codecs | Plan | None = None,
) -> PyTree:
    """Sends `x` from rank to rank, like `jax.lax.ppermute`: along a pipeline, or around a ring.

    A rank to which no rank sends gets zeros. A rank that sends to itself gets what a receiver would get.

    Args:
      x, axis_name, key: as in `compressed_psum`. The ranks of several axes are numbered in the order of the names.
      perm: pairs (sender, receiver). No rank is the sender, or the receiver, of two pairs.
      plan: as in `compressed_psum`, with one codec over all axes together.
      carry: what earlier calls sent and received, a `Carry` with `sent` and `received`, which differ from rank to rank.
        Then only the difference to `sent` is compressed, so the error shrinks with this difference. The result is a
        pair, what arrived and the new carry. `init_carry(plan, x, ends=True)` makes the first. Both are constants in
        derivatives, and cotangents are sent whole.
      backward_plan: the plan of the transpose, which sends cotangents from receivers to senders; by default `plan`.
    """
    op = "compressed_ppermute"
    call = Call.of(op, x, axis_name, plan, key=key, backward_plan=backward_plan, carry=carry, perm=perm)
    call.check_rows(by_axis=False)
    pairs = as_pairs(op, perm, call.net.size)
    moved, kept = rows.permute(call.x, carry or Carry(), call.travel(Way(rows=True), carry), call.key, pairs=pairs)
    return moved if carry is None else (moved, kept)


def compressed_ragged_all_to_all(
    operand: jax.Array,
    output: jax.Array,
    input_offsets: jax.Array,
    send_sizes: jax.Array,
    output_offsets: jax.Array,
    recv_sizes: jax.Array,
    *,
    axis_name: AxisName,
    plan: Codecs | Plan,
    key: Key | None = None,
    capacity: int | None = None,
    backward_plan: Codecs | Plan | None = None,
) -> jax.Array:
    """Sends slices of different sizes from all ranks to all ranks, like `jax.lax.ragged_all_to_all`: to experts.

    It also runs where lax has no such collective, as on CPUs, because it is a `compressed_all_to_all` of `capacity`
    rows for each rank. Unused rows travel as zeros.

    Args:
      operand, output, input_offsets, send_sizes, output_offsets, recv_sizes, axis_name: as in jax.lax. `axis_name` may
        also be a tuple of names, or a communicator.
      plan: as in `compressed_all_to_all`.
      key: a random key for codecs that round stochastically.
      capacity: the most rows that a rank sends to another one. The default, all rows of `operand`, sends that many rows
        to every rank. If there are more, the whole result of the receiver is NaN. Integers have no NaN, so they need
        the default or more.
      backward_plan: the plan of the transpose, the exchange back; by default `plan`.
    """
    op = "compressed_ragged_all_to_all"
    call = Call.of(op, (), axis_name, plan, key=None, backward_plan=backward_plan, capacity=capacity)
    operand, output = as_whole(op, "operand", (), operand), as_array(op, "output", output)
    if not operand.ndim or not output.ndim or (operand.shape[1:], operand.dtype) != (output.shape[1:], output.dtype):
        raise wrong(op, "output", f"rows like those of {spell_array(operand)}", spell_array(output))
    starts, sizes = call.as_slices("input_offsets", input_offsets), call.as_slices("send_sizes", send_sizes)
    theirs, arriving = call.as_slices("output_offsets", output_offsets), call.as_slices("recv_sizes", recv_sizes)
    most = max(len(operand), 1)
    capacity = most if capacity is None else check_integer(op, "capacity", capacity, 1, MOST)
    has_nan = jnp.issubdtype(operand.dtype, jnp.inexact)
    if not has_nan and capacity < most:
        expected = f"at least {most}, because {operand.dtype} has no NaN that shows a lost row"
        raise wrong(op, "capacity", expected, capacity)
    dense = rows.take(operand, rows.places(starts, sizes, capacity), 0)
    routes, backward = (Routes.of(op, each.plan, dense) for each in (call.routes, call.backward))
    call = call._replace(x=dense, routes=routes, backward=backward, key=shared_key(routes, backward, key, call.net))
    call.check_rows()
    travel = call.travel(Way(rows=True, dims=(0,), tiled=False), argument="operand")
    arrived = rows.all_to_all(dense, travel, call.key, (0,))
    here = rows.places(call.net.plain_all_to_all(theirs, 0, 0, tiled=False), arriving, capacity).reshape(-1)
    source = jnp.full(len(output), rows.NO_ROW).at[here].set(jnp.arange(here.size), mode="drop")
    result = rows.take(arrived.reshape(here.size, *output.shape[1:]), source, output)
    return jnp.where((arriving.sum(1) <= capacity).all(), result, jnp.nan) if has_nan else result
