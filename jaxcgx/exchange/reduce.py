"""begin, end, reduce: the mean of a tree over the ranks, in one program or in two."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxcgx import _compat
from jaxcgx.exchange import row_primitives, sums
from jaxcgx.exchange.keys import fold
from jaxcgx.exchange.message import Message, Stage
from jaxcgx.exchange.message import carry as carried
from jaxcgx.transports.base import join_rows, split_rows
from jaxcgx.exchange.routes import Travel
from jaxcgx.exchange.carry import Carry
from jaxcgx.typing import Key, PyTree

KINDS = ("residuals", "momentum", "factors")


@functools.partial(jax.tree_util.register_dataclass, data_fields=["begun", "held", "key"], meta_fields=["travel"])
@dataclasses.dataclass(frozen=True)
class Ticket:
    """A mean that has begun. `begun` are sums on their way, by message; `held` are leaves that `end` sends."""

    begun: dict[int, PyTree]
    held: dict[int, jax.Array]
    key: Key | None
    travel: Travel


def begin(x: PyTree, carry: Carry, travel: Travel, key: Key | None) -> tuple[Ticket, Carry]:
    """Begins the mean. What can't go on while later programs run is sent by `end`."""
    leaves, state = travel.routes.tree.flatten_up_to(x), _lists(carry, travel)
    begun, held = dict[int, PyTree](), dict(enumerate(leaves))
    for m, (ids, stages) in enumerate(travel.messages):
        started = sums.begin(_message(travel, m, leaves, state, key), stages, travel.how) if travel.crosses else None
        if started is None:
            continue
        begun[m] = dataclasses.replace(started, residuals=None)  # they are in the carry
        for k, i in enumerate(ids):
            del held[i]
            if started.residuals is not None:
                state["residuals"][i] = started.residuals[k]
    return Ticket(begun, held, key, travel), _carry(state, carry, travel)


def end(ticket: Ticket, carry: Carry) -> tuple[PyTree, Carry]:
    """Ends the mean. Returns (mean, carry)."""
    travel = ticket.travel
    state, found = _lists(carry, travel), dict[int, jax.Array]()
    for m in reversed(ticket.begun):  # the last to begin has the first layers, which the next step needs first
        ids, begun = travel.messages[m][0], ticket.begun[m]
        if carry.residuals is not None:
            rows = [state["residuals"][i] for i in ids]
            rows = [jnp.zeros(s, jnp.float32) if r is None else r for r, s in zip(rows, begun.layout.shapes)]
            begun = dataclasses.replace(begun, residuals=rows)
        leaves, lost = sums.end(begun)
        _store(ids, leaves, {"residuals": lost}, found, state)
    for ids in travel.raw:
        _plain(ids, ticket.held, travel, found, state)
    for m, (ids, stages) in enumerate(travel.messages):
        if m not in ticket.begun:
            message = _message(travel, m, ticket.held, state, ticket.key)
            done = sums.psum(message, net=travel.net, stages=stages, how=travel.how, tracked=_tracked(travel))
            _store(ids, done.leaves, {k: getattr(done, k) for k in KINDS}, found, state)
    for ids, stage in travel.scattered:
        _scatter(ids, stage, ticket, found, state)
    mean = travel.routes.tree.unflatten([found[i] for i in range(len(found))])
    return mean, _carry(state, carry, travel)


def reduce(x: PyTree, carry: Carry, travel: Travel, key: Key | None) -> tuple[PyTree, Carry]:
    return end(*begin(x, carry, travel, key))


def _scatter(ids: tuple[int, ...], stage: Stage, ticket: Ticket, found: dict, state: dict) -> None:
    """Stores this rank's slices of the means. Residuals stay those of whole leaves."""
    dims, size = [ticket.travel.dims[i] for i in ids], ticket.travel.net.size
    cut = lambda arrays: [split_rows(x, d, size=size, tiled=True) for x, d in zip(arrays, dims)]
    rows = [state["residuals"][i] for i in ids]
    fed = any(r is not None for r in rows)
    rows = [jnp.zeros(ticket.held[i].shape, jnp.float32) if r is None else r for i, r in zip(ids, rows)]
    key = fold(ticket.key, 0) if stage.codec.stochastic else None
    message = Message(_numbers(ids, ticket.travel), cut([ticket.held[i] for i in ids]), key, residuals=cut(rows) if fed else None)
    done = row_primitives.psum_scatter(message, stage, ticket.travel.how)
    lost = [join_rows(x, d, True) for x, d in zip(done.residuals, dims)] if fed else None
    _store(ids, done.leaves, {"residuals": lost}, found, state)


def _plain(ids: tuple[int, ...], held: dict[int, jax.Array], travel: Travel, found: dict, state: dict) -> None:
    """Sums raw leaves together. A leaf that the plan skips gives zeros."""
    if travel.routes.leaves[ids[0]].skipped:
        return found.update({i: jnp.zeros_like(held[i]) for i in ids})
    leaves = [held[i] for i in ids]
    for k, i in enumerate(ids):  # another phase of the plan compresses it
        if (r := state["residuals"][i]) is not None:
            (leaves[k],), (state["residuals"][i],) = carried([leaves[k]], [r])
    if len(ids) == 1:
        return found.update({ids[0]: travel.net.plain_pmean(leaves[0])})
    flat = travel.net.plain_pmean(jnp.concatenate([x.reshape(-1) for x in leaves]))
    parts = jnp.split(flat, np.cumsum([x.size for x in leaves[:-1]]))
    found.update({i: p.reshape(x.shape) for i, p, x in zip(ids, parts, leaves)})


def _message(travel: Travel, m: int, leaves: PyTree, state: dict, key: Key | None) -> Message:
    ids, stages = travel.messages[m]
    codec = stages[0].codec
    noise = key if any(c.stochastic for s in stages for c in (s.codec, s.backward)) else None
    kept = {}
    for kind in KINDS:
        if state[kind] != [None] * len(state[kind]) and kind in codec.state:
            fresh = lambda i: jnp.zeros(leaves[i].shape, jnp.float32 if kind == "residuals" else leaves[i].dtype)
            kept[kind] = [fresh(i) if state[kind][i] is None else state[kind][i] for i in ids]
    return Message(_numbers(ids, travel), [leaves[i] for i in ids], noise, **kept)


def _numbers(ids: tuple[int, ...], travel: Travel) -> tuple[int, ...]:
    """Returns the numbers of leaves that their noise depends on: whole and scattered leaves are counted apart."""
    if not travel.dims:
        return ids
    cut = travel.dims[ids[0]] is None
    alike = [i for i, d in enumerate(travel.dims) if (d is None) == cut]
    return tuple(alike.index(i) for i in ids)


def _store(ids: tuple[int, ...], leaves: list, new: dict, found: dict, state: dict) -> None:
    for k, i in enumerate(ids):
        found[i] = leaves[k]
        for kind, arrays in new.items():
            if arrays and state[kind][i] is not None:
                state[kind][i] = arrays[k]


def _lists(carry: Carry, travel: Travel) -> dict[str, list]:
    return {kind: travel.routes.each(getattr(carry, kind)) for kind in KINDS}


def _carry(state: dict, like: Carry, travel: Travel) -> Carry:
    tree = travel.routes.tree
    return Carry(**{k: None if getattr(like, k) is None else tree.unflatten(state[k]) for k in KINDS})


def _tracked(travel: Travel) -> bool:
    return bool(_compat.tracked_axes(travel.net.names))
