"""Routes and travels: which codec each leaf of a tree gets, and which messages carry the leaves over which ranks.

Both are made of a plan and of shapes alone, once. `Routes` need no ranks, so the state of an exchange can be made from
them before the first step. `Routes.over` adds the ranks: it returns a `Travel`. The same arguments give the same
object, which jit hashes by its identity.
"""

import dataclasses
import functools
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxcgx.checks import wrong
from jaxcgx.codecs import Codec, Raw, Skip
from jaxcgx.codecs.base import spell
from jaxcgx.exchange import costs, schedules, scopes
from jaxcgx.exchange.message import STATE, Carry, Message, Stage, Sum, carry_over
from jaxcgx.native.layout import DTYPES
from jaxcgx.plan import Plan, messages, why_raw
from jaxcgx.plan.leaves import ByAxis, Codecs, Route, by_axis, skips, values, why_unfit
from jaxcgx.plan.overlay import Overlay
from jaxcgx.transports.base import Transport
from jaxcgx.typing import DType, PyTree

# Bounds for the largest size of a message that is sent during the backward pass. Between these bounds, the size is a
# sixteenth of the tree: the pass can hide neither the first nor the last message (benchmarks/notes/collectives.md).
OVERLAPPING = 2**20, 4 * 2**20
SMALL = 2**16  # the most bytes of a raw leaf that shares a collective with other raw leaves


class Way(NamedTuple):
    """What a caller wants of a tree: its sum, its mean, slices of these, or an exchange of rows."""

    mean: bool = True  # whether the sum is divided by the number of ranks
    rows: bool = False  # whether leaves are gathered or exchanged row by row, not summed
    # For each leaf, the dimension along which a rank wants only its slice of the sum, or None; () means None for all
    # leaves.
    dims: tuple[int | None, ...] = ()
    tiled: bool = True  # whether slices keep that dimension, as in lax.psum_scatter
    # Whether raw leaves that are sliced, gathered or broadcast share messages, too. Otherwise each has its own
    # collective.
    join: bool = False
    # The numbers of the leaves, in the order in which they are ready. Messages are made and sent in this order.
    order: tuple[int, ...] | None = None
    # The elements of a slice of a message. Slices of later messages may overtake earlier messages. Messages are then
    # made in the order of the tree, so the bits don't depend on `order`.
    slice_elements: int | None = None
    deadline: float | None = None  # the seconds after which parts of a message may be late (`Transport.until`), or None
    # Whether a later program may end a sum that `begin` began. No later exchange then begins before its end.
    later: bool = False
    # Whether raw leaves of 16 bits have residuals. All raw leaves then share messages, as over Tcp, because the
    # uncompressed collectives round partial sums, and no residual gets the loss.
    fed: bool = False

    def cuts(self, i: int) -> bool:
        """Returns whether a rank gets only its slice of leaf i."""
        return bool(self.dims) and self.dims[i] is not None


@dataclasses.dataclass(frozen=True, eq=False)
class Routes:
    """The routes of the leaves of a tree. Errors name the function `op`, and its argument that has the plan."""

    op: str
    argument: str
    plan: Plan
    tree: PyTree
    leaves: tuple[Route, ...]

    @staticmethod
    def of(
        op: str, plan: Plan, tree: PyTree, codecs: Sequence[Codecs] | None = None, argument: str = "plan"
    ) -> "Routes":
        """Returns the routes of a tree of arrays or shapes. Without `codecs`, the plan chooses those of the leaves."""
        leaves, structure = jax.tree.flatten(tree)
        shapes = tuple((tuple(x.shape), x.dtype) for x in leaves)
        known = None
        if codecs is not None:
            known = tuple(ByAxis(codec) if isinstance(codec, dict) else codec for codec in codecs)
        return _routes(op, argument, plan, structure, shapes=shapes, codecs=known)

    def wrong(self, expected: str, got: object, remedy: str = "", path: PyTree = ()) -> Exception:
        return wrong(self.op, self.argument, expected, got, remedy, path=path)

    @property
    def codecs(self) -> list[Codecs]:
        """The codec of each leaf; Skip() for a leaf that is not sent."""
        return [Skip() if route.skipped else route.codec for route in self.leaves]

    @property
    def stochastic(self) -> bool:
        return any(codec.stochastic for route in self.leaves for codec in route.codecs)

    @property
    def skipped(self) -> PyTree:
        """A tree of bools: whether a leaf is not sent."""
        return self.tree.unflatten([route.skipped for route in self.leaves])

    def each(self, tree: PyTree) -> list[PyTree]:
        """Returns the entries of a tree like this one as a list. For None, returns a list with None for every leaf."""
        return [None] * len(self.leaves) if tree is None else self.tree.flatten_up_to(tree)

    def carry(
        self, others: Sequence["Routes"] = (), *, residuals: bool = True, momentum: bool = False, ends: bool = False
    ) -> Carry:
        """Returns the shapes of a rank's state: what leaves that are compressed keep, and factors.

        `others` are the routes of this tree in other steps, which use the first rows of the largest factor.
        """
        by_leaf = list(zip(self.leaves, *(each.leaves for each in others)))

        def like(dtype: DType | None) -> PyTree:
            struct = lambda r: jax.ShapeDtypeStruct(r.shape, dtype or r.dtype)
            encoded = lambda routes: any(route.encoded for route in routes)
            return self.tree.unflatten([struct(routes[0]) if encoded(routes) else None for routes in by_leaf])

        wide = like(jnp.dtype(jnp.float32))
        largest = [max((r.factor for r in routes if r.factor), default=None) for routes in by_leaf]
        factors = [shape and jax.ShapeDtypeStruct(shape, jnp.float32) for shape in largest]
        return Carry(
            residuals=wide if residuals else None,
            momentum=like(None) if momentum else None,
            factors=self.tree.unflatten(factors) if any(factors) else None,
            sent=wide if ends else None,
            received=wide if ends else None,
        )

    def over(self, net: Transport, way: Way = Way(), backward: "Routes | None" = None) -> "Travel":
        """Returns how the leaves travel over a transport. `backward`: the routes of the transpose, if they differ."""
        mesh = jax.sharding.get_abstract_mesh()
        sizes = net.size, *(part.size for part in net.parts.values())
        manual = set(mesh.axis_names) == set(mesh.manual_axes)
        return _travel(self, net, sizes, way, backward=backward or self, manual=manual)


@functools.lru_cache(maxsize=256)
def _routes(
    op: str,
    argument: str,
    plan: Plan,
    tree: PyTree,
    shapes: tuple[tuple[tuple[int, ...], DType], ...],
    codecs: Sequence[Codecs] | None,
) -> Routes:
    leaves = tree.unflatten([jax.ShapeDtypeStruct(*each) for each in shapes])
    if codecs is None:
        routes = plan.routes(op, argument, leaves) if shapes else []
    else:
        found = jax.tree.flatten_with_path(leaves)[0]
        fitting = [Raw() if why_unfit(x) and not skips(codec) else codec for (_, x), codec in zip(found, codecs)]
        routes = [Route.of(path, x, codec) for (path, x), codec in zip(found, fitting)]
    for route in routes if plan.strict else ():
        refused = any(codec.why_raw(route.shape, route.dtype) for codec in route.codecs)
        if route.why_raw and (refused or route.dtype not in DTYPES):
            expected = "a leaf that can be compressed, as the plan is strict"
            got = f"one that can't, because {route.why_raw}"
            raise wrong(op, argument, expected, got, path=route.path, kind=ValueError if refused else TypeError)
    return Routes(op, argument, plan, tree, leaves=tuple(routes))


class Envelope(NamedTuple):
    """A message without its arrays: the numbers of its leaves, and the stages of its exchange, outermost first."""

    ids: tuple[int, ...]
    stages: tuple[Stage, ...]

    @property
    def stochastic(self) -> bool:
        return any(stage.codec.stochastic or stage.backward.stochastic for stage in self.stages)


class Kept:
    """The arrays of a `Carry` while its leaves travel: for each of `kinds` that the carry has, a list."""

    def __init__(self, carry: Carry, routes: Routes, kinds: Sequence[str] = STATE) -> None:
        self.routes: Routes = routes
        self.arrays: dict[str, list[PyTree]] = {}
        for kind in kinds:
            if (tree := getattr(carry, kind)) is not None:
                self.arrays[kind] = routes.each(tree)

    def of(self, kind: str, ids: tuple[int, ...]) -> list[jax.Array]:
        """Returns the arrays of some leaves. A leaf for which the caller gave None starts from zeros."""
        arrays = self.arrays[kind]
        return [self._zeros(kind, self.routes.leaves[i]) if arrays[i] is None else arrays[i] for i in ids]

    def _zeros(self, kind: str, route: Route) -> jax.Array:
        shape = route.factor or () if kind == "factors" else route.shape
        return jnp.zeros(shape, route.dtype if kind == "momentum" else jnp.float32)

    def state(self, envelope: Envelope) -> dict[str, list[jax.Array]]:
        """Returns the state of a message of a sum, as fields of `Message`.

        A message of raw leaves has no state if the caller gave None for all of its leaves.
        """
        codec, ids, found = envelope.stages[0].codec, envelope.ids, dict[str, list[jax.Array]]()
        for kind, arrays in self.arrays.items():
            if kind in codec.state and (not codec.raw or any(arrays[i] is not None for i in ids)):
                found[kind] = self.of(kind, ids)
        return found

    def carried(self, i: int, leaf: jax.Array) -> jax.Array:
        """Returns leaf i, which travels raw, plus its residual. The new residual is the loss of rounding the sum."""
        residuals = self.arrays.get("residuals")
        if residuals is not None and residuals[i] is not None:
            (leaf,), (residuals[i],) = carry_over([leaf], [residuals[i]])
        return leaf

    def update(self, ids: tuple[int, ...], done: Message) -> None:
        """Stores the new state of a message's leaves. If the caller gave None for a leaf, it stays None."""
        for kind, arrays in self.arrays.items():
            for i, new in zip(ids, getattr(done, kind) or ()):
                if arrays[i] is not None:
                    arrays[i] = new

    def carry(self) -> Carry:
        return Carry(**{kind: self.routes.tree.unflatten(arrays) for kind, arrays in self.arrays.items()})


class Plain(NamedTuple):
    """Leaves that go through the uncompressed collectives, or are skipped."""

    ids: tuple[int, ...]  # the numbers of the leaves. Several share a collective
    # The transport over all ranks or, outermost first, those of each axis, for leaves with Raw() for each axis.
    nets: tuple[Transport, ...]
    why: tuple[str, ...]  # the reason of each leaf, as text


@dataclasses.dataclass(frozen=True, eq=False)
class Travel:
    """How the leaves of a tree travel: messages, in the order in which they are sent, and leaves without message."""

    routes: Routes
    net: Transport
    way: Way
    envelopes: tuple[Envelope, ...]
    plain: tuple[Plain, ...]
    how: Sum

    def scope(self, ids: tuple[int, ...], bytes: int = 0) -> AbstractContextManager[object]:
        """Returns the scope of a message, which `explain` finds in the compiled program."""
        paths = tuple(jax.tree_util.keystr(self.routes.leaves[i].path) for i in ids)
        return scopes.scope(scopes.MessageScope(self.routes.op, self.net.names, paths, bytes))

    def leaf_scope(self, i: int, why: str) -> AbstractContextManager[object]:
        route, op = self.routes.leaves[i], self.routes.op
        size, path = 0 if route.skipped else route.nbytes, jax.tree_util.keystr(route.path)
        named = scopes.LeafScope(op, self.net.names, (path,), size, dtype=str(route.dtype), reason=why)
        return scopes.scope(named)

    def check_feedback(self) -> None:
        """Checks that schedules and codecs allow residuals: a rank must know the errors of its own encodings."""
        routes = self.routes
        if any(each.stages[0].schedule == "ring" for each in self.envelopes):
            expected, got = 'the schedule "two_shot" or "one_shot"', '"ring", which encodes sums of several ranks'
            remedy = 'write schedule="two_shot", or keep no residuals (keep=False)'
            raise routes.wrong(f"{expected} where residuals are kept", got, remedy)
        if any(len(each.stages) > 1 and self.way.cuts(each.ids[0]) for each in self.envelopes):
            expected = "one codec over all axes together where residuals of slices are kept"
            raise routes.wrong(expected, "a codec per axis", "write one codec, or keep no residuals")


@functools.lru_cache(maxsize=256)
def _travel(routes: Routes, net: Transport, sizes: tuple[int, ...], way: Way, backward: Routes, manual: bool) -> Travel:
    """Makes a travel. The transport has the same identity over any mesh, so its sizes are arguments, too.

    `manual`: whether no axis of the mesh is left to XLA's partitioner, which may shard leaves over it.
    """
    plan, size = routes.plan, sizes[0]
    outermost = _asked(routes, net)[0]
    hops = outermost == "tree" or isinstance(outermost, Overlay)
    _check_way(routes, way, hops)
    # Raw leaves also travel along an overlay. Over Tcp, their exchange overlaps with the program, unlike lax.psum.
    join = not way.rows and (hops or ((way.fed or net.begin_sum is not None) and outermost not in ("ring", "gather")))
    groups, plain = dict[tuple[bool, tuple[Stage, ...]], list[int]](), list[Plain]()
    for i in way.order if way.order is not None and way.slice_elements is None else range(len(routes.leaves)):
        route, cuts = routes.leaves[i], way.cuts(i)
        stages = _stages(routes, route, backward.leaves[i], net, rows=way.rows)
        codecs = [codec for stage in stages for codec in (stage.codec, stage.backward)]
        # A leaf that a guard leaves raw may be compressed by the transpose.
        idle = size == 1 and not any(codec.alone for codec in codecs)
        unfit = why_raw(route, codecs) or ("there is one rank" if idle else None)
        why = unfit and (route.why_raw or unfit)
        raw = route.dtype in DTYPES and route.size and all(codec.raw for codec in codecs)
        if route.skipped:
            plain.append(Plain((i,), (net,), ("the plan skips it",)))
        elif why is None or (raw and size > 1 and (join or (way.join and (cuts or way.rows)))):
            groups.setdefault((cuts, stages), []).append(i)
        else:
            apart = len(stages) > 1 and route.size and all(codec.raw for codec in route.codecs)
            plain.append(Plain((i,), tuple(stage.net for stage in stages) if apart else (net,), (why or "",)))
    if plan.leader and not way.rows and groups and not any(isinstance(r.codec, dict) for r in routes.leaves):
        remedy = "name several axes, and give the plan a codec for each axis, {axis: codec}"
        raise routes.wrong("leader=False without a hierarchy", "leader=True", remedy)
    envelopes = list[Envelope]()
    for (cuts, stages), ids in groups.items():
        leaves = [routes.leaves[i] for i in ids]
        chosen = _scheduled(routes, stages, net, leaves=leaves, way=way, cuts=cuts)
        limit = _message_bytes(routes, way, chosen[0], cuts)
        if way.slice_elements is not None:
            chosen = (chosen[0]._replace(net=chosen[0].net.sliced(way.slice_elements)), *chosen[1:])
        if way.deadline is not None:
            chosen = (chosen[0]._replace(net=chosen[0].net.until(way.deadline)), *chosen[1:])
        envelopes += [Envelope(tuple(ids[k] for k in part), chosen) for part in messages(leaves, limit)]
    if way.order is not None:
        turns = {i: turn for turn, i in enumerate(way.order)}
        envelopes.sort(key=lambda each: min((turns[i] for i in each.ids), default=0))
    how = Sum(own=plan.own, divisor=float(size) if way.mean else 1.0, leader=plan.leader)
    shared = _share(routes, plain, way) if envelopes and manual and not way.rows else plain
    return Travel(routes, net, way, tuple(envelopes), plain=tuple(shared), how=how)


def _message_bytes(routes: Routes, way: Way, stage: Stage, cuts: bool) -> float:
    """Returns the most bytes of a message. `stage`: its outermost stage. `cuts`: a rank gets its slices of sums."""
    plan = routes.plan
    if plan.fusion_mb is not None:
        return plan.message_bytes
    if way.slice_elements is not None:
        return 4 * way.slice_elements
    if way.order is None:
        return plan.message_bytes
    least, most = OVERLAPPING
    if cuts or not schedules.is_piecewise(stage):  # small messages pay only if the transport computes the whole sum
        return most
    return min(max(least, sum(route.nbytes for route in routes.leaves if not route.skipped) / 16), most)


def _asked(routes: Routes, net: Transport) -> list[str | Overlay]:
    """Returns the plan's schedules: one or, for a dict, one for each part of the transport, outermost first."""
    schedule = routes.plan.schedule
    return by_parts(routes, schedule, net, what="a schedule") if isinstance(schedule, dict) else [schedule]


def by_parts(routes: Routes, given: dict[PyTree, PyTree], net: Transport, what: str) -> list[PyTree]:
    """Returns the values of a plan's dict for each part of a transport, outermost first. `what` describes one."""
    parts = net.parts
    if not parts:
        remedy = f"write {what}" if net.names else "pass jaxcgx.mpi.hierarchy()"
        ranks = f"all ranks of {net.names}" if net.names else "all ranks of a communicator"
        raise routes.wrong(f"{what} for {ranks}", given, remedy)
    missing, unknown = [n for n in parts if n not in given], [n for n in given if n not in parts]
    if missing or unknown:
        problems = [(missing, "missing"), (unknown, "not among them")]
        spelled = "; ".join(f"{', '.join(map(repr, names))} {problem}" for names, problem in problems if names)
        steps = any(isinstance(n, int) for n in unknown)
        remedy = "a schedule of plans, by steps, is for compress_gradients and make_train_step" if steps else ""
        raise routes.wrong(f"{what} for each axis of {tuple(parts)}", f"{given} ({spelled})", remedy)
    return [given[name] for name in parts]


def _stages(routes: Routes, there: Route, back: Route, net: Transport, rows: bool) -> tuple[Stage, ...]:
    """Returns the stages of a leaf, outermost first: one over all ranks together or, for a dict, one for each part.

    With an overlay of the outermost part, a single codec is for this part. Gathered `rows` don't travel along overlays.
    Stages of one rank are left out. If all stages have one rank, the outermost stage stays. Schedules are chosen later.
    """
    each, others = _by_part(routes, there, net, rows), _by_part(routes, back, net, rows)
    if len(each) != len(others):  # a raw exchange over all ranks together is replaced by raw ones over each part
        flat, parts = sorted((each, others), key=len)
        if not flat[0][1].raw:
            expected = "a codec for each axis where 'plan' has one for each, and one for all where it has one for all"
            raise wrong(routes.op, "backward_plan", expected, f"{len(others)} beside {len(each)}", path=there.path)
        flat = [(part, flat[0][1]) for part, _ in parts]
        each, others = (flat, parts) if len(each) < len(others) else (parts, flat)
    stages = tuple(Stage(part, codec, "auto", other) for (part, codec), (_, other) in zip(each, others))
    for stage in stages[1:]:
        if stage.codec.low_rank:
            expected = f"{spell(stage.codec)} for the outermost axis alone or for all together"
            raise routes.wrong(expected, "it for an inner one", "over inner axes jaxcgx.Raw() sums exactly")
    return tuple(stage for stage in stages if stage.net.size > 1) or stages[:1]


def _by_part(routes: Routes, route: Route, net: Transport, rows: bool) -> list[tuple[Transport, Codec]]:
    codec, schedule = route.codec, _asked(routes, net)[0]
    if not rows and isinstance(schedule, Overlay) and schedule.is_of_outermost([x.size for x in net.parts.values()]):
        codec = codec if isinstance(codec, dict) else by_axis(tuple(net.parts), codec, Raw())
    if not isinstance(codec, dict):
        return [(net, codec)]
    return list(zip(net.parts.values(), by_parts(routes, codec, net, what="a codec")))


def _scheduled(
    routes: Routes, stages: tuple[Stage, ...], net: Transport, leaves: list[Route], way: Way, cuts: bool
) -> tuple[Stage, ...]:
    """Returns the stages of messages of these leaves, with their schedules. `cuts`: a rank gets its slices of sums."""
    if way.rows:  # straight to their ranks
        return stages
    asked = _asked(routes, net)
    parts = dict(zip(net.parts.values(), asked)) if isinstance(routes.plan.schedule, dict) else {}
    if cuts:  # straight to the owner, or a ring
        names = ["ring" if parts.get(stage.net, asked[0]) == "ring" else "one_shot" for stage in stages]
        chosen = tuple(stage._replace(schedule=name) for stage, name in zip(stages, names))
    else:
        # A leaf that a plan leaves raw also gets a stage for each axis if each axis has its own schedule.
        if parts and len(stages) < len(net.parts) and stages[0].net is net and stages[0].codec.raw:
            stages = tuple(stages[0]._replace(net=part) for part in net.parts.values())
        named = [s._replace(schedule=parts.get(s.net, "auto" if j else asked[0])) for j, s in enumerate(stages)]
        owned = way.deadline is not None or (way.fed and stages[0].codec.raw)
        if owned and named[0].schedule == "auto":  # a residual gets what is late, or the rounding of the owner's sum
            named[0] = named[0]._replace(schedule="two_shot")
        chosen = costs.scheduled(tuple(named), leaves, routes.plan)
    for stage in chosen:
        _check_hops(routes, stage)
    return chosen


def as_order(op: str, order: Sequence[int] | None, count: int) -> tuple[int, ...] | None:
    if order is None:
        return None
    # not every caller is typed
    if not isinstance(order, Sequence) or sorted(order) != list(range(count)):  # pyright: ignore[reportUnnecessaryIsInstance]
        remedy = "jaxcgx.backward_order(loss_fn, params, ...)"
        raise wrong(op, "order", f"the numbers of the {count} leaves, each once", repr(order), remedy)
    return tuple(order)


def _check_way(routes: Routes, way: Way, hops: bool) -> None:
    plan = routes.plan
    if way.rows or set(way.dims) <= {None}:
        return
    sliced = "where a rank gets only its slice of a sum"
    if plan.leader:
        raise routes.wrong(f"leader=False {sliced}", "leader=True", "every rank exchanges its own slices")
    if hops:
        expected = f'the schedule "auto", "two_shot", "one_shot" or "ring" {sliced}'
        raise routes.wrong(expected, plan.schedule, "every slice has one owner")
    if "gather" in values(plan.schedule):
        remedy = "the sums of slices are not gathered, so nothing would be compressed; write jaxcgx.Raw() as the plan"
        raise routes.wrong(f'another schedule than "gather" {sliced}', plan.schedule, remedy)
    for i, route in enumerate(routes.leaves):
        if way.cuts(i) and any(codec.low_rank for codec in route.codecs):
            remedy = "take another codec, such as jaxcgx.MaxMin(4)"
            raise routes.wrong(f"codecs of slices {sliced}", spell(route.codecs[0]), remedy, route.path)


def _check_hops(routes: Routes, stage: Stage) -> None:
    """Checks that an overlay has as many ranks as the stage, and that the codec works with the schedule."""
    schedule, ranks = stage.schedule, stage.net.size
    if isinstance(schedule, Overlay) and schedule.ranks != ranks:
        raise routes.wrong(f"an overlay of the {ranks} ranks", f"one of {schedule.ranks}")
    if schedule == "gather" and stage.codec.sparse:
        expected = f'the schedule "two_shot" or "one_shot" with {spell(stage.codec)}, which selects what a rank sends'
        raise routes.wrong(expected, '"gather", which sends everything', 'write schedule="auto"')
    hops = schedule == "ring" or (isinstance(schedule, Overlay) and schedule.depth > 1)
    if hops and stage.codec.sums_grow:  # along hops, sums must take no more bytes than leaves
        expected = f'the schedule "two_shot" or "one_shot" with {spell(stage.codec)}, whose sums grow'
        got = '"ring"' if schedule == "ring" else "trees of several levels"
        remedy = 'take a codec with pull="top"; jaxcgx.wan.Topology(shape="owners") has one level'
        raise routes.wrong(expected, got, remedy)


def _share(routes: Routes, plain: list[Plain], way: Way) -> list[Plain]:
    """Returns the leaves without message, with small leaves of the same dtype in one collective.

    Over Gloo, a collective takes milliseconds for any size. A collective of several arrays takes this time for each.
    """
    alike, others = dict[DType, list[Plain]](), list[Plain]()
    for each in plain:
        route = routes.leaves[each.ids[0]]
        small = 0 < route.nbytes <= SMALL and not route.skipped and len(each.nets) == 1 and not way.cuts(each.ids[0])
        (alike.setdefault(route.dtype, []) if small else others).append(each)
    for same in alike.values():
        others.append(Plain(tuple(p.ids[0] for p in same), same[0].nets, tuple(p.why[0] for p in same)))
    return others
