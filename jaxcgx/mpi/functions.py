"""The collectives of `jaxcgx` over an MPI communicator, whose ranks are processes."""

from collections.abc import Mapping
from typing import Any, Literal

import jax
from jax.core import Tracer

from jaxcgx.checks import check_choice, check_flag, wrong
from jaxcgx.codecs.checks import check_codec
from jaxcgx.collectives import old_all_gather as all_gather
from jaxcgx.collectives import old_all_to_all as all_to_all
from jaxcgx.collectives import old_psum as psum
from jaxcgx.collectives import old_psum_scatter as psum_scatter
from jaxcgx.collectives.old_arguments import Dimension, Dimensions, Options
from jaxcgx.collectives.state import State
from jaxcgx.exchange import scopes
from jaxcgx.mpi import ranks
from jaxcgx.mpi.agreement import agree, describe
from jaxcgx.mpi.greeting import greet
from jaxcgx.mpi.nodes import check_communicator
from jaxcgx.mpi.waiting import Communicator, check_ready
from jaxcgx.plan import Plan
from jaxcgx.plan.by_axis import Codecs
from jaxcgx.plan.overlay import Overlay
from jaxcgx.transports.mpi import Net


def compressed_allreduce(
    x: Any,
    codec: Codecs | Plan,
    comm: Communicator | Net | None = None,
    *,
    key: Any = None,
    op: Literal["sum", "mean"] = "sum",
    residuals: Any = None,
    momentum: Any = None,
    factors: Any = None,
    schedule: str | Overlay | dict[str, Any] = "auto",
    own: Literal["raw", "encoded"] = "raw",
    leader: bool = False,
    strict: bool = False,
    fusion_mb: float | None = None,
    check: bool = False,
) -> Any:
    """Returns the sum of `x` over the ranks, or the mean with op="mean", like `compressed_psum` and `compressed_pmean`.

    Args:
      x: a pytree of this rank's arrays.
      codec: a codec, a `Plan`, or, with a hierarchy, {"cross": codec, "inner": codec}.
      comm: the ranks, see `jaxcgx.mpi`.
      key: a random key, the same on every rank. Codecs that round stochastically need one.
      op: "sum" or "mean".
      residuals: the compression errors of earlier calls, which this call adds to `x` (error feedback).
      momentum: arrays that are set to 0 where an element is sent, as in Deep Gradient Compression.
      factors: the factors that `PowerSGD` starts from.
      schedule: "two_shot", "one_shot", "ring", "tree", an `Overlay` or "auto"; with a hierarchy, also a dict.
      own: how a rank adds its own part to the sum that it owns: "raw" or "encoded".
      leader: with a hierarchy, whether only the first rank of each node takes part in the exchange between nodes.
      strict: whether a leaf that can't be compressed is an error. Otherwise it is sent uncompressed.
      fusion_mb: the largest message in MiB, 64 by default.
      check: whether the ranks' arguments are also compared when the call is traced, see `jaxcgx.mpi`.
    """
    name = "compressed_allreduce"
    net = _check_ranks(
        name,
        comm,
        check,
        dict(x=x, key=key, residuals=residuals, momentum=momentum, factors=factors),
        codec=codec,
        op=op,
        schedule=schedule,
        own=own,
        leader=leader,
        strict=strict,
        fusion_mb=fusion_mb,
    )
    check_choice(name, "op", op, ("sum", "mean"))
    options = Options(key=key, schedule=schedule, own=own, leader=leader, strict=strict, fusion_mb=fusion_mb)
    state = State(residuals=residuals, momentum=momentum, factors=factors)
    return psum.reduce(name, x, net=net, codec=codec, options=options, state=state, mean=op == "mean")


def compressed_reduce_scatter(
    x: Any,
    codec: Codecs | Plan,
    comm: Communicator | Net | None = None,
    *,
    key: Any = None,
    scatter_dimension: int = 0,
    tiled: bool = False,
    schedule: str | dict[str, str] = "auto",
    own: Literal["raw", "encoded"] = "raw",
    backward_codec: Codecs | None = None,
    strict: bool = False,
    fusion_mb: float | None = None,
    check: bool = False,
) -> Any:
    """Returns this rank's slice of the sum of `x` over the ranks, like `compressed_psum_scatter`.

    Args:
      x: a pytree of this rank's arrays.
      codec: a codec, a `Plan`, or, with a hierarchy, {"cross": codec, "inner": codec}.
      comm: the ranks, see `jaxcgx.mpi`.
      key: a random key, the same on every rank. Codecs that round stochastically need one.
      scatter_dimension: the dimension that is cut into slices.
      tiled: as in jax.lax.
      schedule: "one_shot", "ring" or "auto".
      own: how a rank adds its own part to the sum that it owns: "raw" or "encoded".
      backward_codec: the codec of the transpose, an all-gather; by default the same codec.
      strict: whether a leaf that can't be compressed is an error. Otherwise it is sent uncompressed.
      fusion_mb: the largest message in MiB, 64 by default.
      check: whether the ranks' arguments are also compared when the call is traced, see `jaxcgx.mpi`.
    """
    name = "compressed_reduce_scatter"
    net = _check_ranks(
        name,
        comm,
        check,
        dict(x=x, key=key),
        codec=codec,
        scatter_dimension=scatter_dimension,
        tiled=tiled,
        schedule=schedule,
        own=own,
        backward_codec=backward_codec,
        strict=strict,
        fusion_mb=fusion_mb,
    )
    options = Options(
        key=key, schedule=schedule, own=own, strict=strict, fusion_mb=fusion_mb, backward_codec=backward_codec
    )
    return psum_scatter.Scatter(
        name, x, net=net, codec=codec, options=options, dimension=Dimension(scatter_dimension, tiled)
    ).run()


def compressed_allgather(
    x: Any,
    codec: Codecs | Plan,
    comm: Communicator | Net | None = None,
    *,
    key: Any = None,
    axis: int = 0,
    tiled: bool = False,
    backward_codec: Codecs | None = None,
    strict: bool = False,
    fusion_mb: float | None = None,
    check: bool = False,
) -> Any:
    """Returns every rank's `x`, like `compressed_all_gather`.

    Args:
      x: a pytree of this rank's arrays.
      codec: a codec, a `Plan`, or, with a hierarchy, {"cross": codec, "inner": codec}.
      comm: the ranks, see `jaxcgx.mpi`.
      key: a random key, the same on every rank. Codecs that round stochastically need one.
      axis: the dimension of the ranks in the result.
      tiled: as in jax.lax.
      backward_codec: the codec of the transpose, a reduce-scatter; by default the same codec.
      strict: whether a leaf that can't be compressed is an error. Otherwise it is sent uncompressed.
      fusion_mb: the largest message in MiB, 64 by default.
      check: whether the ranks' arguments are also compared when the call is traced, see `jaxcgx.mpi`.
    """
    name = "compressed_allgather"
    net = _check_ranks(
        name,
        comm,
        check,
        dict(x=x, key=key),
        codec=codec,
        axis=axis,
        tiled=tiled,
        backward_codec=backward_codec,
        strict=strict,
        fusion_mb=fusion_mb,
    )
    options = Options(key=key, strict=strict, fusion_mb=fusion_mb, backward_codec=backward_codec)
    return all_gather.gather(name, x, net=net, codec=codec, options=options, dimension=Dimension(axis, tiled))


def compressed_alltoall(
    x: Any,
    codec: Codecs | Plan,
    comm: Communicator | Net | None = None,
    *,
    key: Any = None,
    split_axis: int = 0,
    concat_axis: int = 0,
    tiled: bool = False,
    backward_codec: Codecs | None = None,
    strict: bool = False,
    fusion_mb: float | None = None,
    check: bool = False,
) -> Any:
    """Sends slice r of `x` to rank r, and returns the received slices, like `compressed_all_to_all`.

    Args:
      x: a pytree of this rank's arrays.
      codec: a codec, a `Plan`, or, with a hierarchy, {"cross": codec, "inner": codec}.
      comm: the ranks, see `jaxcgx.mpi`.
      key: a random key, the same on every rank. Codecs that round stochastically need one.
      split_axis: the dimension that is cut into slices.
      concat_axis: the dimension along which the received slices are joined.
      tiled: as in jax.lax.
      backward_codec: the codec of the transpose, the exchange back; by default the same codec.
      strict: whether a leaf that can't be compressed is an error. Otherwise it is sent uncompressed.
      fusion_mb: the largest message in MiB, 64 by default.
      check: whether the ranks' arguments are also compared when the call is traced, see `jaxcgx.mpi`.
    """
    name = "compressed_alltoall"
    net = _check_ranks(
        name,
        comm,
        check,
        dict(x=x, key=key),
        codec=codec,
        split_axis=split_axis,
        concat_axis=concat_axis,
        tiled=tiled,
        backward_codec=backward_codec,
        strict=strict,
        fusion_mb=fusion_mb,
    )
    options = Options(key=key, strict=strict, fusion_mb=fusion_mb, backward_codec=backward_codec)
    return all_to_all.exchange(
        name, x, net=net, codec=codec, options=options, dimensions=Dimensions(split_axis, concat_axis, tiled)
    )


def _check_ranks(name: str, comm: Any, check: Any, arrays: Mapping[str, Any], /, **settings: Any) -> Net:
    """Returns the transport over `comm`, and lets the ranks compare their arguments.

    They compare them when the program runs, and with `check` also now.
    """
    check_flag(name, "check", check)
    if not isinstance(settings.get("codec"), dict | Plan | None):
        check_codec(name, settings["codec"])
    given = comm if isinstance(comm, Net) else check_communicator(name, "comm", comm)
    check_ready(name, given.comm if isinstance(given, Net) else given)
    mine = describe(name, arrays, settings)
    if check:
        agree(given.comm if isinstance(given, Net) else given, mine)
    net = given if isinstance(given, Net) else ranks.over(name, given)
    _check_one_device(name, arrays["x"])
    if not net.parts:
        _check_no_levels(name, **settings)
    with scopes.scope(scopes.MessageScope(name, net.names, ("digest",))):
        greet(mine, net)
    return net


def _check_one_device(name: str, x: Any) -> None:
    mesh = jax.sharding.get_abstract_mesh()
    devices = {
        device
        for leaf in jax.tree_util.tree_leaves(x)
        if isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer)
        for device in leaf.devices()
    }
    if (count := max(len(devices), 1 if mesh.empty else mesh.size)) > 1:
        remedy = "start a process for each device, or use a mesh (jaxcgx.compressed_psum and its like)"
        raise wrong(name, "x", "arrays on the one device that a rank computes on", f"{count} devices", remedy)


def _check_no_levels(name: str, /, codec: Any = None, schedule: Any = None, leader: Any = False, **_: Any) -> None:
    """Checks that no argument has "cross" or "inner", because only a hierarchy has these two levels."""
    given = [codec]
    if isinstance(codec, Plan):
        given = [codec.default, *(rule.codec for rule in codec.rules), codec.schedule]
    levels = {
        "codec": (codec, any(isinstance(each, dict) for each in given)),
        "schedule": (schedule, isinstance(schedule, dict)),
        "leader": (leader, leader is True),
    }
    for argument, (value, bad) in levels.items():
        if bad:
            expected = 'nothing of "cross" and "inner" with a communicator'
            raise wrong(name, argument, expected, value, "pass comm=jaxcgx.mpi.hierarchy()")
