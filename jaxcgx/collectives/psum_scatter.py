"""compressed_psum_scatter: lax.psum_scatter that sends a fraction of the bytes."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxcgx.checks import check_choice
from jaxcgx.collectives.arguments import (
    Dimension,
    Options,
    check_dimension,
    check_divisible,
    check_hops,
    check_own,
    check_summable,
)
from jaxcgx.collectives.calls import Call, Route, by_stage
from jaxcgx.exchange import rows
from jaxcgx.exchange.message import Message
from jaxcgx.transports.base import Transport, split_rows
from jaxcgx.transports.resolve import check_axes


def compressed_psum_scatter(
    x: Any,
    axis_name: Any,
    codec: Any,
    *,
    key: jax.Array | None = None,
    scatter_dimension: int = 0,
    tiled: bool = False,
    schedule: str = "auto",
    own: str = "raw",
    backward_codec: Any = None,
    strict: bool = False,
    fusion_mb: float | None = None,
) -> Any:
    """This rank's slice of the sum of `x` over a named axis, as `jax.lax.psum_scatter`.

    Args:
      x: a pytree of arrays.
      axis_name: one name, or a tuple of names, outermost first.
      codec: as in `compressed_psum`. A dict of codecs scatters over the innermost axis first, so each of the others
        carries a share.
      key: a random key for codecs that round stochastically.
      scatter_dimension: as in lax.
      tiled: as in lax.
      schedule: "one_shot" (every slice goes straight to its owner), "ring", or "auto", which is "one_shot".
      own: as in `compressed_psum`.
      backward_codec: the codec of the transpose, compressed_all_gather; by default `codec`.
      strict: whether a leaf that can't be compressed is an error.
      fusion_mb: the size of a message in MiB (64).
    """
    op = "compressed_psum_scatter"
    options = Options(
        key=key, schedule=schedule, own=own, strict=strict, fusion_mb=fusion_mb, backward_codec=backward_codec
    )
    return reduce_scatter(
        op,
        x,
        net=check_axes(op, axis_name),
        codec=codec,
        options=options,
        dimension=Dimension(scatter_dimension, tiled),
    )


def reduce_scatter(op: str, x: Any, net: Transport, codec: Any, options: Options, dimension: Dimension) -> Any:
    """`compressed_psum_scatter` over the ranks of a transport."""
    check_summable(op, x)
    call, (scatter_dimension, tiled) = Call(op, x, net=net, codec=codec, options=options), dimension
    check_choice(op, "schedule", options.schedule, ("auto", "one_shot", "ring"))
    check_own(op, options.own, options.schedule)
    schedule = "one_shot" if options.schedule == "auto" else options.schedule
    dims: list[int] = []
    for leaf, path in zip(call.leaves, call.paths):
        dims.append(check_dimension(op, "scatter_dimension", scatter_dimension, leaf=leaf, path=path))
        check_divisible(op, "scatter_dimension", dims[-1], leaf=leaf, path=path, size=call.size, tiled=tiled)
    stages = {route: [stage._replace(schedule=schedule) for stage in route.stages] for route in call.groups}
    for each in stages.values():
        for stage in each:
            check_hops(op, stage)

    def plain(leaf: jax.Array, i: int) -> jax.Array:
        return net.plain_psum_scatter(leaf, dims[i], tiled)

    def compressed(message: Message, route: Route) -> list[Any]:
        split = [split_rows(x, dims[i], size=call.size, tiled=tiled) for x, i in zip(message.leaves, message.ids)]
        parts = by_stage(split, route.stages)
        for j, stage in reversed(list(enumerate(stages[route]))):
            part = route.with_key(message.replace(leaves=[jnp.moveaxis(x, j, 0) for x in parts]), j, route.others(j))
            parts = rows.psum_scatter(part, stage, options.own)
        return parts

    return call.run(plain, compressed)
