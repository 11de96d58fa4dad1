"""compressed_all_to_all: lax.all_to_all that sends a fraction of the bytes."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxcgx.checks import check_choice
from jaxcgx.collectives.calls import Call, Route, by_stage
from jaxcgx.collectives.old_arguments import Dimensions, Options, check_dimension, check_divisible
from jaxcgx.exchange import row_primitives
from jaxcgx.exchange.message import Message
from jaxcgx.exchange.resolve import check_axes
from jaxcgx.plan import Plan
from jaxcgx.plan.by_axis import Codecs
from jaxcgx.transports.base import Transport, join_rows, split_rows
from jaxcgx.typing import AxisName


def compressed_all_to_all(
    x: Any,
    axis_name: AxisName,
    split_axis: int,
    concat_axis: int,
    codec: Codecs | Plan,
    *,
    key: jax.Array | None = None,
    tiled: bool = False,
    schedule: str = "auto",
    backward_codec: Codecs | Plan | None = None,
    strict: bool = False,
    fusion_mb: float | None = None,
) -> Any:
    """Sends slice r of `x` to rank r, and returns the received slices, like `jax.lax.all_to_all`.

    `x` is cut into slices along `split_axis`. The received slices are joined along `concat_axis`.

    Args:
      x: a pytree of arrays.
      axis_name: one name, or a tuple of names, outermost first.
      split_axis: as in jax.lax.
      concat_axis: as in jax.lax.
      codec: as in `compressed_psum`. With a dict of codecs, slices are exchanged over one axis after another, innermost
        first.
      key: a random key for codecs that round stochastically.
      tiled: as in jax.lax.
      schedule: "one_shot", or "auto", which means the same here.
      backward_codec: the codec of the transpose, the exchange back; by default `codec`.
      strict: whether a leaf that can't be compressed is an error.
      fusion_mb: the largest size of a message in MiB; by default the plan's, or 64.
    """
    op = "compressed_all_to_all"
    options = Options(key=key, schedule=schedule, strict=strict, fusion_mb=fusion_mb, backward_codec=backward_codec)
    return exchange(
        op,
        x,
        net=check_axes(op, axis_name),
        codec=codec,
        options=options,
        dimensions=Dimensions(split_axis, concat_axis, tiled),
    )


def exchange(op: str, x: Any, net: Transport, codec: Any, options: Options, dimensions: Dimensions) -> Any:
    """Returns the result of `compressed_all_to_all` over the ranks of a transport."""
    call, (split_axis, concat_axis, tiled) = Call(op, x, net=net, codec=codec, options=options), dimensions
    check_choice(op, "schedule", options.schedule, ("auto", "one_shot"))
    split_axes: list[int] = []
    concat_axes: list[int] = []
    for leaf, path in zip(call.leaves, call.paths):
        split_axes.append(check_dimension(op, "split_axis", split_axis, leaf=leaf, path=path))
        concat_axes.append(check_dimension(op, "concat_axis", concat_axis, leaf=leaf, path=path))
        check_divisible(op, "split_axis", split_axes[-1], leaf=leaf, path=path, size=call.size, tiled=tiled)

    def plain(leaf: jax.Array, i: int) -> jax.Array:
        return net.plain_all_to_all(leaf, split_axes[i], concat_axis=concat_axes[i], tiled=tiled)

    def compressed(message: Message, route: Route) -> list[Any]:
        split = [split_rows(x, split_axes[i], size=call.size, tiled=tiled) for x, i in zip(message.leaves, message.ids)]
        parts = by_stage(split, route.stages)
        for j, stage in reversed(list(enumerate(route.stages))):
            part = route.with_key(message.replace(leaves=[jnp.moveaxis(x, j, 0) for x in parts]), j, route.others(j))
            parts = row_primitives.all_to_all(part, stage)
            parts = [jnp.moveaxis(x, 0, j) for x in parts]
        whole = [x.reshape(call.size, *x.shape[len(route.stages) :]) for x in parts]
        return [join_rows(x, concat_axes[i], tiled) for x, i in zip(whole, message.ids)]

    return call.run(plain, compressed)
