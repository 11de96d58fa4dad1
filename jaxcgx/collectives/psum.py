"""compressed_psum, compressed_pmean: lax.psum and lax.pmean that send a fraction of the bytes."""

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from jaxcgx import _compat
from jaxcgx.checks import check_flag, wrong
from jaxcgx.collectives.arguments import Options, check_hops, check_own, check_schedules, check_stages, check_summable
from jaxcgx.collectives.calls import Call, Route
from jaxcgx.collectives.state import Kept, State, warn_of_growth
from jaxcgx.exchange import hierarchy, scopes, sums
from jaxcgx.exchange.message import Message, Stage, Sum, carry
from jaxcgx.exchange.overlay import Overlay
from jaxcgx.plan import Plan, why_raw
from jaxcgx.plan.by_axis import Codecs
from jaxcgx.transports.base import Transport
from jaxcgx.transports.resolve import check_axes
from jaxcgx.typing import AxisName

SMALL = 2**16  # bytes of a leaf that shares a collective with others


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
    """The sum of `x` over a named axis, as `jax.lax.psum`, sent in the codec's bytes.

    Every rank gets the same bits. Gradients pass as through lax.psum (straight-through).

    Args:
      x: a pytree of arrays. Leaves that are float32, bfloat16 or float16 are compressed. Other leaves go through
        lax.psum, or are an error with `strict=True`.
      axis_name: one name, or a tuple of names, outermost first.
      codec: a codec for one exchange over all axes together; or a dict with a codec per axis, such as `{"node":
        MaxMin(4), "local": Raw()}`, which sums over the inner axes by reduce-scatter, over the outermost axis by the
        compressed exchange of each shard, and gathers back; or a `Plan`, which says it per leaf.
      key: a random key for codecs that round stochastically, the same on every rank and another one every step.
      residuals: what earlier calls lost, which this call gives back (error feedback): a tree like `x` of this rank's
        float32 arrays, zeros at first. The result is then a pair, the sum and the new residuals. Over all ranks, sum +
        new residuals = x + residuals. None in place of a leaf means no feedback for it. With `own="encoded"` the loss
        of encoding the sum is not kept; in a hierarchy, the loss of the inner axes is not kept.
      momentum: a tree like `x` of this rank's arrays, which lose what is sent, as in Deep Gradient Compression. For
        leaves in sparse codecs (`TopK`), an array comes back with 0 where an element of this rank was sent. It needs
        `residuals`; the new arrays follow the new residuals. None in place of a leaf means none for it. Leaves that
        travel raw keep theirs.
      factors: the factors that `PowerSGD` starts from, those of the step before (`init_factors` at first): a tree like
        `x`, the same on every rank, with None for leaves that have none. The new factors are the last result. Without
        factors, every call restarts from the same guess and approximates worse.
      schedule: "two_shot", "one_shot", "ring", "tree", an `Overlay`, or "auto", which jaxcgx/exchange/costs.py
        explains; or a dict with one per axis.
      own: what a rank adds of its own part to the sum that it owns: "raw", the part as it is, which loses less; or
        "encoded", the part as the other ranks see it, with which the same key gives the same bits whatever the messages
        (except for `ByteGrad`, `Micro("nvfp4")` and `TopK`).
      leader: whether only rank 0 of the inner axes takes part in the outer exchange and hands its result on: fewer
        messages between nodes, and one network card in use.
      strict: whether a leaf that can't be compressed is an error.
      fusion_mb: the size of a message in MiB (64). All leaves with the same codecs share messages, each of which is one
        exchange.
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
    """The mean of `x` over a named axis, as `jax.lax.pmean`, sent in the codec's bytes.

    The sum is divided in float32 before its last encoding.

    Args:
      x: a pytree of arrays.
      axis_name: one name, or a tuple of names, outermost first.
      codec: a codec, {axis name: codec} or a `Plan`.
      key: as in `compressed_psum`, and so are the other arguments.
      residuals: error feedback; over all ranks, ranks * mean + new residuals = x + residuals.
      momentum: arrays that lose what is sent.
      factors: the factors of `PowerSGD`.
      schedule: how the bytes travel.
      own: how a rank adds its own part.
      leader: whether one rank per node speaks for the others.
      strict: whether a leaf that can't be compressed is an error.
      fusion_mb: the size of a message in MiB (64).
    """
    op = "compressed_pmean"
    options = Options(key=key, schedule=schedule, own=own, leader=leader, strict=strict, fusion_mb=fusion_mb)
    state = State(residuals=residuals, momentum=momentum, factors=factors)
    return reduce(op, x, net=check_axes(op, axis_name), codec=codec, options=options, state=state, mean=True)


def reduce(op: str, x: Any, net: Transport, codec: Any, options: Options, state: State, *, mean: bool) -> Any:
    """The sum or the mean over the ranks of a transport, followed by the new state where the caller gave some."""
    reduction = Reduction(op, x, net=net, codec=codec, options=options, mean=mean)
    kept = Kept(reduction.call, state)
    results = run(reduction, kept, reduction.compressed)
    return (results, *kept.trees()) if kept.arrays else results


def run(reduction: "Reduction", kept: Kept, compressed: Callable[[Message, Route], Message]) -> Any:
    """The tree of results, with the new state in `kept`. `compressed` makes that of a message."""
    residuals = kept.arrays.get("residuals")
    if residuals is not None:
        reduction.check_feedback()
    joined = reduction.joined(residuals)

    def plain(leaf: jax.Array, i: int) -> jax.Array:
        if i in joined:
            return checkpoint_name(joined[i], scopes.JOINED)  # where `explain` finds it
        if residuals is not None and residuals[i] is not None and not reduction.call.skipped[i]:
            (leaf,), (residuals[i],) = carry([leaf], [residuals[i]])
        return reduction.plain(leaf, i)

    def leaves(message: Message, route: Route) -> list[Any]:
        done = compressed(kept.attach(message, route.stages[0].codec), route)
        kept.update(done)
        return done.leaves

    return reduction.call.run(plain, leaves)


class Reduction:
    """A checked sum or mean over the ranks of a transport, of a raw leaf and of a message."""

    call: Call
    said: str  # who chose the schedule, for errors
    outermost: str | Overlay  # the schedule that was asked for over the outermost axis, which may have one rank
    how: Sum
    mean: bool
    stages: dict[Route, tuple[Stage, ...]]  # with their schedules

    def __init__(
        self, op: str, x: Any, net: Transport, codec: Any, options: Options, *, mean: bool, gradients: bool = False
    ) -> None:
        """gradients: whether gradients will be summed in place of `x`."""
        if not gradients:  # a leaf without gradient stays as it is
            check_summable(op, x)
        self.mean = mean
        leader = check_flag(op, "leader", options.leader)
        schedule, self.said, prefer, network = options.schedule, "", "time", None
        if isinstance(codec, Plan):
            leader, prefer, network = leader or codec.leader, codec.prefer, codec.network
            if schedule == "auto":
                schedule, self.said = codec.schedule, " of the plan"
        asked = check_schedules(op, schedule, net.parts)
        # Raw leaves, too, go along the links of an overlay. Over Tcp they let the program go on, as lax.psum doesn't.
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
            if parts and len(stages) < len(parts) and stages[0].codec.raw:  # what a plan leaves raw, as the axes do
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

        An axis of one rank counts: what runs on one node must run on two.
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
        """The sum or mean of leaf i, which travels as it is: by one axis after another where it has a Raw() for each.

        A leaf that the plan skips gives zeros. One exchange over all ranks would send more over the outermost axis, the
        slow network.
        """
        if self.call.skipped[i]:
            return checkpoint_name(jnp.zeros(leaf.shape, leaf.dtype), scopes.SKIPPED)  # where `explain` finds it
        if self._at_once(i):
            return self._plain(leaf)
        nets = [stage.net for stage in self.call.routes[i].stages]
        total = hierarchy.plain_psum(nets, leaf, tracked=self.call.tracked)
        return total / self.call.size if self.mean else total

    def joined(self, residuals: list[Any] | None) -> dict[int, jax.Array]:
        """The sums or means of small leaves that travel as they are, by number. Leaves of one type share a collective.

        Over Gloo a collective costs milliseconds however small it is. One of several arrays costs that for each array.
        """
        call, mesh = self.call, jax.sharding.get_abstract_mesh()
        found: dict[int, jax.Array] = {}
        if not call.groups or set(mesh.axis_names) != set(mesh.manual_axes):
            return found  # nothing is compressed: this is lax's program. Or: the compiler may cut leaves over its axes
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
        """Whether leaf i, which travels as it is, is summed over all ranks at once."""
        call = self.call
        return len(call.routes[i].stages) == 1 or not call.leaves[i].size or not all(c.raw for c in call.codecs[i])

    def _plain(self, leaf: jax.Array) -> jax.Array:
        return self.call.net.plain_pmean(leaf) if self.mean else self.call.net.plain_psum(leaf)

    def compressed(self, message: Message, route: Route) -> Message:
        call, stages = self.call, self.stages[route]
        if call.slice_elements is not None:
            stages = (stages[0]._replace(net=stages[0].net.sliced(call.slice_elements)), *stages[1:])
        return sums.psum(message, net=call.net, stages=stages, how=self.how, tracked=call.tracked)
