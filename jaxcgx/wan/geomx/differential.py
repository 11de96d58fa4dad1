"""Differential transmission (GeoMX's DGT): sends important blocks of gradients at once, the others later or shorter."""

import dataclasses
import functools
import itertools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import custom_vmap

from jaxcgx import _compat
from jaxcgx.checks import check_choice, check_flag, check_integer, check_number, set_field, wrong
from jaxcgx.codecs import Codec, MaxMin, Raw
from jaxcgx.codecs.base import spell
from jaxcgx.exchange import hierarchy, schedules
from jaxcgx.exchange.message import Carry, carry_over
from jaxcgx.exchange.reduce import Ticket, begin, end, plain_reduce, reduce, travel_with
from jaxcgx.exchange.routes import Routes, Travel
from jaxcgx.plan import Plan
from jaxcgx.plan.leaves import Codecs, by_axis, why_unfit
from jaxcgx.plan.plan import Phase, switch
from jaxcgx.train.division import after
from jaxcgx.train.exchange import At, Outcome, check_centers, check_hyperparameter, routes_of, set_phases
from jaxcgx.train.state import ExchangeState
from jaxcgx.typing import Key, Params, PyTree

T = TypeVar("T")
Arrays = Sequence[jax.Array | None]  # an entry for each leaf
OP = "Differential"
LEVELS = 8  # the number of shares that an adaptive share is rounded to
SHORT = MaxMin(4)  # the codec of the other blocks with rest="quantize"
LOST = "late-is-lost"  # a value of `rest`
LATE, NOW, REST, CHOICE = range(4)  # the key of a step is folded with these numbers


@dataclasses.dataclass(frozen=True)
class Blocks:
    """The blocks that a leaf is cut into. The last block is padded with zeros."""

    shape: tuple[int, ...]
    size: int  # the number of elements in a block

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def count(self) -> int:
        return -(-self.elements // self.size)

    def share(self, k: float) -> int:
        """Returns the number of blocks in the share `k` of all blocks. It is at least one."""
        return max(1, round(k * self.count))

    def split(self, x: jax.Array) -> jax.Array:
        flat = x.reshape(-1)
        if missing := self.count * self.size - self.elements:
            flat = jnp.pad(flat, (0, missing))
        return flat.reshape(self.count, self.size)

    def join(self, blocks: jax.Array) -> jax.Array:
        return blocks.reshape(-1)[: self.elements].reshape(self.shape)

    def magnitudes(self, blocks: jax.Array) -> jax.Array:
        """Returns the mean magnitude of each block, float32[count]. The padding doesn't count."""
        sizes = np.full(self.count, self.size, np.float32)
        sizes[-1] -= self.count * self.size - self.elements
        return jnp.abs(blocks.astype(jnp.float32)).sum(1) / sizes


Cut = Sequence[Blocks | None]  # the blocks of each leaf; None for a leaf that is sent whole


def cut(routes: Routes, block_bytes: int, share: float) -> Cut:
    """Returns the blocks of each leaf, or None for one that is sent whole: skipped, unfit, or with too few blocks."""
    found: list[Blocks | None] = []
    for route in routes.leaves:
        blocks = None if route.skipped or why_unfit(route) else Blocks(route.shape, block_bytes // route.dtype.itemsize)
        found.append(blocks if blocks and blocks.share(share) < blocks.count else None)
    return found


def each(function: Callable[..., T], *values: Sequence[Any]) -> list[T | None]:
    """Calls the function with the entries of each leaf. The result is None where the first list has None."""
    return [None if entries[0] is None else function(*entries) for entries in zip(*values)]


def where_cut(function: Callable[..., jax.Array], *values: Sequence[Any]) -> list[jax.Array | None]:
    """Calls the function with the entries of each leaf. If one of them is None, the second one stays as it is."""
    return [entries[1] if any(x is None for x in entries) else function(*entries) for entries in zip(*values)]


def take(places: Arrays, values: Arrays) -> list[jax.Array | None]:
    """Returns the blocks at these places. Whole leaves, which have None as places, stay as they are."""
    return where_cut(lambda at, x: x.at[at].get(mode="promise_in_bounds", unique_indices=True), places, values)


class Unsent(NamedTuple):
    """What each rank has for itself."""

    residuals: PyTree  # like the gradients, float32, also for whole leaves; None for a leaf that loses nothing
    pending: PyTree  # [blocks, size] for each cut leaf: the other blocks of the last step; None unless rest="defer"

    @staticmethod
    def per_rank() -> dict[str, str]:
        return {"residuals": "sum", "pending": "mean"}


class Ranking(NamedTuple):
    """What is the same on every rank. Trees have None for leaves that are sent whole."""

    count: jax.Array  # pyright: ignore[reportIncompatibleMethodOverride]  (int32[]: the number of steps so far)
    key: Key  # uint32[2], the same in every step
    contributions: PyTree  # float32[blocks]: the contribution of each block
    order: PyTree  # int32[blocks]: that of the last step, most important block first; None unless rest="defer"
    first_loss: jax.Array | None  # float32[]: that of the first step; None unless the share is adaptive
    level: jax.Array | None  # int32[]: the index of the last share in `Differential.shares`; None unless adaptive


class Portion(NamedTuple):
    """The mean and the residual of each leaf after an exchange. For a leaf that is cut, both are blocks."""

    # Before an exchange, `means` has this rank's gradients. None: the leaf takes no part.
    means: Arrays
    residuals: Arrays  # None for a leaf without residuals


Late = tuple[Ticket, Carry]  # an exchange of deferred blocks, which has begun


@dataclasses.dataclass(frozen=True)
class Differential:
    """An exchange that sends the blocks of each leaf that contribute most at once, the others as `rest` says.

        train = cgx.make_train_step(loss_fn, optimizer, mesh, cgx.wan.Differential(cgx.MaxMin(8), k=0.5))

    In the first step, all blocks are important, except with rest="late-is-lost". Leaves with so few blocks that the
    share rounds to all of them, and leaves that no codec can take, are always sent whole.

    A block's contribution is a moving average of its mean magnitude, averaged over the ranks. It becomes
    `alpha * contribution + (1 - alpha) * mean(abs(g))`. A step ranks blocks by the contributions up to the step before.
    So all ranks choose the same blocks, and send no indices.

    Args:
      plan: a codec, {axis: codec}, a Plan or a schedule of these, {first step: plan}, for the blocks. Rules and guards
        of a plan see the leaves, not the blocks. Low-rank codecs are refused.
      k: the share of a leaf's blocks that is important, above 0 and up to 1.
      block_bytes: the bytes of a block, a multiple of 4.
      alpha: the weight of the old contribution, from 0 to below 1.
      rest: the treatment of the other blocks. "defer": they are sent while the next step computes, and their mean is
        added to the mean of the next step. "quantize": they are sent at once, at 4 bits. "drop": they are not sent.
        "late-is-lost": over `jaxcgx.Tcp` alone, they are sent at once, also in the first step, behind the important
        ones and not on the first connection. Pieces that have not begun to leave at the deadline are not sent. A rank
        adds blocks that it didn't send, and quantization errors, to its next gradients. With keep=False they are lost.
      deadline: of "late-is-lost" alone, the seconds, at least 0, since the exchange of a message of other blocks began
        on this rank. The sums of what was sent always arrive on all ranks.
      adaptive: the smallest share K_min of an adaptive share, below k. The share is max(k * loss / first loss, K_min),
        at most k, rounded up to one of 8 values from K_min to k. The loss is the mean loss of all ranks, which
        make_train_step passes. None: the share is always k.
      ranked: whether important blocks are chosen by their contributions. False: at random, as a control.
      keep: whether the errors of compression are kept and sent later.
      seed: the seed of the noise of codecs that round stochastically, and of random blocks.

    Attributes:
      phases: the plans in the order of their first steps.
    """

    plan: Any  # Plan | Codec | {axis: Codec} | {step: Plan}; later a Plan, or {step: Plan}
    k: float = 0.8
    _: dataclasses.KW_ONLY
    block_bytes: int = 4096
    alpha: float = 0.3
    rest: str = "defer"
    deadline: float = 0.5
    adaptive: float | None = None
    ranked: bool = True
    keep: bool = True
    seed: int | jax.Array = 0
    phases: tuple[Phase, ...] = dataclasses.field(init=False, repr=False, compare=False)
    early: ClassVar[bool] = True
    scatters: ClassVar[bool] = False

    def __post_init__(self) -> None:
        set_phases(self, OP)
        set_field(self, "k", check_number, lambda x: 0 < x <= 1, "a number above 0 and up to 1")
        set_field(self, "block_bytes", check_integer, 4)
        if self.block_bytes % 4:
            remedy = f"write {self.block_bytes // 4 * 4 + 4}; GeoMX's is 4096"
            raise wrong(OP, "block_bytes", "a multiple of 4", self.block_bytes, remedy)
        set_field(self, "alpha", check_number, lambda x: 0 <= x < 1, "a number from 0 to below 1")
        set_field(self, "rest", check_choice, ("defer", "quantize", "drop", LOST))
        set_field(self, "deadline", check_number, lambda x: 0 <= x < 1e9, "a number of seconds, at least 0")
        if self.adaptive is not None:
            remedy = "it is the smallest share, which k * loss / first loss doesn't go below"
            expected = f"None, or a number above 0 and below k, {self.k}"
            set_field(self, "adaptive", check_number, lambda x: 0 < x < self.k, expected, remedy)
        set_field(self, "ranked", check_flag)
        set_field(self, "keep", check_flag)
        check_hyperparameter(OP, "seed", self.seed, check_integer)
        low = [codec for phase in self.phases for codec in phase.plan.codecs if codec.low_rank]
        if low:
            expected = "codecs of blocks, which are others in every step"
            raise wrong(OP, "plan", expected, spell(low[0]), "take another one, such as jaxcgx.MaxMin(4)")

    @property
    def shares(self) -> tuple[float, ...]:
        """The shares of blocks that may count as important, the smallest first."""
        if self.adaptive is None:
            return (self.k,)
        step = (self.k - self.adaptive) / (LEVELS - 1)
        return (*(self.adaptive + i * step for i in range(LEVELS - 1)), self.k)

    def init(self, params: Params) -> ExchangeState:
        first, *others = routes_of(OP, self.phases, params)
        blocks, tree = cut(first, self.block_bytes, self.shares[0]), first.tree.unflatten
        defers, adapts = self.rest == "defer", self.adaptive is not None
        encoded = [any(each.encoded for each in routes) for routes in zip(first.leaves, *(r.leaves for r in others))]
        lossy = [self.keep and (has or (b and not defers)) for has, b in zip(encoded, blocks)]
        residuals = [jnp.zeros(r.shape, jnp.float32) if loses else None for r, loses in zip(first.leaves, lossy)]
        pend = lambda b, r: jnp.zeros((b.count - b.share(self.shares[0]), b.size), r.dtype)
        key = jax.random.key_data(jax.random.key(self.seed, impl="threefry2x32"))
        shared = Ranking(
            count=jnp.zeros((), jnp.int32),
            key=key,
            contributions=tree(each(lambda b: jnp.zeros(b.count, jnp.float32), blocks)),
            order=tree(each(lambda b: jnp.zeros(b.count, jnp.int32), blocks)) if defers else None,
            first_loss=jnp.zeros((), jnp.float32) if adapts else None,
            level=jnp.zeros((), jnp.int32) if adapts else None,
        )
        own = Unsent(tree(residuals), tree(each(pend, blocks, first.leaves)) if defers else None)
        return ExchangeState(own, shared)

    def begin(self, grads: PyTree, state: ExchangeState, at: At) -> tuple[Late | None, ExchangeState]:
        """Begins the exchange of the blocks that the last step deferred, if it needs no conditional."""
        check_centers(OP, *at.centers)
        if self.rest != "defer" or at.params is None or len(self.shares) > 1 or len(self.phases) > 1:
            return None, state
        return Transmission(self, state, at, at.params).begin_late(), state

    def end(self, ticket: Late | None, state: ExchangeState, at: At, grads: PyTree = None) -> Outcome:
        """Exchanges important blocks. An adaptive share needs the loss."""
        return Transmission(self, state, at, grads).run(ticket)


class Transmission:
    """One step for all leaves. Each list has an entry for each leaf; None means that the leaf has no such value."""

    # XLA runs the exchanges of a conditional at the same time as other exchanges of the program, in an order that
    # differs from rank to rank, unless one needs a result of the other. So every conditional with exchanges depends on
    # `turn`, the number of steps so far, which depends on the exchanges before.
    def __init__(self, how: Differential, state: ExchangeState, at: At, tree: PyTree) -> None:
        """`tree` has the gradients, or arrays like them if the step only begins."""
        self.how: Differential = how
        self.at: At = at
        self.own: PyTree = state.own
        self.shared: PyTree = state.shared
        self.routes: list[Routes] = routes_of(OP, how.phases, tree)  # of whole leaves
        self.leaves_of: Callable[[PyTree], list[PyTree]] = self.routes[0].each
        self.tree: PyTree = self.routes[0].tree
        self.cut: Cut = cut(self.routes[0], how.block_bytes, how.shares[0])
        self.turn: jax.Array = state.shared.count
        self.gradients: Arrays = self._split(self.leaves_of(tree))
        self.residuals: Arrays = self._split(self.leaves_of(self.own.residuals))

    def _split(self, values: Arrays) -> Arrays:
        return where_cut(Blocks.split, self.cut, values)

    def run(self, late: Late | None) -> tuple[PyTree, ExchangeState]:
        """Returns (the mean, the state after the step). `late` is the exchange that has begun, if one has."""
        how, shared, loss, tree = self.how, self.shared, self._loss(), self.tree.unflatten
        self.turn = self._after(loss)
        arrived, conditional = self._arrived(late), len(how.shares) > 1 or len(self.routes) > 1
        if conditional:
            self.turn = self._after(arrived.means)
        first_loss, level = self._level(loss)
        order = self._order()
        ranked = Portion(take(order, self.gradients), take(order, self.residuals))
        now = self._with_share(level, functools.partial(self._now, ranked))
        # Contributions travel together with the blocks, unless these are sent in a conditional.
        contributions = self._contributions(now.means if conditional else None)
        # The late blocks arrive before these blocks, whose bytes are behind them on the same links. So they are decoded
        # while these bytes travel.
        both, pending, inverse = now, None, each(jnp.argsort, order)
        if how.rest != LOST:
            rest, pending = self._rest(ranked, level, self._after((arrived.means, now.means, contributions)))
            counts = self._counts(level)
            select = lambda b, x, y, count: jnp.where(jnp.arange(b.count)[:, None] < count, x, y)
            both = (where_cut(select, self.cut, x, y, counts) for x, y in zip(now, rest))
        means, residuals = (where_cut(operator.add, late, take(inverse, x)) for x, late in zip(both, arrived))
        whole = lambda values: tree(where_cut(Blocks.join, self.cut, values))
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
        return begin(*self._given(self.routes[0], self._deferred(self.how.k), LATE))

    def _loss(self) -> jax.Array | None:
        """Returns the mean loss, or None without a loss. A loss that varies between ranks is averaged."""
        if self.at.loss is None:
            return None
        loss, names = jnp.asarray(self.at.loss, jnp.float32), self.at.net.names
        if not _compat.tracked_axes(names) & _compat.varying_axes(loss):
            return loss
        return None if self.how.adaptive is None else plain_reduce(OP, loss, self.at.net, mean=True)

    def _after(self, tree: PyTree) -> jax.Array:
        """Returns the turn, which waits for the arrays of a tree."""
        # A batched `turn` would make vmap run all branches of a conditional. So it waits for one row of them alone.
        first = lambda x: _any_row(x.reshape(-1)[:1])
        return after(jax.tree.map(first, tree), self.turn)

    def _level(self, loss: jax.Array | None) -> tuple[jax.Array | None, jax.Array | None]:
        """Returns (the first loss, the index of this step's share), or (None, None) if the share isn't adaptive."""
        how = self.how
        if how.adaptive is None:
            return None, None
        if loss is None:
            remedy = "call update(gradients, state, params, value=loss); make_train_step does"
            raise wrong(OP, "value", "the loss, which 'adaptive' needs", "nothing", remedy, kind=TypeError)
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
        return jax.lax.switch(after(self.turn, level), [functools.partial(run, k) for k in shares])

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
        routes = Routes.of(OP, Plan.every(Raw()), row, [self._outermost(Raw())])
        mean, _ = reduce(row, Carry(), routes.over(self.at.net), None)
        ends = itertools.accumulate(0 if x is None else x.size for x in found)
        parts = each(lambda x, end: mean[end - x.size : end], found, list(ends))
        return each(average, self.leaves_of(self.shared.contributions), parts)

    def _order(self) -> Sequence[jax.Array | None]:
        """Returns the indices of each leaf's blocks, the most important first."""
        found = self.leaves_of(self.shared.contributions)
        if not self.how.ranked:
            words = self.at.noise(self.shared, CHOICE)
            assert words is not None
            key = jax.random.wrap_key_data(words, impl="threefry2x32")
            keys = [jax.random.fold_in(key, i) for i in range(len(found))]
            found = each(lambda c, key: jax.random.uniform(key, c.shape), found, keys)
        return each(lambda c: jnp.argsort(-c).astype(jnp.int32), found)

    def _deferred(self, share: float) -> Portion:
        """Returns the blocks that the last step deferred, with residuals of zeros."""
        last, pending = self.leaves_of(self.shared.order), self.leaves_of(self.own.pending)
        places = each(lambda b, o: o[b.share(share) :], self.cut, last)
        rows = each(lambda o, p: p[: o.size], places, pending)
        zeros = each(lambda x, r: None if r is None else jnp.zeros(x.shape, jnp.float32), rows, self.residuals)
        return Portion(rows, zeros)

    def _arrived(self, late: Late | None) -> Portion:
        """Returns the result of the exchange of deferred blocks, each at its place in the leaf, or Nones."""
        if self.how.rest != "defer":
            return Portion(*[[None] * len(self.cut)] * 2)

        def receive(share: float) -> Portion:
            given = self._deferred(share)
            sent = self._send(given, LATE) if late is None else self._listed(*end(*late))
            return self._in_line(sent, first=False)

        places = each(jnp.argsort, self.leaves_of(self.shared.order))
        return Portion(*(take(places, x) for x in self._with_share(self.shared.level, receive)))

    def _now(self, ranked: Portion, share: float) -> Portion:
        """Exchanges the important blocks of ranked blocks, and whole leaves; where late blocks are lost, all blocks."""
        heads = Portion(*(where_cut(lambda b, x: x[: b.share(share)], self.cut, x) for x in ranked))
        if self.how.rest != LOST or not any(self.cut):
            return self._in_line(self._send(heads, NOW), first=True)  # zeros at the places of others
        tails = Portion(*(each(lambda b, x: None if x is None else x[b.share(share) :], self.cut, x) for x in ranked))

        def run(routes: Routes) -> list[Portion]:
            begun = [begin(*self._given(routes, part, i)) for part, i in ((heads, NOW), (tails, REST))]
            return [self._listed(*end(*each)) for each in begun]

        now, rest = switch(self.how.phases, self.turn, [functools.partial(run, routes) for routes in self.routes])
        join = lambda _, x, y: jnp.concatenate([x, y])
        return Portion(*(where_cut(join, self.cut, x, y) for x, y in zip(now, rest)))

    def _in_line(self, given: Portion, first: bool) -> Portion:
        """Returns the first or the last blocks of each leaf at their places among all blocks, which have zeros."""

        def line(b: Blocks, x: jax.Array) -> jax.Array:
            missing = b.count - len(x)
            return jnp.pad(x, ((0, missing) if first else (missing, 0), (0, 0)))

        return Portion(*(where_cut(line, self.cut, x) for x in given))

    def _counts(self, level: jax.Array | None) -> Sequence[Any]:
        shares = self.how.shares
        if level is None:
            return each(lambda b: b.share(shares[0]), self.cut)
        return each(lambda b: jnp.asarray([b.share(k) for k in shares])[level], self.cut)

    def _rest(self, ranked: Portion, level: jax.Array | None, turn: jax.Array) -> tuple[Portion, Arrays]:
        """Treats the other blocks as `rest` says. Returns (the result of their exchange, the deferred blocks)."""
        # ranked: the gradients and residuals of all blocks. The places of important ones in the result have no meaning.
        rest, first, shares = self.how.rest, turn == 0, self.how.shares
        blocks = Portion(*(each(lambda _, x: x, self.cut, x) for x in ranked))  # without whole leaves

        def send(codec: Codecs | None, share: float) -> Portion:
            tails = (where_cut(lambda b, x: x[b.share(share) :], self.cut, x) for x in blocks)
            return self._in_line(self._send(Portion(*tails), REST, turn, codec), first=False)

        def hold(x: jax.Array, r: jax.Array | None) -> tuple[jax.Array | None, jax.Array | None]:
            """Returns (the deferred blocks, their residuals)."""
            if rest == "drop":
                return None, None if r is None else r + x
            if r is None:
                return x, None
            (x,), (lost,) = carry_over([x], [r])
            return x, lost

        def pend(b: Blocks, x: jax.Array, count: Any) -> jax.Array:
            size = b.count - b.share(shares[0])
            padded = jnp.pad(jnp.where(first, 0, x), ((0, b.share(shares[-1]) - b.share(shares[0])), (0, 0)))
            return jax.lax.dynamic_slice_in_dim(padded, count, size)

        held, lost = ([pair and pair[i] for pair in each(hold, *blocks)] for i in (0, 1))
        other = lambda: Portion(each(jnp.zeros_like, blocks.means), lost)
        if rest == "quantize":
            other = lambda: self._with_share(level, functools.partial(send, self._outermost(SHORT)))
        # In the first step, the share is the largest one.
        sent = jax.lax.cond(first, lambda: send(None, shares[-1]), other)
        return sent, each(lambda x, b, count: pend(b, x, count), held, self.cut, self._counts(level))

    def _outermost(self, codec: Codec) -> Codecs:
        """Returns the codec for the outermost axis of the ranks. Over the others, arrays travel raw."""
        return by_axis(tuple(self.at.net.parts), codec, Raw())

    def _send(self, given: Portion, part: int, turn: jax.Array | None = None, codec: Codecs | None = None) -> Portion:
        """Exchanges a portion. Returns its means and new residuals. `codec` takes the place of those of the plan."""
        if all(x is None for x in given.means):
            return given

        def run(routes: Routes) -> Portion:
            return self._listed(*reduce(*self._given(routes, given, part, codec)))

        branches = [functools.partial(run, routes) for routes in self.routes]
        return switch(self.how.phases, self.turn if turn is None else turn, branches)

    def _given(
        self, routes: Routes, given: Portion, part: int, codec: Codecs | None = None
    ) -> tuple[PyTree, Carry, Travel, Key | None]:
        """Returns (the blocks, their residuals, how they travel, the key of their noise)."""
        # Blocks get the codecs of the whole leaves: rules and guards of a plan are for the shapes of these.
        blocks = self.tree.unflatten(given.means)
        codecs = [codec or own for x, own in zip(given.means, routes.codecs) if x is not None]
        way = self.at.way if part == NOW else self.at.way._replace(order=None)
        if self.how.rest == LOST and part == REST:
            way = way._replace(deadline=self.how.deadline)
        kept = Carry(self.tree.unflatten(given.residuals) if self.how.keep else None)
        of_blocks = Routes.of(OP, routes.plan, blocks, codecs)
        travel = travel_with(kept, of_blocks, self.at.net, way, x=blocks, argument="grads")
        if way.deadline is not None:
            self._check_lossy(travel)
        key = self.at.noise(self.shared, part) if travel.routes.stochastic else None
        return blocks, kept, travel, key

    def _check_lossy(self, travel: Travel) -> None:
        """Checks that late blocks can be given up."""
        stages, over_tcp = [envelope.stages for envelope in travel.envelopes], self.at.net.begin_sum is not None
        in_pieces = all(schedules.is_piecewise(s[0]) and s[0].schedule != "one_shot" for s in stages)
        if not over_tcp or not in_pieces or not all(hierarchy.can_begin(s, travel.how) for s in stages):
            options = 'schedule="auto" and leader=False'
            expected = f"jaxcgx.Tcp as the outermost axis, no sparse codec, {options}, with {LOST!r}"
            remedy = "take another plan" if over_tcp else "write jaxcgx.Tcp(axis) in place of the axis"
            raise wrong(OP, "rest", expected, f"{spell(travel.routes.plan)} over {self.at.net.names}", remedy)

    def _listed(self, means: PyTree, kept: Carry) -> Portion:
        return Portion(self.leaves_of(means), self.leaves_of(kept.residuals))


@custom_vmap
def _any_row(x: jax.Array) -> jax.Array:
    """Returns x. Under vmap, it is the first row: `after` only waits for it."""
    return x


@_any_row.def_vmap
def _(size: int, batched: Sequence[bool], x: jax.Array) -> tuple[jax.Array, bool]:
    return (x[0] if batched[0] else x), False
