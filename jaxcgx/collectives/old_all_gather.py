"""compressed_all_gather: lax.all_gather that sends a fraction of the bytes."""

from typing import Any

import jax

from jaxcgx.checks import check_choice
from jaxcgx.collectives.calls import Call, Route
from jaxcgx.collectives.old_arguments import Dimension, Options, check_dimension, per_leaf
from jaxcgx.exchange import row_primitives
from jaxcgx.exchange.message import Message
from jaxcgx.exchange.resolve import check_axes
from jaxcgx.plan import Plan
from jaxcgx.plan.by_axis import Codecs
from jaxcgx.transports.base import Transport
from jaxcgx.typing import AxisName


def compressed_all_gather(
    x: Any,
    axis_name: AxisName,
    codec: Codecs | Plan,
    *,
    key: jax.Array | None = None,
    axis: Any = 0,
    tiled: bool = False,
    to: str = "varying",
    schedule: str = "auto",
    backward_codec: Codecs | Plan | None = None,
    strict: bool = False,
    fusion_mb: float | None = None,
) -> Any:
    """Returns every rank's `x`, like `jax.lax.all_gather`.

    Each rank also decodes its own bytes, so all ranks get the same arrays.

    Args:
      x: a pytree of arrays.
      axis_name: one name, or a tuple of names, outermost first.
      codec: as in `compressed_psum`. With a dict of codecs, ranks gather over the outermost axis first. There, each
        inner rank gathers a share.
      key: a random key for codecs that round stochastically.
      axis: as in jax.lax; or a tree like `x` with an axis for each leaf.
      tiled: as in jax.lax.
      to: as in jax.lax, "varying" or "invarying".
      schedule: "one_shot", or "auto", which means the same here.
      backward_codec: the codec of the transpose, a `compressed_psum_scatter`; by default `codec`.
      strict: whether a leaf that can't be compressed is an error.
      fusion_mb: the largest size of a message in MiB; by default the plan's, or 64.
    """
    op = "compressed_all_gather"
    options = Options(key=key, schedule=schedule, strict=strict, fusion_mb=fusion_mb, backward_codec=backward_codec)
    return gather(
        op, x, net=check_axes(op, axis_name), codec=codec, options=options, dimension=Dimension(axis, tiled), to=to
    )


def gather(
    op: str, x: Any, net: Transport, codec: Any, options: Options, dimension: Dimension, to: str = "varying"
) -> Any:
    """Returns the result of `compressed_all_gather` over the ranks of a transport."""
    call, (axis, tiled) = Call(op, x, net=net, codec=codec, options=options), dimension
    check_choice(op, "schedule", options.schedule, ("auto", "one_shot"))
    check_choice(op, "to", to, ("varying", "invarying"))
    extra = 0 if tiled else 1
    dims = [
        check_dimension(op, "axis", each, leaf=leaf, path=path, extra=extra)
        for each, leaf, path in zip(per_leaf(op, "axis", axis, call), call.leaves, call.paths)
    ]

    def plain(leaf: jax.Array, i: int) -> jax.Array:
        return net.plain_all_gather(leaf, dims[i], tiled=tiled, to=to)

    def compressed(message: Message, route: Route) -> list[Any]:
        gathered = message
        sizes = tuple(stage.net.size for stage in route.stages)
        join = row_primitives.Join(tuple(dims[i] for i in message.ids), tiled, sizes)
        for j, stage in enumerate(route.stages):
            part = route.with_key(gathered.replace(key=message.key), j, route.stages[j + 1 :])
            last = stage is route.stages[-1]
            gathered = part.replace(leaves=row_primitives.all_gather(part, stage, to, join=join if last else None))
        return gathered.leaves

    return call.run(plain, compressed)
