"""compressed_psum_scatter: lax.psum_scatter that sends a fraction of the bytes."""

from typing import Any, Literal

import jax
import jax.numpy as jnp

from jaxcgx.checks import check_choice, wrong
from jaxcgx.collectives.calls import Call, Route, by_stage
from jaxcgx.collectives.old_arguments import (
    Dimension,
    Options,
    check_dimension,
    check_divisible,
    check_hops,
    check_own,
    check_summable,
    per_leaf,
)
from jaxcgx.collectives.state import Kept, State, warn_of_growth
from jaxcgx.exchange import row_primitives
from jaxcgx.exchange.message import Message, Stage, Sum
from jaxcgx.exchange.resolve import check_axes
from jaxcgx.plan import Plan
from jaxcgx.plan.by_axis import Codecs
from jaxcgx.transports.base import Transport, join_rows, split_rows
from jaxcgx.typing import AxisName


def compressed_psum_scatter(
    x: Any,
    axis_name: AxisName,
    codec: Codecs | Plan,
    *,
    key: jax.Array | None = None,
    residuals: Any = None,
    scatter_dimension: Any = 0,
    tiled: bool = False,
    schedule: str = "auto",
    own: Literal["raw", "encoded"] = "raw",
    backward_codec: Codecs | Plan | None = None,
    strict: bool = False,
    fusion_mb: float | None = None,
) -> Any:
    """Returns this rank's slice of the sum of `x` over a named axis, like `jax.lax.psum_scatter`.

    Args:
      x: a pytree of arrays.
      axis_name: one name, or a tuple of names, outermost first.
      codec: as in `compressed_psum`. With a dict of codecs, ranks scatter over the innermost axis first, so only a
        share travels over each of the other axes.
      key: a random key for codecs that round stochastically.
      residuals: error feedback, as in `compressed_psum`: a tree like `x` of this rank's float32 arrays. The result is
        then a pair, the slices and the new residuals. Summed over all ranks, slices + new residuals = x + residuals.
        The schedule must not be "ring", and there must be one codec over all axes together.
      scatter_dimension: as in jax.lax; or a tree like `x` with a dimension for each leaf.
      tiled: as in jax.lax.
      schedule: "one_shot" (every slice goes straight to its owner), "ring", or "auto", which means "one_shot" here.
      own: as in `compressed_psum`.
      backward_codec: the codec of the transpose, a `compressed_all_gather`; by default `codec`.
      strict: whether a leaf that can't be compressed is an error.
      fusion_mb: the largest size of a message in MiB; by default the plan's, or 64.
    """
    op = "compressed_psum_scatter"
    options = Options(
        key=key, schedule=schedule, own=own, strict=strict, fusion_mb=fusion_mb, backward_codec=backward_codec
    )
    return Scatter(
        op,
        x,
        net=check_axes(op, axis_name),
        codec=codec,
        options=options,
        dimension=Dimension(scatter_dimension, tiled),
    ).run(residuals)


class Scatter:
    """A checked reduce-scatter over the ranks of a transport. Its results are slices of the sum or of the mean."""

    call: Call
    options: Options
    tiled: bool
    mean: bool
    dims: list[int]  # for each leaf: the dimension that is cut into slices
    stages: dict[Route, list[Stage]]  # with their schedules

    def __init__(
        self, op: str, x: Any, net: Transport, codec: Any, options: Options, dimension: Dimension, *, mean: bool = False
    ) -> None:
        check_summable(op, x)
        call = self.call = Call(op, x, net=net, codec=codec, options=options)
        self.options, self.mean, (dimensions, self.tiled) = options, mean, dimension
        check_choice(op, "schedule", options.schedule, ("auto", "one_shot", "ring"))
        check_own(op, options.own, options.schedule)
        schedule = "one_shot" if options.schedule == "auto" else options.schedule
        self.dims = []
        given = per_leaf(op, "scatter_dimension", dimensions, call)
        for each, leaf, path in zip(given, call.leaves, call.paths):
            d = check_dimension(op, "scatter_dimension", each, leaf=leaf, path=path)
            check_divisible(op, "scatter_dimension", d, leaf=leaf, path=path, size=call.size, tiled=self.tiled)
            self.dims.append(d)
        self.stages = {route: [stage._replace(schedule=schedule) for stage in route.stages] for route in call.groups}
        for each in self.stages.values():
            for stage in each:
                check_hops(op, stage)

    def run(self, residuals: Any = None) -> Any:
        """Returns the slices, followed by the new residuals if the caller gave residuals."""
        kept = Kept(self.call, State(residuals=residuals))
        before = kept.arrays.get("residuals")
        if before is not None:
            self._check_feedback()

        def plain(leaf: jax.Array, i: int) -> jax.Array:
            total = self.call.net.plain_psum_scatter(kept.carried(leaf, i), self.dims[i], self.tiled)
            return total / self.call.size if self.mean else total

        def compressed(message: Message, route: Route) -> list[Any]:
            if before is not None and any(before[i] is not None for i in message.ids):
                message = kept.attach(message, route.stages[0].codec)
            done = self._compressed(message, route)
            kept.update(done)
            return done.leaves

        results = self.call.run(plain, compressed)
        return (results, *kept.trees()) if kept.arrays else results

    def _compressed(self, message: Message, route: Route) -> Message:
        """Returns the slices of a message, with its new residuals."""
        call, stages, dims = self.call, self.stages[route], [self.dims[i] for i in message.ids]
        cut = lambda arrays: [split_rows(x, d, size=call.size, tiled=self.tiled) for x, d in zip(arrays, dims)]
        parts = message.replace(
            leaves=by_stage(cut(message.leaves), route.stages),
            residuals=message.residuals and by_stage(cut(message.residuals), route.stages),
        )
        for j, stage in reversed(list(enumerate(stages))):
            part = parts.replace(key=message.key, leaves=[jnp.moveaxis(x, j, 0) for x in parts.leaves])
            how = Sum(self.options.own, float(call.size) if self.mean and j == 0 else 1.0)
            parts = row_primitives.psum_scatter(route.with_key(part, j, route.others(j)), stage, how)
        if parts.residuals is None:
            return parts
        return parts.replace(residuals=[join_rows(x, d, self.tiled) for x, d in zip(parts.residuals, dims)])

    def _check_feedback(self) -> None:
        """Checks that the schedule and the codecs allow feedback: a rank must know the errors of its own encodings."""
        op = self.call.op
        if self.options.schedule == "ring":
            remedy = 'pass schedule="one_shot"'
            raise wrong(
                op, "schedule", '"one_shot" with residuals', '"ring", which encodes sums of several ranks', remedy
            )
        if self.call.hierarchy:
            remedy = "pass one codec in place of the dict, or no residuals"
            raise wrong(op, "codec", "one exchange over all axes together with residuals", "a codec per axis", remedy)
        warn_of_growth(op, {stage.codec for stages in self.stages.values() for stage in stages})
