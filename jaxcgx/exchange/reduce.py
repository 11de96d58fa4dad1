"""begin, end and reduce: the sum or the mean of a tree over ranks, in one program or in two."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from jaxcgx import _compat
from jaxcgx.checks import check_varying, spell_array, warn, wrong
from jaxcgx.codecs.base import spell
from jaxcgx.codecs.raw import Raw
from jaxcgx.exchange import hierarchy, primitives, rows, scopes
from jaxcgx.exchange.message import ENDS, STATE, BegunMessage, Carry, Message
from jaxcgx.exchange.routes import Envelope, Kept, Plain, Routes, Travel, Way
from jaxcgx.native.layout import DTYPES
from jaxcgx.plan import Plan
from jaxcgx.plan.leaves import Route
from jaxcgx.transports.base import Transport
from jaxcgx.typing import STATIC, Key, PyTree


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Ticket:
    """A sum that has begun. It must be ended once, in this program or, with `Way.later`, in a later one."""

    begun: dict[int, BegunMessage]  # {number of the envelope: its message on its way}
    held: dict[int, jax.Array]  # {number of the leaf: leaf that `end` sends}
    key: Key | None  # the key of the noise
    travel: Travel = dataclasses.field(metadata=STATIC)


def _hold(x: PyTree, travel: Travel, key: Key | None) -> Ticket:
    """Returns the ticket of a sum of which nothing has begun: `end` sends everything."""
    return Ticket({}, dict(enumerate(travel.routes.each(x))), key, travel)


def begin(x: PyTree, carry: Carry, travel: Travel, key: Key | None) -> tuple[Ticket, Carry]:
    """Begins the sum. It has no derivative: `reduce` has one.

    Over transports whose exchanges can't cross programs, and where a codec has no kernels that do it, `end` sends what
    the ticket holds. The key is two words, or None if no codec draws noise. Returns (the ticket, the carry for `end`).
    """
    ticket, kept = _hold(x, travel, key), Kept(carry, travel.routes)
    if travel.net.begin_sum is None:
        return ticket, carry
    for m, envelope in enumerate(travel.envelopes):
        if travel.way.cuts(envelope.ids[0]) or not hierarchy.can_begin(envelope.stages, travel.how):
            continue
        leaves = [ticket.held.pop(i) for i in envelope.ids]
        with travel.scope(envelope.ids):
            message = primitives.match_varying(_message(envelope, leaves, ticket, kept), travel.net)
            begun, message = hierarchy.begin(envelope.stages, message, travel.how)
        kept.update(envelope.ids, message)
        if travel.way.order is not None:  # other messages are ready only later, so the one before goes on meanwhile
            _advance(ticket, kept)
        ticket.begun[m] = begun
    return ticket, kept.carry()


def _advance(ticket: Ticket, kept: Kept, later: bool = False) -> None:
    """Begins the second rounds of all messages whose first has begun. `later`: as in `hierarchy.end`."""
    travel = ticket.travel
    for m, begun in ticket.begun.items():
        if begun.more:
            envelope = travel.envelopes[m]
            with travel.scope(envelope.ids):
                message = _message(envelope, _types(envelope, travel), ticket, kept)
                ticket.begun[m], message = hierarchy.advance(begun, envelope.stages, message, travel.how, later=later)
            kept.update(envelope.ids, message)


def end(ticket: Ticket, carry: Carry) -> tuple[PyTree, Carry]:
    travel = ticket.travel
    routes, found, kept = travel.routes, dict[int, jax.Array](), Kept(carry, travel.routes)
    ticket = dataclasses.replace(ticket, begun=dict(ticket.begun))
    if ticket.begun:
        _advance(ticket, kept, travel.way.later)
    for m in reversed(ticket.begun):  # the last to begin has the first layers, which the next step needs first
        envelope = travel.envelopes[m]
        with travel.scope(envelope.ids):
            message = _message(envelope, _types(envelope, travel), ticket, kept)
            done = hierarchy.end(ticket.begun[m], envelope.stages, message, travel.how, later=travel.way.later)
        done = primitives.shared(done, travel.net.names)
        found |= dict(zip(envelope.ids, done.leaves))
        kept.update(envelope.ids, done)
    for plain in travel.plain:
        found |= _plain(plain, ticket, kept)
    for m, envelope in enumerate(travel.envelopes):
        if m not in ticket.begun:
            message = _message(envelope, [ticket.held[i] for i in envelope.ids], ticket, kept)
            with travel.scope(envelope.ids):
                if travel.way.cuts(envelope.ids[0]):
                    done = rows.scatter(message, envelope, travel)
                else:
                    done = primitives.psum(message, travel.net, envelope.stages, travel.how)
            found |= dict(zip(envelope.ids, done.leaves))
            kept.update(envelope.ids, done)
    return routes.tree.unflatten([found[i] for i in range(len(routes.leaves))]), kept.carry()


def reduce(x: PyTree, carry: Carry, travel: Travel, key: Key | None) -> tuple[PyTree, Carry]:
    """Returns (sums, carry). It can be differentiated: linearization ignores compression."""
    return end(_hold(x, travel, key), carry)


def plain_reduce(op: str, x: PyTree, net: Transport, *, mean: bool) -> PyTree:
    """Returns the uncompressed sum or mean over the ranks of a step's own numbers, such as its loss."""
    x = _compat.vary_over(jax.tree.map(jnp.asarray, x), net.names)
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

    return jax.tree.map(of_leaf, x)


def travel_with(
    carry: Carry,
    routes: Routes,
    net: Transport,
    way: Way,
    *,
    x: PyTree = None,
    argument: str = "x",
    backward: Routes | None = None,
) -> Travel:
    """Returns how a tree travels with a carry, after a check that the carry fits it and that the plan allows feedback.

    The leaves of `x` must vary over the ranks. Errors call the tree `argument`. `backward`: as in `Routes.over`.
    """
    _check_trees(carry, routes, argument, way)
    pairs = zip(routes.leaves, routes.each(carry.residuals))
    fed = any(r is not None and route.why_raw is not None and route.dtype.itemsize == 2 for route, r in pairs)
    travel = routes.over(net, way._replace(fed=fed and not way.dims), backward)
    if x is not None:
        leaves = [(route.path, leaf) for route, leaf in zip(routes.leaves, routes.each(x)) if not route.skipped]
        check_varying(routes.op, net.names, [path for path, _ in leaves], [leaf for _, leaf in leaves], argument)
    _check_carry(carry, travel)
    return travel


def _check_trees(carry: Carry, routes: Routes, argument: str, way: Way) -> None:
    if carry.momentum is not None and carry.residuals is None:
        raise wrong(routes.op, "carry.residuals", f"a tree like {argument} with momentum", None)
    if (carry.sent is None) != (carry.received is None):
        raise wrong(routes.op, "carry", "both sent and received, or neither", "one of them", "jaxcgx.init_carry")
    for kind in (*STATE, *ENDS):
        tree = getattr(carry, kind)
        if tree is not None and way.rows != (kind in ENDS):
            expected = f"None: {'sums' if kind in STATE else 'permutations'} have it"
            raise wrong(routes.op, f"carry.{kind}", expected, "a tree")
        try:
            routes.each(tree)
        except (TypeError, ValueError):
            got = jax.tree.structure(tree)
            raise wrong(routes.op, f"carry.{kind}", f"a tree like {argument}, {routes.tree}", got) from None


def _check_carry(carry: Carry, travel: Travel) -> None:
    routes = travel.routes
    for kind in (*STATE, *ENDS):
        for route, array in zip(routes.leaves, routes.each(getattr(carry, kind))):
            if array is not None or (kind in ENDS and route.encoded and getattr(carry, kind) is not None):
                _check_array(travel, kind, route, array)
    if carry.residuals is None and carry.sent is None:
        return
    what = "residuals" if carry.sent is None else "differences"
    if carry.residuals is not None:
        travel.check_feedback()
    if _compat.replicating_pmap():
        warn(
            f"{routes.op}: argument 'carry': {what} differ from rank to rank, but pmap's out_axes=None says that "
            "its results don't; a checkpoint would have those of one device; write out_axes=0 for them"
        )
    for codec in {each.stages[0].codec: None for each in travel.envelopes}:
        if not codec.contracts:
            why = f"{what} of {spell(codec)} grow without bound, because its error is larger than its input"
            remedy = "take more bits, smaller buckets, rounding to nearest, or jaxcgx.Eden"
            warn(f"{routes.op}: argument '{routes.argument}': {why}; {remedy}")


def _check_array(travel: Travel, kind: str, route: Route, array: jax.Array | None) -> None:
    op, name = travel.routes.op, f"carry.{kind}"
    if kind == "momentum":
        expected = spell_array(route)
    elif kind == "factors":
        expected = "None" if route.factor is None else f"float32{list(route.factor)}"
    else:
        expected = f"float32{list(route.shape)}" if route.dtype in DTYPES else "None"
    if spell_array(array) != expected:
        raise wrong(op, name, f"{expected} for {spell_array(route)}", spell_array(array), path=route.path)
    if kind == "momentum" and route.encoded and kind not in route.codecs[0].state:
        expected = f"None for a leaf whose every element is sent, with {spell(route.codecs[0])}"
        raise wrong(op, name, expected, "an array", "take jaxcgx.TopK", path=route.path)
    axes = _compat.varying_axes(array).intersection(travel.net.names) if kind == "factors" else ()
    if axes:
        got = f"one that varies over {', '.join(repr(axis) for axis in travel.net.names if axis in axes)}"
        remedy = "pass on what the call before returned, through P() in shard_map's specs"
        raise wrong(op, name, "the same array on every rank", got, remedy, path=route.path)


def _message(envelope: Envelope, leaves: list[Any], ticket: Ticket, kept: Kept) -> Message:
    key = ticket.key if envelope.stochastic else None
    return Message(_numbers(envelope.ids, ticket.travel), leaves, key).replace(**kept.state(envelope))


def _types(envelope: Envelope, travel: Travel) -> list[Any]:
    routes = [travel.routes.leaves[i] for i in envelope.ids]
    return [jax.ShapeDtypeStruct(route.shape, route.dtype) for route in routes]


def _numbers(ids: tuple[int, ...], travel: Travel) -> tuple[int, ...]:
    """Returns the numbers of leaves that their noise depends on. Whole and sliced leaves are counted apart."""
    if not travel.way.dims:
        return ids
    cuts = [travel.way.cuts(i) and not route.skipped for i, route in enumerate(travel.routes.leaves)]
    alike = [i for i, cut in enumerate(cuts) if cut == cuts[ids[0]]]
    return tuple(alike.index(i) for i in ids)


def _plain(plain: Plain, ticket: Ticket, kept: Kept) -> dict[int, jax.Array]:
    """Returns {number of the leaf: sum} of leaves without message."""
    travel, (i, *others) = ticket.travel, plain.ids
    if not others:
        with travel.leaf_scope(i, plain.why[0]):
            leaf = ticket.held[i]
            return {i: plain_sum(travel, plain, leaf if travel.routes.leaves[i].skipped else kept.carried(i, leaf))}
    found: dict[int, jax.Array] = {}
    leaves = {i: kept.carried(i, ticket.held[i]) for i in plain.ids}
    alike = dict[frozenset[str], list[int]]()
    for i, leaf in leaves.items():  # under check_vma, an array has one set of axes that it varies over
        alike.setdefault(_compat.varying_axes(leaf), []).append(i)
    for ids in alike.values():
        flat = jnp.concatenate([leaves[i].reshape(-1) for i in ids])
        with travel.scope(tuple(ids), bytes=flat.nbytes):
            total = plain_sum(travel, plain, flat)
        parts = jnp.split(total, np.cumsum([leaves[i].size for i in ids[:-1]]))
        for i, part in zip(ids, parts):
            with travel.leaf_scope(i, plain.why[plain.ids.index(i)]):
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
