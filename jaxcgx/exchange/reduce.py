"""begin, end and reduce: the sum or the mean of a tree over ranks, in one program or in two."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from jaxcgx import _compat
from jaxcgx.checks import check_varying, spell_array, warn, wrong
from jaxcgx.codecs.base import Codec
from jaxcgx.codecs.raw import Raw
from jaxcgx.codecs.spelling import spell
from jaxcgx.exchange import hierarchy, primitive, row_primitives, scopes, sums
from jaxcgx.exchange.carry import Carry
from jaxcgx.exchange.keys import fold, fold_stage
from jaxcgx.exchange.message import STATE, Message, Sum
from jaxcgx.exchange.message import carry as carry_over
from jaxcgx.exchange.routes import Envelope, Plain, Routes, Travel, Way
from jaxcgx.native.layout import DTYPES
from jaxcgx.plan import Plan
from jaxcgx.transports.base import Transport, join_rows, split_rows
from jaxcgx.typing import Key, PyTree


@functools.partial(jax.tree_util.register_dataclass, data_fields=["begun", "held", "key"], meta_fields=["travel"])
@dataclasses.dataclass(frozen=True)
class Ticket:
    """A sum that has begun. It must be ended once, in this program or, with `Way.later`, in a later one.

    Attributes:
      begun: {number of the envelope: sum on its way}.
      held: {number of the leaf: leaf that `end` sends}.
      key: the key of the noise.
      travel: how the leaves travel.
    """

    begun: dict[int, PyTree]
    held: dict[int, jax.Array]
    key: Key | None
    travel: Travel


class _Kept:
    """The arrays of a `Carry` while its leaves are summed, as a list for each kind that the carry has."""

    arrays: dict[str, list[PyTree]]

    def __init__(self, carry: Carry, routes: Routes) -> None:
        self.routes, self.arrays = routes, {}
        for kind in STATE:
            if (tree := getattr(carry, kind)) is not None:
                self.arrays[kind] = routes.each(tree)

    def of(self, ids: tuple[int, ...], leaves: list[jax.Array], codec: Codec) -> dict[str, list[jax.Array]]:
        """Returns the state of a message's leaves. A leaf for which the caller gave None starts from zeros."""
        state: dict[str, list[jax.Array]] = {}
        for kind, arrays in self.arrays.items():
            if kind in codec.state:
                given = [arrays[i] for i in ids]
                state[kind] = [self._zeros(kind, i, x) if a is None else a for i, a, x in zip(ids, given, leaves)]
        return state

    def _zeros(self, kind: str, i: int, x: jax.Array) -> jax.Array:
        if kind == "momentum":
            return jnp.zeros_like(x)
        return jnp.zeros(self.routes.leaves[i].factor or () if kind == "factors" else x.shape, jnp.float32)

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


def hold(x: PyTree, travel: Travel, key: Key | None) -> Ticket:
    """Returns the ticket of a sum of which nothing has begun: `end` sends everything."""
    return Ticket({}, dict(enumerate(travel.routes.tree.flatten_up_to(x))), key, travel)


def begin(x: PyTree, carry: Carry, travel: Travel, key: Key | None) -> tuple[Ticket, Carry]:
    """Begins the sum. It has no derivative: `reduce` has one.

    Over transports whose exchanges can't cross programs, and where a codec has no kernels that do it, `end` sends what
    the ticket holds.

    Args:
      x: the tree.
      carry: what the sums before kept.
      travel: how the tree travels.
      key: two words, or None if no codec draws noise.

    Returns:
      (the ticket, the carry for `end`).
    """
    ticket, kept = hold(x, travel, key), _Kept(carry, travel.routes)
    if not travel.crosses:
        return ticket, carry
    for m, envelope in enumerate(travel.envelopes):
        with message_scope(travel, envelope.ids):
            message = primitive.match_varying(_message(envelope, ticket, kept), travel.net)
            begun = None if travel.way.cuts(envelope.ids[0]) else sums.begin(message, envelope.stages, travel.how)
        if begun is None:
            continue
        kept.update(envelope.ids, message.replace(residuals=begun.residuals))
        ticket.begun[m] = dataclasses.replace(begun, residuals=None)  # they are in the carry
        for i in envelope.ids:
            del ticket.held[i]
    return ticket, kept.carry()


def end(ticket: Ticket, carry: Carry) -> tuple[PyTree, Carry]:
    """Ends the sum. Returns (sums, carry)."""
    travel = ticket.travel
    routes, found, kept = travel.routes, dict[int, jax.Array](), _Kept(carry, travel.routes)
    for m in reversed(ticket.begun):  # the last to begin has the first layers, which the next step needs first
        ids, begun = travel.envelopes[m].ids, ticket.begun[m]
        if "residuals" in kept.arrays:
            rows = [kept.arrays["residuals"][i] for i in ids]
            rows = [jnp.zeros(s, jnp.float32) if r is None else r for r, s in zip(rows, begun.layout.shapes)]
            begun = dataclasses.replace(begun, residuals=rows)
        leaves, residuals = sums.end(begun, travel.way.later)
        found |= {i: sums.same(x, travel.net.names) for i, x in zip(ids, leaves)}
        kept.update(ids, Message(ids, [], residuals=residuals))
    for plain in travel.plain:
        found |= _plain(plain, ticket, kept)
    for m, envelope in enumerate(travel.envelopes):
        if m not in ticket.begun:
            message, cuts = _message(envelope, ticket, kept), travel.way.cuts(envelope.ids[0])
            with message_scope(travel, envelope.ids):
                done = _scatter(travel, envelope, message) if cuts else send(travel, envelope, message)
            found |= dict(zip(envelope.ids, done.leaves))
            kept.update(envelope.ids, done)
    return routes.tree.unflatten([found[i] for i in range(len(routes.leaves))]), kept.carry()


def reduce(x: PyTree, carry: Carry, travel: Travel, key: Key | None) -> tuple[PyTree, Carry]:
    """Returns (sums, carry). It can be differentiated: linearization ignores compression."""
    return end(hold(x, travel, key), carry)


def plain_reduce(op: str, x: PyTree, net: Transport, *, mean: bool) -> PyTree:
    """Returns the uncompressed sum or mean over the ranks of a step's own numbers, such as its loss."""
    x = jax.tree_util.tree_map(lambda leaf: _compat.vary(jnp.asarray(leaf), _compat.tracked_axes(net.names)), x)
    mesh = jax.sharding.get_abstract_mesh()
    manual = all(name in mesh.manual_axes for name, size in mesh.shape.items() if size > 1)
    if net.begin_sum and manual:  # over Tcp, numbers travel like gradients: errors of lax's collectives name no rank
        return reduce(x, Carry(), Routes.of(op, Plan.every(Raw()), x).over(net, Way(mean=mean)), None)[0]
    total = net.plain_pmean if mean else net.plain_psum

    def of_leaf(leaf: jax.Array) -> jax.Array:
        if manual or not jnp.issubdtype(leaf.dtype, jnp.floating) or leaf.dtype.itemsize > 2:
            return total(leaf)
        # XLA on CPUs aborts when it compiles a sum of 16-bit numbers beside axes that are left to its partitioner.
        return total(leaf.astype(jnp.float32)).astype(leaf.dtype)

    return jax.tree_util.tree_map(of_leaf, x)


def check_input(x: PyTree, carry: Carry, travel: Travel, argument: str = "x") -> None:
    """Checks that leaves vary over the ranks, and that a carry fits them.

    Args:
      x: the tree.
      carry: what the caller says that the sums before kept.
      travel: how the tree travels.
      argument: the name of the tree in errors.
    """
    routes = travel.routes
    leaves = [(r.path, leaf) for r, leaf in zip(routes.leaves, routes.each(x)) if not r.skipped]
    check_varying(routes.op, travel.net.names, [path for path, _ in leaves], [leaf for _, leaf in leaves], argument)
    check_carry(carry, travel, argument)


def check_carry(carry: Carry, travel: Travel, argument: str) -> None:
    """Checks that a carry fits the leaves, and that the plan allows feedback. `argument` is as in `check_input`."""
    routes = travel.routes
    shapes = {
        "residuals": [f"float32{list(r.shape)}" if r.dtype in DTYPES else "None" for r in routes.leaves],
        "momentum": [spell_array(r) for r in routes.leaves],
        "factors": ["None" if r.factor is None else f"float32{list(r.factor)}" for r in routes.leaves],
    }
    if carry.momentum is not None and carry.residuals is None:
        raise wrong(routes.op, "carry.residuals", f"a tree like {argument} with momentum", None)
    for kind, expected in shapes.items():
        tree, name = getattr(carry, kind), f"carry.{kind}"
        try:
            found = routes.each(tree)
        except (TypeError, ValueError):
            got = jax.tree_util.tree_structure(tree)
            raise wrong(routes.op, name, f"a tree like {argument}, {routes.tree}", got) from None
        for route, array, shape in zip(routes.leaves, found, expected):
            if array is not None and spell_array(array) != shape:
                raise wrong(routes.op, name, f"{shape} for {spell_array(route)}", spell_array(array), path=route.path)
            if array is not None and kind == "momentum" and route.encoded and kind not in route.codecs[0].state:
                what = f"None for a leaf whose every element is sent, with {spell(route.codecs[0])}"
                raise wrong(routes.op, name, what, "an array", "take jaxcgx.TopK", path=route.path)
            if array is not None and kind == "factors" and (got := _varying(array, travel.net)):
                remedy = "pass on what the call before returned, through P() in shard_map's specs"
                raise wrong(routes.op, name, "the same array on every rank", got, remedy, path=route.path)
    if carry.residuals is not None:
        travel.check_feedback()
        _warn_of_growth(travel)
        if _compat.replicating_pmap():
            warn(
                f"{routes.op}: argument 'carry': residuals differ from rank to rank, but pmap's out_axes=None says "
                "that its results don't; a checkpoint would have those of one device; write out_axes=0 for them"
            )


def _varying(x: jax.Array, net: Transport) -> str:
    axes = [name for name in net.names if name in _compat.varying_axes(x)]
    return f"one that varies over {', '.join(map(repr, axes))}" if axes else ""


def _warn_of_growth(travel: Travel) -> None:
    """Warns about codecs whose residuals grow without bound."""
    for codec in dict.fromkeys(each.stages[0].codec for each in travel.envelopes):
        if not codec.contracts:
            warn(
                f"{travel.routes.op}: argument 'plan': residuals of {spell(codec)} grow without bound, because its "
                "error is larger than its input; take more bits, smaller buckets, rounding to nearest, or jaxcgx.Sign"
            )


def message_scope(travel: Travel, ids: tuple[int, ...]) -> PyTree:
    """Returns the scope of a message, which `explain` finds in the compiled program."""
    paths = tuple(jax.tree_util.keystr(travel.routes.leaves[i].path) for i in ids)
    return scopes.scope(scopes.MessageScope(travel.routes.op, travel.net.names, paths))


def _message(envelope: Envelope, ticket: Ticket, kept: _Kept) -> Message:
    ids, key = envelope.ids, ticket.key if envelope.stochastic else None
    leaves = [ticket.held[i] for i in ids]
    message = Message(_numbers(ids, ticket.travel), leaves, key)
    return message.replace(**kept.of(ids, leaves, envelope.stages[0].codec))


def _numbers(ids: tuple[int, ...], travel: Travel) -> tuple[int, ...]:
    """Returns the numbers of leaves that their noise depends on. Whole and sliced leaves are counted apart."""
    if not travel.way.dims:
        return ids
    cuts = [travel.way.cuts(i) and not route.skipped for i, route in enumerate(travel.routes.leaves)]
    alike = [i for i, cut in enumerate(cuts) if cut == cuts[ids[0]]]
    return tuple(alike.index(i) for i in ids)


def send(travel: Travel, envelope: Envelope, message: Message) -> Message:
    """Returns the sums of a message of whole leaves, with its new state."""
    tracked = bool(_compat.tracked_axes(travel.net.names))
    return sums.psum(message, net=travel.net, stages=envelope.stages, how=travel.how, tracked=tracked)


def _scatter(travel: Travel, envelope: Envelope, message: Message) -> Message:
    """Returns this rank's slices of the sums of a message. Its new residuals are those of whole leaves."""
    stages, size, way = envelope.stages, travel.net.size, travel.way
    dims = [way.dims[i] or 0 for i in envelope.ids]

    def cut(arrays: list[jax.Array]) -> list[jax.Array]:
        rows = [split_rows(x, d, size=size, tiled=way.tiled) for x, d in zip(arrays, dims)]
        return [x.reshape(*(stage.net.size for stage in stages), *x.shape[1:]) for x in rows]

    parts = message.replace(leaves=cut(message.leaves), residuals=message.residuals and cut(message.residuals))
    key = fold(message.key, 0)
    for j, stage in reversed(list(enumerate(stages))):
        others = stages[:j] + stages[j + 1 :]
        words = fold_stage(key, j, others) if others else key
        part = parts.replace(key=words, leaves=[jnp.moveaxis(x, j, 0) for x in parts.leaves])
        how = Sum(travel.how.own, 1.0 if j else travel.how.divisor)
        parts = row_primitives.psum_scatter(part, stage, how)
    if parts.residuals is None:
        return parts
    return parts.replace(residuals=[join_rows(x, d, way.tiled) for x, d in zip(parts.residuals, dims)])


def leaf_scope(travel: Travel, i: int, why: str) -> PyTree:
    """Returns the scope of a leaf without message."""
    route, op = travel.routes.leaves[i], travel.routes.op
    size, path = 0 if route.skipped else route.nbytes, jax.tree_util.keystr(route.path)
    return scopes.scope(scopes.LeafScope(op, travel.net.names, path, dtype=str(route.dtype), bytes=size, reason=why))


def _plain(plain: Plain, ticket: Ticket, kept: _Kept) -> dict[int, jax.Array]:
    """Returns {number of the leaf: sum} of leaves without message."""
    travel, (i, *others) = ticket.travel, plain.ids
    if not others:
        with leaf_scope(travel, i, plain.why[0]):
            leaf = ticket.held[i]
            return {i: plain_sum(travel, plain, leaf if travel.routes.leaves[i].skipped else kept.carried(i, leaf))}
    found: dict[int, jax.Array] = {}
    leaves = {i: kept.carried(i, ticket.held[i]) for i in plain.ids}
    alike = dict[frozenset[str], list[int]]()
    for i, leaf in leaves.items():  # under check_vma, an array has one set of axes that it varies over
        alike.setdefault(_compat.varying_axes(leaf), []).append(i)
    for ids in alike.values():
        flat = jnp.concatenate([leaves[i].reshape(-1) for i in ids])
        paths = tuple(jax.tree_util.keystr(travel.routes.leaves[i].path) for i in ids)
        with scopes.scope(scopes.MessageScope(travel.routes.op, travel.net.names, paths, bytes=flat.nbytes)):
            total = plain_sum(travel, plain, flat)
        parts = jnp.split(total, np.cumsum([leaves[i].size for i in ids[:-1]]))
        for i, part in zip(ids, parts):
            with leaf_scope(travel, i, plain.why[plain.ids.index(i)]):
                found[i] = checkpoint_name(part.reshape(leaves[i].shape), scopes.JOINED)  # a name that `explain` finds
    return found


def plain_sum(travel: Travel, plain: Plain, leaf: jax.Array) -> jax.Array:
    """Returns the uncompressed sum of a leaf, or of leaves that share a collective. A skipped leaf gives zeros.

    A leaf with a Raw() for each axis is summed over one axis after another. A single exchange over all ranks would send
    more bytes over the outermost axis, the slow network.
    """
    net, way, i = travel.net, travel.way, plain.ids[0]
    if travel.routes.leaves[i].skipped:
        return checkpoint_name(jnp.zeros(leaf.shape, leaf.dtype), scopes.SKIPPED)  # a name that `explain` finds
    if way.cuts(i):
        total = net.plain_psum_scatter(leaf, way.dims[i] or 0, way.tiled)
        return total / net.size if way.mean else total
    if len(plain.nets) > 1:
        total = hierarchy.plain_psum(plain.nets, leaf, tracked=bool(_compat.tracked_axes(net.names)))
        return total / net.size if way.mean else total
    return net.plain_pmean(leaf) if way.mean else net.plain_psum(leaf)
