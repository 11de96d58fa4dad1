"""A checked call of a collective: the route of each leaf, and the leaves that share a message."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from jaxcgx import plan
from jaxcgx.checks import at, check_flag, check_positive, check_varying, wrong
from jaxcgx.codecs.base import Codec
from jaxcgx.codecs.raw import Raw
from jaxcgx.collectives.old_arguments import (
    Options,
    check_low_rank,
    check_shared_key,
    check_stages,
    check_tracked,
    check_whole,
)
from jaxcgx.exchange import scopes
from jaxcgx.exchange.keys import fold_stage
from jaxcgx.exchange.message import Message, Stage
from jaxcgx.native.layout import DTYPES
from jaxcgx.plan.by_axis import skips
from jaxcgx.transports.base import Transport


@dataclasses.dataclass(frozen=True)
class Route:
    """The stages through which leaves travel, outermost first. Stages of one rank are left out.

    If all stages have one rank, the outermost stage stays.
    """

    stages: tuple[Stage, ...]

    @classmethod
    def of(cls, stages: tuple[Stage, ...], backward: tuple[Stage, ...]) -> "Route":
        """Makes a route from the stages of a call and the same number of stages of its transpose (`backward`)."""
        both = [there._replace(backward=back.codec) for there, back in zip(stages, backward)]
        return cls(tuple(stage for stage in both if stage.net.size > 1) or (both[0],))

    @property
    def codecs(self) -> list[Codec]:
        """The codecs of all stages, followed by the codecs of the transpose."""
        return [stage.codec for stage in self.stages] + [stage.backward for stage in self.stages]

    def others(self, j: int) -> tuple[Stage, ...]:
        """Returns all stages except stage j."""
        return self.stages[:j] + self.stages[j + 1 :]

    def with_key(self, message: Message, j: int, others: tuple[Stage, ...]) -> Message:
        """Returns the message with the key of stage j.

        Ranks with different places along the stages `others` draw different noise.
        """
        return message if len(self.stages) == 1 else message.replace(key=fold_stage(message.key, j, others))


class _Assigned(NamedTuple):
    """The stages that a codec argument gives the leaves of a call."""

    stages: list[tuple[Stage, ...]]  # for each leaf
    guarded: list[str | None]  # for each leaf: the reason why the plan leaves it raw, or None
    skipped: list[bool]  # for each leaf: whether the plan doesn't send it
    used: list[Codec]  # the codecs of these leaves
    possible: list[Codec]  # all codecs that the argument may give to any tree of leaves (check_shared_key)


class Call:
    """The checked arguments of a collective. Leaves with the same route share messages."""

    op: str
    net: Transport
    size: int  # the number of ranks
    gradients: bool  # whether the gradients of the leaves are exchanged, by the backward pass: in the opposite order
    tree: Any
    paths: list[Any]
    leaves: list[jax.Array]
    tracked: bool
    codecs: list[list[Codec]]  # for each leaf, outermost first
    key: jax.Array | None
    hierarchy: bool
    routes: list[Route]
    limit: float  # the most bytes of a message
    raw: dict[int, str]  # {number of a leaf: the reason why it travels raw, or isn't sent}
    skipped: list[bool]  # for each leaf: whether it is not sent
    groups: dict[Route, list[int]]  # the numbers of all other leaves, by route
    turns: dict[int, int]  # {number of a leaf: its turn}, if the caller gave an order
    slice_elements: int | None

    def __init__(
        self, op: str, x: Any, net: Transport, codec: Any, options: Options, sums: bool = False, gradients: bool = False
    ) -> None:
        """Checks the arguments of a call.

        Args:
          op: the function that errors name.
          x: the tree of leaves.
          net: the transport over all ranks.
          codec: a codec, a dict of codecs or a `Plan`.
          options: the options of the call.
          sums: whether the collective is a sum to all ranks.
          gradients: whether the gradients of `x` will be exchanged, not `x`.
        """
        self.op, self.net, self.size, self.gradients = op, net, net.size, gradients
        argument = self.argument
        check_flag(op, "strict", options.strict)
        found, self.tree = jax.tree_util.tree_flatten_with_path(x)
        self.paths = [path for path, _ in found]
        self.leaves = [check_whole(op, argument, path, leaf) for path, leaf in found]
        self.tracked = check_tracked(op, net.names)
        forward = backward = self._assign(options.codec_name, codec)
        self.skipped = forward.skipped
        if not gradients:
            sent = [i for i, skip in enumerate(self.skipped) if not skip]
            check_varying(op, net.names, [self.paths[i] for i in sent], [self.leaves[i] for i in sent])
        used, possible = forward.used, forward.possible
        if options.backward_codec is not None:
            backward = self._assign("backward_codec", options.backward_codec)
            used, possible = used + backward.used, possible + backward.possible
        for assigned, name in ((forward, options.codec_name), (backward, "backward_codec")):
            check_low_rank(op, name, assigned.stages, sums)
            if not sums and any(assigned.skipped):
                path = self.paths[assigned.skipped.index(True)]
                expected, remedy = "a plan that skips no leaf", "Skip() is for sums and means; leave the leaf out of x"
                raise wrong(op, name, expected, "one with Skip() for it", remedy, path=path)
        self.codecs = [[stage.codec for stage in there] for there in forward.stages]
        self.key = check_shared_key(op, used, possible, options=options, names=net.names)
        self.hierarchy = any(len(there) > 1 for there in forward.stages)
        self.routes = [Route.of(*self._alike(there, back)) for there, back in zip(forward.stages, backward.stages)]
        fusion_mb = options.fusion_mb
        if fusion_mb is None:
            fusion_mb = codec.fusion_mb if isinstance(codec, plan.Plan) and codec.fusion_mb else 64
        self.limit = check_positive(op, "fusion_mb", fusion_mb) * 2**20
        self.raw, self.groups = {}, {}
        order, self.slice_elements = options.order or (), options.slice_elements
        self.turns = {i: turn for turn, i in enumerate(order)}
        for i in order if order and options.slice_elements is None else range(len(self.routes)):
            if reason := self._why_raw(argument, i, guarded=forward.guarded[i], options=options):
                self.raw[i] = reason
            else:
                self.groups.setdefault(self.routes[i], []).append(i)

    @property
    def argument(self) -> str:
        """The name of the tree of leaves in errors."""
        return "params" if self.gradients else "x"

    def _assign(self, argument: str, codec: Any) -> _Assigned:
        if isinstance(codec, plan.Plan):
            assigned = codec.assign(self.op, argument, paths=self.paths, leaves=self.leaves)
            skipped = [skips(chosen) for chosen, _ in assigned]
            sent = [Raw() if skip else chosen for (chosen, _), skip in zip(assigned, skipped)]
            stages = [check_stages(self.op, argument, chosen, self.net) for chosen in sent]
            used = [stage.codec for there in stages for stage in there]
            guarded = [reason for _, reason in assigned]
            return _Assigned(stages, guarded, skipped, used=used, possible=codec.codecs)
        stages = check_stages(self.op, argument, codec, self.net)
        codecs = [stage.codec for stage in stages]
        n = len(self.leaves)
        return _Assigned([stages] * n, guarded=[None] * n, skipped=[False] * n, used=codecs, possible=codecs)

    def _alike(self, there: tuple[Stage, ...], back: tuple[Stage, ...]) -> tuple[tuple[Stage, ...], tuple[Stage, ...]]:
        """Returns both tuples with the same number of stages.

        A raw exchange over all ranks together is replaced by raw exchanges over each part.
        """
        if len(there) == len(back):
            return there, back
        flat, parts = sorted((there, back), key=len)
        if not flat[0].codec.raw:
            raise wrong(
                self.op,
                "backward_codec",
                "a codec for each axis where 'codec' has one for each, and one for all where it has one for all",
                f"{len(back)} beside {len(there)}",
            )
        flat = tuple(stage._replace(codec=flat[0].codec) for stage in parts)
        return (flat, parts) if len(there) < len(back) else (parts, flat)

    def _why_raw(self, argument: str, i: int, guarded: str | None, options: Options) -> str | None:
        """Returns the reason why a leaf is not compressed, or None if it is. `guarded` is the plan's reason, if any."""
        if self.skipped[i]:
            return "the plan skips it"
        leaf, codecs = self.leaves[i], self.routes[i].codecs
        if options.join_raw and self.size > 1 and leaf.dtype in DTYPES and leaf.size and all(c.raw for c in codecs):
            return None
        reason = plan.why_raw(leaf, codecs) or ("there is one rank" if self.size == 1 else None)
        refused = not guarded and any(codec.why_raw(leaf.shape, leaf.dtype) for codec in codecs)
        if reason and options.strict and (refused or leaf.dtype not in DTYPES):
            text = f"{self.op}: argument '{argument}'{at(self.paths[i])}: {reason}, and strict=True allows no such leaf"
            raise (ValueError if refused else TypeError)(text)
        return reason and (guarded or reason)

    def run(self, plain: Callable[[Any, int], Any], compressed: Callable[[Message, Route], list[Any]]) -> Any:
        """Returns the tree of results.

        Args:
          plain: plain(leaf, its number) returns the result for a leaf that travels raw.
          compressed: compressed(message, route) returns the results for the leaves of a message.
        """
        results: list[Any] = [None] * len(self.leaves)
        # `explain` finds the scopes in the compiled program.
        for i, reason in self.raw.items():
            leaf, path = self.leaves[i], jax.tree_util.keystr(self.paths[i])
            size = 0 if self.skipped[i] else leaf.size * leaf.dtype.itemsize
            with scopes.scope(
                scopes.LeafScope(self.op, self.net.names, path=path, dtype=str(leaf.dtype), bytes=size, reason=reason)
            ):
                results[i] = plain(leaf, i)
        in_turn = sorted(self._messages(), key=lambda message: self._turn(message[1]), reverse=self.gradients)
        for route, ids in in_turn:
            key = self.key if any(codec.stochastic for codec in route.codecs) else None
            paths = tuple(jax.tree_util.keystr(self.paths[i]) for i in ids)
            with scopes.scope(scopes.MessageScope(self.op, self.net.names, paths)):
                done = compressed(Message(ids, [self.leaves[i] for i in ids], key), route)
            for i, y in zip(ids, done):
                results[i] = y
        return jax.tree_util.tree_unflatten(self.tree, results)

    def _turn(self, ids: tuple[int, ...]) -> int:
        """Returns the turn of a message with these leaves: the lowest turn of its leaves."""
        return min((self.turns[i] for i in ids), default=0) if self.turns else 0

    def _messages(self) -> list[tuple[Route, tuple[int, ...]]]:
        """Returns (route, numbers of the leaves) of each message."""
        return [
            (route, tuple(numbers[k] for k in members))
            for route, numbers in self.groups.items()
            for members in plan.messages([self.leaves[i] for i in numbers], self.limit)
        ]


def by_stage(leaves: list[jax.Array], stages: tuple[Stage, ...]) -> list[jax.Array]:
    """Reshapes leaves [ranks, ...] to [ranks of the first stage, ranks of the second stage, ..., ...]."""
    return [x.reshape(*(stage.net.size for stage in stages), *x.shape[1:]) for x in leaves]
