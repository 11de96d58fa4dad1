"""A step of differential transmission: exchanges important blocks now, and treats the others as `rest` says."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap

from jaxcgx import _compat
from jaxcgx.checks import wrong
from jaxcgx.codecs.maxmin import MaxMin
from jaxcgx.codecs.raw import Raw
from jaxcgx.exchange.carry import Carry
from jaxcgx.exchange.keys import fold
from jaxcgx.exchange.message import carry
from jaxcgx.exchange.reduce import Ticket, begin, check_input, end, plain_reduce, reduce
from jaxcgx.exchange.routes import Routes, Travel
from jaxcgx.plan import Plan
from jaxcgx.plan.by_axis import by_axis
from jaxcgx.plan.phases import switch
from jaxcgx.train.division import after
from jaxcgx.train.exchange import At
from jaxcgx.train.state import ExchangeState
from jaxcgx.typing import Key, PyTree
from jaxcgx.wan.geomx.blocks import Arrays, Blocks, add, each, line, put, take
from jaxcgx.wan.parts import plan_of_parts

if TYPE_CHECKING:
    from jaxcgx.wan.geomx.differential import Differential

T = TypeVar("T")
SHORT = MaxMin(4)  # the codec of the other blocks with rest="quantize"
LATE, NOW, REST, CHOICE = range(4)  # the key of a step is folded with these numbers


class Sent(NamedTuple):
    """The mean and the residual of each leaf after an exchange. For a leaf that is cut, both are blocks.

    Before an exchange, `means` has this rank's gradients.
    """

    means: Arrays
    residuals: Arrays  # None for a leaf without residuals


class Late(NamedTuple):
    """The exchange of deferred blocks, which has begun."""

    ticket: Ticket
    carry: Carry


class Transmission:
    """One step for all leaves. Each list has an entry for each leaf; None means that the leaf has no such value.

    XLA runs the exchanges of a conditional at the same time as other exchanges of the program, in an order that differs
    from rank to rank, unless one needs a result of the other. So every conditional with exchanges depends on `turn`,
    the number of steps so far, which depends on the exchanges before.
    """

    def __init__(self, how: "Differential", state: ExchangeState, at: At, tree: PyTree) -> None:
        """`tree` has the gradients, or arrays like them if the step only begins."""
        self.how, self.at, self.own, self.shared = how, at, state.own, state.shared
        routes = how.routes(tree)
        self.tree, self.cut, self.turn = routes[0].tree, how.cut(routes[0]), state.shared.count
        self.plans = [plan_of_parts(each) for each in routes]
        self.gradients = [x if b is None else b.split(x) for b, x in zip(self.cut, self.tree.flatten_up_to(tree))]
        residuals = self.list(self.own.residuals)
        self.residuals = [r if b is None or r is None else b.split(r) for b, r in zip(self.cut, residuals)]

    def list(self, tree: PyTree) -> Arrays:
        """Returns the entries of a tree like the gradients. For None, returns None for every leaf."""
        return [None] * len(self.cut) if tree is None else self.tree.flatten_up_to(tree)

    def run(self, late: Late | None) -> tuple[PyTree, ExchangeState]:
        """Returns (the mean, the state after the step). `late` is the exchange that has begun, if one has."""
        how, shared, loss, tree = self.how, self.shared, self._loss(), self.tree.unflatten
        self.turn = self._after(loss)
        arrived = self._arrived(late)
        if len(how.shares) > 1 or len(self.plans) > 1:
            self.turn = self._after(arrived.means)
        first_loss, level = self._level(loss)
        order = self._order()
        now, pending, contributions = self._with_share(
            level, functools.partial(self._now, order=order, arrived=arrived)
        )
        means, residuals = add(now.means, arrived.means), add(now.residuals, arrived.residuals)
        whole = lambda values: tree([x if b is None or x is None else b.join(x) for b, x in zip(self.cut, values)])
        defers = how.rest == "defer"
        own = self.own._replace(residuals=whole(residuals), pending=tree(pending) if defers else None)
        shared = shared._replace(
            count=shared.count + 1,
            contributions=tree(contributions),
            order=tree(order) if defers else None,
            first_loss=first_loss,
            level=level,
        )
        return whole(means), ExchangeState(own, shared)

    def begin_late(self) -> Late:
        """Begins the exchange of the blocks that the last step deferred."""
        travel, given, key = self._given(self.plans[0], self._deferred(self.how.k), LATE)
        return Late(*begin(*given, travel, key))

    def _loss(self) -> jax.Array | None:
        """Returns the mean loss, or None without a loss. A loss that varies between ranks is averaged."""
        if self.at.loss is None:
            return None
        loss, names = jnp.asarray(self.at.loss, jnp.float32), self.at.net.names
        if not _compat.tracked_axes(names) & _compat.varying_axes(loss):
            return loss
        return None if self.how.adaptive is None else plain_reduce("Differential", loss, self.at.net, mean=True)

    def _after(self, tree: PyTree) -> jax.Array:
        """Returns the turn, which waits for the arrays of a tree.

        A batched `turn` would make vmap run all branches of a conditional. So it waits for one row of them alone.
        """
        first = lambda x: _any_row(x.reshape(-1)[:1])
        return after(jax.tree_util.tree_map(first, tree), self.turn)

    def _level(self, loss: jax.Array | None) -> tuple[jax.Array | None, jax.Array | None]:
        """Returns (the first loss, the index of this step's share), or (None, None) if the share isn't adaptive."""
        how = self.how
        if how.adaptive is None:
            return None, None
        if loss is None:
            remedy = "call update(gradients, state, params, value=loss); make_train_step does"
            raise wrong("Differential", "value", "the loss, which 'adaptive' needs", "nothing", remedy, kind=TypeError)
        first = jnp.where(self.shared.count == 0, loss, self.shared.first_loss)
        share = how.k * loss / first
        last = len(how.shares) - 1
        level = jnp.ceil((share - how.adaptive) / (how.k - how.adaptive) * last - 1e-3)
        return first, jnp.where(jnp.isfinite(level), jnp.clip(level, 0, last), last).astype(jnp.int32)

    def _with_share(self, level: jax.Array | None, run: Callable[[float], T]) -> T:
        """Returns run(share) for the share with the index `level`. None: there is only one share."""
        shares = self.how.shares
        if level is None:
            return run(shares[0])
        return lax.switch(after(self.turn, level), [functools.partial(run, k) for k in shares])

    def _contributions(self, behind: PyTree) -> Sequence[jax.Array | None]:
        """Returns the contributions after this step, the same on every rank. They travel after the tree `behind`."""

        def own(b: Blocks, g: jax.Array, r: jax.Array | None) -> jax.Array:
            return b.magnitudes(g if r is None else g + r.astype(g.dtype))

        def average(old: jax.Array, new: jax.Array) -> jax.Array:
            moved = self.how.alpha * old + (1 - self.how.alpha) * new
            return jnp.where(jnp.isfinite(moved), moved, old)

        found = each(own, self.cut, self.gradients, self.residuals)
        if not (present := [x for x in found if x is not None]):
            return found
        row = after(behind, jnp.concatenate(present))  # all leaves in one small message
        # Each rank of a center sends its share of the center's sum to the other centers.
        raw = Plan.every(by_axis(tuple(self.at.net.parts), Raw(), Raw()))
        mean, _ = reduce(row, Carry(), Routes.of("Differential", raw, row).over(self.at.net), None)
        ends = itertools.accumulate(0 if x is None else x.size for x in found)
        parts = each(lambda x, end: mean[end - x.size : end], found, list(ends))
        return each(average, self.list(self.shared.contributions), parts)

    def _order(self) -> Sequence[jax.Array | None]:
        """Returns the indices of each leaf's blocks, the most important first."""
        found = self.list(self.shared.contributions)
        if not self.how.ranked:
            words = fold(self.shared.key, self.shared.count, CHOICE)
            assert words is not None
            key = jax.random.wrap_key_data(words, impl="threefry2x32")
            keys = [jax.random.fold_in(key, i) for i in range(len(found))]
            found = each(lambda c, key: jax.random.uniform(key, c.shape), found, keys)
        return each(lambda c: jnp.argsort(-c).astype(jnp.int32), found)

    def _deferred(self, share: float) -> Sent:
        """Returns the blocks that the last step deferred, with residuals of zeros."""
        last, pending = self.list(self.shared.order), self.list(self.own.pending)
        places = each(lambda b, o: o[b.share(share) :], self.cut, last)
        rows = each(lambda o, p: p[: o.size], places, pending)
        zeros = each(lambda x, r: None if r is None else jnp.zeros(x.shape, jnp.float32), rows, self.residuals)
        return Sent(rows, zeros)

    def _arrived(self, late: Late | None) -> Sent:
        """Returns the result of the exchange of deferred blocks, each at its place in the leaf, or Nones."""
        nothing = [None] * len(self.cut)
        if self.how.rest != "defer":
            return Sent(nothing, nothing)

        def receive(share: float) -> Sent:
            given = self._deferred(share)
            sent = self._send(self.plans, given, LATE) if late is None else self._sent(given, *end(*late))
            return Sent(*(line(self.cut, nothing, x) for x in sent))

        places = each(jnp.argsort, self.list(self.shared.order))
        return Sent(*(take(places, x) for x in self._with_share(self.shared.level, receive)))

    def _now(self, share: float, order: Arrays, arrived: Sent) -> tuple[Sent, Arrays, Arrays]:
        """Exchanges important blocks and whole leaves.

        Returns (all blocks, the blocks that are deferred, the contributions after this step).
        """
        heads = each(lambda b, o: o[: b.share(share)], self.cut, order)
        tails = each(lambda b, o: o[b.share(share) :], self.cut, order)
        sent = self._send(self.plans, Sent(take(heads, self.gradients), take(heads, self.residuals)), NOW)
        # A schedule of plans is a conditional. Otherwise, the contributions travel together with the blocks.
        contributions = self._contributions(sent.means if len(self.plans) > 1 else None)
        # The late blocks arrive before these blocks, whose bytes are behind them on the same links. So they are decoded
        # while these bytes travel.
        turn = self._after((arrived.means, sent.means, contributions))
        cut_only = lambda values: each(lambda _, x: x, self.cut, values)
        others = Sent(take(tails, cut_only(self.gradients)), take(tails, cut_only(self.residuals)))
        rest, pending = self._rest(others, turn)
        return Sent(*(put(self.cut, order, x, y) for x, y in zip(sent, rest))), pending, contributions

    def _rest(self, given: Sent, turn: jax.Array) -> tuple[Sent, Arrays]:
        """Treats the other blocks as `rest` says. Returns (the result of their exchange, the blocks that are deferred).

        given: the gradients and residuals of the other blocks.
        """
        rest, first = self.how.rest, turn == 0

        def hold(x: jax.Array, r: jax.Array | None) -> tuple[jax.Array | None, jax.Array | None]:
            """Returns (the deferred blocks, their residuals)."""
            if rest == "drop":
                return None, None if r is None else r + x
            if r is None:
                return x, None
            (x,), (lost,) = carry([x], [r])
            return x, lost

        def pend(b: Blocks, x: jax.Array) -> jax.Array:
            missing = b.count - b.share(self.how.shares[0]) - len(x)
            padded = jnp.pad(jnp.where(first, 0, x), ((0, missing), (0, 0)))
            return _compat.vary(padded, _compat.varying_axes(x))  # padded empty arrays are the same on every rank

        held = each(hold, given.means, given.residuals)
        blocks, lost = ([pair and pair[i] for pair in held] for i in (0, 1))
        other = lambda: Sent(each(jnp.zeros_like, given.means), lost)
        if rest == "quantize":
            short = by_axis(tuple(self.at.net.parts), SHORT, Raw())
            plans = [dataclasses.replace(plan, default=short, rules=()) for plan in self.plans]
            other = lambda: self._send(plans, given, REST, turn)
        sent = lax.cond(first, lambda: self._send(self.plans, given, REST, turn), other)
        return sent, [None if x is None or b is None else pend(b, x) for b, x in zip(self.cut, blocks)]

    def _send(self, plans: Sequence[Plan], given: Sent, part: int, turn: jax.Array | None = None) -> Sent:
        """Exchanges the leaves that aren't None. Returns their means and new residuals."""
        if all(x is None for x in given.means):
            return given

        def run(plan: Plan) -> Sent:
            travel, args, key = self._given(plan, given, part)
            return self._sent(given, *reduce(*args, travel, key))

        branches = [functools.partial(run, plan) for plan in plans]
        return switch(self.how.phases, self.turn if turn is None else turn, branches)

    def _given(self, plan: Plan, given: Sent, part: int) -> tuple[Travel, tuple[PyTree, Carry], Key | None]:
        """Returns (how blocks travel, (the blocks, their residuals), the key of their noise)."""
        blocks = self.tree.unflatten(given.means)
        way = self.at.way if part == NOW else self.at.way._replace(order=None)
        travel = Routes.of("Differential", plan, blocks).over(self.at.net, way)
        residuals = [r for x, r in zip(given.means, given.residuals) if x is not None]
        kept = Carry(travel.routes.tree.unflatten(residuals) if self.how.keep else None)
        check_input(blocks, kept, travel, "grads")
        stochastic = travel.routes.stochastic
        return travel, (blocks, kept), fold(self.shared.key, self.shared.count, part) if stochastic else None

    def _sent(self, given: Sent, means: PyTree, kept: Carry) -> Sent:
        """Returns the means and residuals of an exchange as lists of all leaves."""
        leaves, tree = jax.tree_util.tree_flatten(means)
        residuals = [None] * len(leaves) if kept.residuals is None else tree.flatten_up_to(kept.residuals)
        found = iter(zip(leaves, residuals))
        pairs = [(None, None) if x is None else next(found) for x in given.means]
        return Sent([mean for mean, _ in pairs], [residual for _, residual in pairs])


@custom_vmap
def _any_row(x: jax.Array) -> jax.Array:
    """Returns x. Under vmap, it is the first row: `after` only waits for it."""
    return x


@_any_row.def_vmap
def _(size: int, batched: Sequence[bool], x: jax.Array) -> tuple[jax.Array, bool]:
    return (x[0] if batched[0] else x), False
