"""compressed_psum, compressed_pmean: lax.psum and lax.pmean that send a fraction of the bytes."""

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from jaxcgx import _compat
from jaxcgx.checks import check_flag, wrong
from jaxcgx.codecs.raw import Raw
from jaxcgx.collectives.calls import Call, Route
from jaxcgx.collectives.old_arguments import (
    Options,
    check_hops,
    check_own,
    check_schedules,
    check_stages,
    check_summable,
)
from jaxcgx.collectives.state import Kept, State, warn_of_growth
from jaxcgx.exchange import hierarchy, scopes, sums
from jaxcgx.exchange.message import Message, Stage, Sum
from jaxcgx.exchange.resolve import check_axes
from jaxcgx.plan import Plan, why_raw
from jaxcgx.plan.by_axis import Codecs
from jaxcgx.plan.overlay import Overlay
from jaxcgx.transports.base import Transport
from jaxcgx.typing import AxisName

SMALL = 2**16  # the most bytes of a raw leaf that shares a collective with other raw leaves


def compressed_psum(
    x: Any,
    axis_name: AxisName,
    codec: Codecs | Plan,
    *,
    key: jax.Array | None = None,
    residuals: Any = None,
    momentum: Any = None,
    factors: Any = None,
    schedule: str | Overlay | dict[Any, Any] = "auto",
    own: Literal["raw", "encoded"] = "raw",
    leader: bool = False,
    strict: bool = False,
    fusion_mb: float | None = None,
) -> Any:
    """Returns the sum of `x` over a named axis, like `jax.lax.psum`, but sends compressed bytes.

    Every rank gets the same bits. For derivatives, the function counts as lax.psum (straight-through).

    Args:
      x: a pytree of arrays. Leaves of float32, bfloat16 and float16 are compressed. Other leaves go through lax.psum,
        or are an error with `strict=True`.
      axis_name: one name, or a tuple of names, outermost first.
      codec: a codec, a dict or a `Plan`. A codec is for one exchange over all axes together. A dict has a codec per
        axis, such as `{"node": MaxMin(4), "local": Raw()}`. It sums over the inner axes by reduce-scatter, sums each
        shard over the outermost axis by a compressed exchange, and gathers the shards over the inner axes. A `Plan`
        gives each leaf its codec or dict.
      key: a random key for codecs that round stochastically. It must be the same on every rank, and different in every
        step.
      residuals: the compression errors of earlier calls, which this call adds to `x` (error feedback): a tree like `x`
        of this rank's float32 arrays, zeros at first. The result is then a pair, the sum and the new residuals. Summed
        over all ranks, sum + new residuals = x + residuals. None in place of a leaf means no feedback for it. With
        `own="encoded"`, the error of encoding the sum is not kept. In a hierarchy, the errors of the inner axes are not
        kept.
      momentum: a tree like `x` of this rank's momentum, for the momentum masking of Deep Gradient Compression. For
        leaves with sparse codecs (`TopK`), the array comes back with 0 where an element of this rank was sent. It needs
        `residuals`, and the new arrays follow the new residuals. None in place of a leaf means that it has no momentum.
        The momentum of leaves that travel raw stays the same.
      factors: the factors that `PowerSGD` starts from: a tree like `x`, the same on every rank, with None for leaves
        that have no factors. Pass the factors that the previous step returned, and those of `init_factors` in the first
        step. The new factors are the last result. Without factors, every call restarts from the same guess and
        approximates worse.
      schedule: "two_shot", "one_shot", "ring", "tree", an `Overlay`, or "auto", which jaxcgx/exchange/costs.py
        explains; or a dict with a schedule per axis.
      own: how a rank adds its own part to the sum that it owns. "raw" adds the part itself, which loses less. "encoded"
        adds the part as the other ranks decode it. The same key then gives the same bits for any division into messages
        (except for `ByteGrad`, `Micro("nvfp4")` and `TopK`).
      leader: whether only rank 0 of the inner axes takes part in the outer exchange, and passes the result on. This
        needs fewer messages between nodes, but uses only one network card per node.
      strict: whether a leaf that can't be compressed is an error.
      fusion_mb: the largest size of a message in MiB; by default the plan's, or 64. All leaves with the same codecs
        share messages. Each message is one exchange.
    """
    op = "compressed_psum"
    options = Options(key=key, schedule=schedule, own=own, leader=leader, strict=strict, fusion_mb=fusion_mb)
    state = State(residuals=residuals, momentum=momentum, factors=factors)
    return reduce(op, x, net=check_axes(op, axis_name), codec=codec, options=options, state=state, mean=False)


def compressed_pmean(
    x: Any,
    axis_name: AxisName,
    codec: Codecs | Plan,
    *,
    key: jax.Array | None = None,
    residuals: Any = None,
    momentum: Any = None,
    factors: Any = None,
    schedule: str | Overlay | dict[Any, Any] = "auto",
    own: Literal["raw", "encoded"] = "raw",
    leader: bool = False,
    strict: bool = False,
    fusion_mb: float | None = None,
) -> Any:
    """Returns the mean of `x` over a named axis, like `jax.lax.pmean`, but sends compressed bytes.

    The sum is divided in float32 before its last encoding.

    Args:
      x: a pytree of arrays.
      axis_name: one name, or a tuple of names, outermost first.
      codec: a codec, {axis name: codec} or a `Plan`.
      key: a random key, as in `compressed_psum`. The arguments below are also as in `compressed_psum`.
      residuals: error feedback. Summed over all ranks, ranks * mean + new residuals = x + residuals.
      momentum: arrays that come back with 0 where an element was sent.
      factors: the factors of `PowerSGD`.
      schedule: how the bytes travel.
      own: how a rank adds its own part.
      leader: whether only one rank of each node takes part in the exchange between nodes.
      strict: whether a leaf that can't be compressed is an error.
      fusion_mb: the largest size of a message in MiB; by default the plan's, or 64.
    """
    op = "compressed_pmean"
    options = Options(key=key, schedule=schedule, own=own, leader=leader, strict=strict, fusion_mb=fusion_mb)
    state = State(residuals=residuals, momentum=momentum, factors=factors)
    return reduce(op, x, net=check_axes(op, axis_name), codec=codec, options=options, state=state, mean=True)


def reduce(op: str, x: Any, net: Transport, codec: Any, options: Options, state: State, *, mean: bool) -> Any:
    """Returns the sum or the mean over the ranks of a transport, followed by the new state if the caller gave state."""
    reduction = Reduction(op, x, net=net, codec=codec, options=options, mean=mean)
    kept = Kept(reduction.call, state)
    results = run(reduction, kept, reduction.compressed)
    return (results, *kept.trees()) if kept.arrays else results


def plain_reduce(op: str, x: Any, net: Transport, *, mean: bool) -> Any:
    """Returns the uncompressed sum or mean over the ranks of a step's own numbers, such as its loss."""
    mesh = jax.sharding.get_abstract_mesh()
    whole = all(name in mesh.manual_axes for name, size in mesh.shape.items() if size > 1)
    if net.begin_sum and whole:  # over Tcp, numbers travel like gradients: errors of lax's collectives name no rank
        return reduce(op, x, net=net, codec=Raw(), options=Options(), state=State(), mean=mean)
    total, tracked = net.plain_pmean if mean else net.plain_psum, _compat.tracked_axes(net.names)

    def of_leaf(leaf: Any) -> jax.Array:
        own = _compat.vary(jnp.asarray(leaf), tracked)
        if whole or not jnp.issubdtype(own.dtype, jnp.floating) or own.dtype.itemsize > 2:
            return total(own)
        # XLA on CPUs aborts when it compiles a sum of 16-bit numbers beside axes that are left to its partitioner.
        return total(own.astype(jnp.float32)).astype(own.dtype)

    return jax.tree_util.tree_map(of_leaf, x)


def run(reduction: "Reduction", kept: Kept, compressed: Callable[[Message, Route], Message]) -> Any:
    """Returns the tree of results, and stores the new state in `kept`.

    `compressed` returns the results of a message, with its new state.
    """
    residuals = kept.arrays.get("residuals")
    if residuals is not None:
        reduction.check_feedback()
    joined = reduction.joined(residuals)

    def plain(leaf: jax.Array, i: int) -> jax.Array:
        if i in joined:
            return checkpoint_name(joined[i], scopes.JOINED)  # a name that `explain` finds
        return reduction.plain(leaf if reduction.call.skipped[i] else kept.carried(leaf, i), i)

    def leaves(message: Message, route: Route) -> list[Any]:
        done = compressed(kept.attach(message, route.stages[0].codec), route)
        kept.update(done)
        return done.leaves

    return reduction.call.run(plain, leaves)


class Reduction:
    """A checked sum or mean over the ranks of a transport. Its methods sum a raw leaf or a message."""

    call: Call
    said: str  # words of errors: " of the plan" if the plan chose the schedule, else ""
    outermost: str | Overlay  # the schedule that was asked for over the outermost axis, which may have only one rank
    how: Sum
    mean: bool
    stages: dict[Route, tuple[Stage, ...]]  # with their schedules

    def __init__(
        self, op: str, x: Any, net: Transport, codec: Any, options: Options, *, mean: bool, gradients: bool = False
    ) -> None:
        """Checks the arguments. `gradients` says whether the gradients of `x` will be summed, not `x`."""
        if not gradients:  # otherwise a random key is allowed, because a leaf without gradient isn't summed
            check_summable(op, x)
        self.mean = mean
        leader = check_flag(op, "leader", options.leader)
        schedule, self.said, prefer, network = options.schedule, "", "time", None
        if isinstance(codec, Plan):
            leader, prefer, network = leader or codec.leader, codec.prefer, codec.network
            if schedule == "auto":
                schedule, self.said = codec.schedule, " of the plan"
        asked = check_schedules(op, schedule, net.parts, net)
        # Raw leaves also travel along an overlay. Over Tcp, their exchange overlaps with the program, unlike lax.psum.
        if asked[0] == "tree" or isinstance(asked[0], Overlay) or (net.begin_sum and asked[0] != "ring"):
            options = options._replace(join_raw=True)
        call = self.call = Call(op, x, net=net, codec=codec, options=options, sums=True, gradients=gradients)
        if leader and call.groups and not call.hierarchy:
            remedy = "give axis_name a tuple and codec a dict with a codec for each name"
            raise wrong(op, "leader", "False without a hierarchy", True, remedy)
        for name in asked:
            check_own(op, options.own, name)
        self.outermost = asked[0]
        parts = dict(zip(net.parts.values(), asked)) if isinstance(schedule, dict) else {}
        self.how = Sum(own=options.own, divisor=float(call.size) if mean else 1.0, leader=leader)
        self.stages = {}
        for route, ids in call.groups.items():
            stages = route.stages
            # A leaf that a plan leaves raw also gets a stage for each axis, because each axis has its own schedule.
            if parts and len(stages) < len(parts) and stages[0].codec.raw:
                stages = check_stages(op, options.codec_name, dict.fromkeys(net.parts, stages[0].codec), net)
            named = tuple(
                stage._replace(schedule=parts.get(stage.net, "auto" if j else asked[0]))
                for j, stage in enumerate(stages)
            )
            leaves = [call.leaves[i] for i in ids]
            self.stages[route] = sums.choose(named, leaves, leader=leader, prefer=prefer, network=network)
            for stage, before in zip(self.stages[route], named):
                check_hops(op, stage, asked=before.schedule)

    def check_feedback(self) -> None:
        """Checks that the schedules and codecs allow feedback.

        An axis of one rank is checked as well, because a program that runs on one node must also run on two.
        """
        op, call = self.call.op, self.call
        outermost = [stages[0] for stages in self.stages.values()]
        sent = [i for i, leaf in enumerate(call.leaves) if not why_raw(leaf, call.routes[i].codecs)]
        asked = self.outermost == "ring" and any(not call.codecs[i][0].low_rank for i in sent)
        if asked or any(stage.schedule == "ring" for stage in outermost):
            raise wrong(
                op,
                "schedule",
                '"two_shot" or "one_shot" with residuals',
                f'"ring"{self.said}, which encodes sums of several ranks on the way',
                'pass schedule="two_shot"',
            )
        warn_of_growth(op, {stage.codec for stage in outermost})

    def plain(self, leaf: jax.Array, i: int) -> jax.Array:
        """Returns the sum or mean of leaf i, which travels raw. A leaf that the plan skips gives zeros.

        A leaf with a Raw() for each axis is summed over one axis after another. A single exchange over all ranks would
        send more bytes over the outermost axis, the slow network.
        """
        if self.call.skipped[i]:
            return checkpoint_name(jnp.zeros(leaf.shape, leaf.dtype), scopes.SKIPPED)  # a name that `explain` finds
        if self._at_once(i):
            return self._plain(leaf)
        nets = [stage.net for stage in self.call.routes[i].stages]
        total = hierarchy.plain_psum(nets, leaf, tracked=self.call.tracked)
        return total / self.call.size if self.mean else total

    def joined(self, residuals: list[Any] | None) -> dict[int, jax.Array]:
        """Returns {number of the leaf: sum or mean} for small leaves that travel raw and share a collective.

        Leaves of the same dtype are concatenated. Over Gloo, a collective takes milliseconds for any size. A collective
        of several arrays takes this time for each array.
        """
        call, mesh = self.call, jax.sharding.get_abstract_mesh()
        found: dict[int, jax.Array] = {}
        if not call.groups or set(mesh.axis_names) != set(mesh.manual_axes):
            # If nothing is compressed, the program is the same as with lax. If XLA partitions some axes of the mesh, it
            # may shard leaves over them.
            return found
        alike: dict[Any, list[int]] = {}
        for i in call.raw:
            leaf = call.leaves[i]
            fed = residuals is not None and residuals[i] is not None
            if not call.skipped[i] and not fed and 0 < leaf.size * leaf.dtype.itemsize <= SMALL and self._at_once(i):
                alike.setdefault((leaf.dtype, _compat.varying_axes(leaf)), []).append(i)
        for ids in alike.values():
            if len(ids) > 1:
                paths = tuple(jax.tree_util.keystr(call.paths[i]) for i in ids)
                leaves = [call.leaves[i] for i in ids]
                flat = jnp.concatenate([leaf.reshape(-1) for leaf in leaves])
                with scopes.scope(scopes.MessageScope(call.op, call.net.names, paths, bytes=flat.nbytes)):
                    total = self._plain(flat)
                parts = jnp.split(total, np.cumsum([leaf.size for leaf in leaves[:-1]]))
                found |= {i: part.reshape(leaf.shape) for i, part, leaf in zip(ids, parts, leaves)}
        return found

    def _at_once(self, i: int) -> bool:
        """Returns whether leaf i, which travels raw, is summed over all ranks at once."""
        call = self.call
        return len(call.routes[i].stages) == 1 or not call.leaves[i].size or not all(c.raw for c in call.codecs[i])

    def _plain(self, leaf: jax.Array) -> jax.Array:
        return self.call.net.plain_pmean(leaf) if self.mean else self.call.net.plain_psum(leaf)

    def compressed(self, message: Message, route: Route) -> Message:
        call, stages = self.call, self.stages[route]
        if call.slice_elements is not None:
            stages = (stages[0]._replace(net=stages[0].net.sliced(call.slice_elements)), *stages[1:])
        return sums.psum(message, net=call.net, stages=stages, how=self.how, tracked=call.tracked)
