"""A step of differential transmission: exchanges important blocks now, and treats the others as `rest` says."""

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxcgx import _compat
from jaxcgx.checks import wrong
from jaxcgx.codecs.maxmin import MaxMin
from jaxcgx.codecs.raw import Raw
from jaxcgx.collectives.state import State
from jaxcgx.exchange.keys import fold
from jaxcgx.exchange.message import carry
from jaxcgx.optim.exchange import Kept, exchange
from jaxcgx.optim.halves import Begun, after, begin
from jaxcgx.optim.leaves import Leaves, check_arrays, encoders, flatten
from jaxcgx.optim.phases import switch
from jaxcgx.optim.require import import_optax
from jaxcgx.optim.settings import Settings
from jaxcgx.optim.state import check_state
from jaxcgx.plan import Plan, Rule
from jaxcgx.plan.by_axis import by_axis
from jaxcgx.plan.leaves import spell_path, why_unfit
from jaxcgx.wan.blocks import Blocks
from jaxcgx.wan.centers import check_centers

SHORT = MaxMin(4)  # the codec of the other blocks with rest="quantize"
LATE, NOW, REST, CHOICE = range(4)  # the key of a step is folded with these numbers


class DifferentialState(NamedTuple):
    """The state of `Differential`.

    Trees have the structure of the gradients, with None for leaves that are sent whole. Arrays per rank have a leading
    axis of the ranks and are sharded over it (`state_specs`).

    Attributes:
      count: int32[]: the number of steps until now.
      key: uint32[2], the same on every rank and in every step.
      contributions: float32[blocks]: the contribution of each block.
      order: int32[blocks]: the order of the last step, most important block first; None unless rest="defer".
      pending: [ranks, blocks, size]: the other blocks of the last step; None unless rest="defer".
      residuals: `float32[ranks, *shape]`, also for whole leaves; None for a leaf that loses nothing.
      first_loss: float32[]: the loss of the first step; None unless the share is adaptive.
      level: int32[]: the index of the last step's share in `Differential.shares`; None unless it is adaptive.
      telemetry: None: there is none.
    """

    count: Any
    key: Any
    contributions: Any
    order: Any
    pending: Any
    residuals: Any
    first_loss: Any
    level: Any
    telemetry: Any = None

    @property
    def per_rank(self) -> dict[str, str]:
        """The fields with arrays per rank, and whether `reshard_state` keeps their sum or their mean over the ranks."""
        return {"residuals": "sum", "pending": "mean"}

    @property
    def replicated(self) -> tuple[str, ...]:
        """The fields that have the structure of the parameters and are the same on every rank."""
        return ()


class Sent(NamedTuple):
    """The mean and the residuals of each leaf after an exchange. For a leaf that is cut, both are blocks.

    Before an exchange, `means` has this rank's gradients.
    """

    means: list[Any]
    residuals: list[Any]  # [1, ...]; None for a leaf without residuals


@dataclasses.dataclass(frozen=True)
class Transmission:
    """The transformation of `Differential`, with the arguments of the exchange."""

    how: Any  # a Differential
    settings: Settings

    def cut(self, leaves: Leaves) -> list[Blocks | None]:
        """Returns the blocks of each leaf, or None for a leaf that is sent whole."""
        found: list[Blocks | None] = []
        for x, codecs in zip(leaves.values, encoders(self.settings, self.settings.plans[0], leaves)):
            blocks = None if codecs is None or why_unfit(x) else Blocks.of(x, self.how.block_bytes)
            found.append(blocks if blocks and blocks.share(self.how.shares[0]) < blocks.count else None)
        return found

    def describe(self, settings: Settings, tree: Any, ranks: int) -> DifferentialState:
        """Returns the shapes of the state for gradients or parameters `tree`, as jax.ShapeDtypeStructs."""
        how, leaves = self.how, flatten(tree)
        cut = self.cut(leaves)
        array = lambda dtype, *shape: jax.ShapeDtypeStruct(shape, dtype)
        of_cut = lambda describe: leaves.tree([b and describe(x, b) for x, b in zip(leaves.values, cut)])
        rest = lambda b: b.count - b.share(how.shares[0])
        deferred, adaptive = how.rest == "defer", how.adaptive is not None
        encoded = [any(by_plan) for by_plan in zip(*(encoders(settings, plan, leaves) for plan in settings.plans))]
        fed = [settings.feedback and (has or (b and not deferred)) for has, b in zip(encoded, cut)]
        residuals = [array(jnp.float32, ranks, *x.shape) if has else None for x, has in zip(leaves.values, fed)]
        return DifferentialState(
            count=array(jnp.int32),
            key=array(jnp.uint32, 2),
            contributions=of_cut(lambda _, b: array(jnp.float32, b.count)),
            order=of_cut(lambda _, b: array(jnp.int32, b.count)) if deferred else None,
            pending=of_cut(lambda x, b: array(x.dtype, ranks, rest(b), b.size)) if deferred else None,
            residuals=leaves.tree(residuals),
            first_loss=array(jnp.float32) if adaptive else None,
            level=array(jnp.int32) if adaptive else None,
        )

    def begin(self, state: DifferentialState, tree: Any) -> Begun | None:
        """Begins the exchange of the blocks that the last step deferred, if it deferred some.

        `tree` is like the gradients. Its values aren't used.
        """
        check_centers(self.settings.function, self.settings.ranks)
        check_state(self.settings, state, self.describe(self.settings, tree, 1))
        if self.how.rest != "defer":
            return None

        def late(state: DifferentialState) -> Sent:
            step = Step(self, flatten(tree), state)
            return step.with_share(state.level, step.late)

        return begin(late, state)

    def update(
        self,
        updates: Any,
        state: DifferentialState,
        params: Any = None,
        *,
        value: Any = None,
        begun: Begun | None = None,
        **_: Any,
    ) -> tuple[Any, DifferentialState]:
        """Returns (mean, state) of the gradients `updates`. An adaptive share needs the loss as `value`."""
        settings, deferred = self.settings, self.how.rest == "defer"
        updates = check_arrays(settings.function, "updates", updates)
        loss = self._loss(value)
        # This exchange needs nothing that the step computes, so it runs at the same time.
        late = self.begin(state._replace(count=after(loss, state.count)), updates) if begun is None else begun
        leaves = flatten(updates)
        step = Step(self, leaves, state, late)
        conditional = len(self.how.shares) > 1 or len(settings.plans) > 1
        step.turn = after((loss, step.arrived.means if conditional else None), step.turn)
        first_loss, level = step.level(loss)
        order = step.order()
        now, pending, contributions = step.with_share(level, functools.partial(step.now, order=order))
        now = Sent(_add(now.means, step.arrived.means), _add(now.residuals, step.arrived.residuals))
        renewed = DifferentialState(
            count=import_optax(settings.function).safe_increment(state.count),
            key=state.key,
            contributions=leaves.tree(contributions),
            order=leaves.tree(order) if deferred else None,
            pending=leaves.tree(pending) if deferred else None,
            residuals=leaves.tree(
                [r if b is None or r is None else b.join(r)[None] for b, r in zip(step.cut, now.residuals)]
            ),
            first_loss=first_loss,
            level=level,
        )
        return leaves.tree([x if b is None else b.join(x) for b, x in zip(step.cut, now.means)]), renewed

    def _loss(self, value: Any) -> Any:
        """Returns the mean loss of all ranks, or None without a loss. Only an adaptive share needs a mean."""
        if value is None:
            return None
        value, ranks = jnp.asarray(value, jnp.float32), self.settings.ranks
        tracked = _compat.tracked_axes(ranks.net().names)
        if tracked and not tracked & _compat.varying_axes(value):  # it is the mean, as make_train_step passes it
            return value
        return None if self.how.adaptive is None else ranks.pmean(_compat.vary(value, tracked))


class Step:
    """One step for all leaves. Each list has an entry for each leaf; None means that the leaf has no such value.

    XLA runs the exchanges of a conditional at the same time as other exchanges of the program, in an order that differs
    from rank to rank, unless one needs a result of the other. So every conditional with exchanges depends on `turn`,
    which depends on the exchanges before.
    """

    how: Any  # a Differential
    settings: Settings
    leaves: Leaves
    state: DifferentialState
    cut: list[Blocks | None]
    plans: list[Plan]
    gradients: list[Any]  # of a leaf that is cut, its blocks
    residuals: list[Any]
    turn: jax.Array  # the number of steps until now
    begun: Begun | None  # the exchange of the blocks that the last step deferred

    def __init__(
        self, transmission: Transmission, leaves: Leaves, state: DifferentialState, begun: Begun | None = None
    ) -> None:
        self.how, self.settings, self.leaves, self.state = transmission.how, transmission.settings, leaves, state
        self.cut, self.turn, self.begun = transmission.cut(leaves), state.count, begun
        self.plans = [_of_blocks(self.settings.function, plan, leaves) for plan in self.settings.plans]
        self.gradients = [x if b is None else b.split(x) for b, x in zip(self.cut, leaves.values)]
        self.residuals = [
            r if b is None or r is None else b.split(r)[None] for b, r in zip(self.cut, leaves.match(state.residuals))
        ]

    def level(self, loss: Any) -> tuple[Any, Any]:
        """Returns (the first loss, the index of this step's share), or (None, None) if the share isn't adaptive."""
        how, state, function = self.how, self.state, self.settings.function
        if how.adaptive is None:
            return None, None
        if loss is None:
            remedy = "call update(gradients, state, params, value=loss); make_train_step does"
            raise wrong(function, "value", "the loss, which 'adaptive' needs", "nothing", remedy, kind=TypeError)
        first = jnp.where(state.count == 0, loss, state.first_loss)
        share = how.k * loss / first
        last = len(how.shares) - 1
        level = jnp.ceil((share - how.adaptive) / (how.k - how.adaptive) * last - 1e-3)
        return first, jnp.where(jnp.isfinite(level), jnp.clip(level, 0, last), last).astype(jnp.int32)

    def with_share(self, level: Any, run: Callable[[float], Any]) -> Any:
        """Returns run(share) for the share with the index `level`.

        `level` is a traced array, so the program has a branch for each share. None: there is only one share.
        """
        shares = self.how.shares
        if level is None:
            return run(shares[0])
        return lax.switch(after(self.turn, level), [functools.partial(run, k) for k in shares])

    def contributions(self, behind: Any) -> list[Any]:
        """Returns the contributions after this step, the same on every rank. They travel after the tree `behind`."""

        def own(b: Blocks, g: jax.Array, r: Any) -> jax.Array:
            return b.magnitudes(g if r is None else g + r[0].astype(g.dtype))

        def average(old: jax.Array, new: jax.Array) -> jax.Array:
            moved = self.how.alpha * old + (1 - self.how.alpha) * new
            return jnp.where(jnp.isfinite(moved), moved, old)

        found = _each(own, self.cut, self.gradients, self.residuals)
        if not (present := [x for x in found if x is not None]):
            return found
        ranks, row = self.settings.ranks, after(behind, jnp.concatenate(present))  # all leaves in one small message
        # Each rank of a center sends its share of the center's sum to the other centers.
        mean = ranks.compressed_pmean(row, by_axis(ranks.levels, Raw(), Raw()), State())
        ends = itertools.accumulate(0 if x is None else x.size for x in found)
        parts = _each(lambda x, end: mean[end - x.size : end], found, list(ends))
        return _each(average, self.leaves.match(self.state.contributions), parts)

    def order(self) -> list[Any]:
        """Returns the indices of each leaf's blocks, the most important first."""
        found = self.leaves.match(self.state.contributions)
        if not self.how.ranked:
            words: Any = fold(self.state.key, self.state.count, CHOICE)
            key = jax.random.wrap_key_data(words, impl="threefry2x32")
            keys = [jax.random.fold_in(key, i) for i in range(len(found))]
            found = _each(lambda c, key: jax.random.uniform(key, c.shape), found, keys)
        return _each(lambda c: jnp.argsort(-c).astype(jnp.int32), found)

    def late(self, share: float) -> Sent:
        """Exchanges the blocks that the last step deferred.

        The result has all blocks of a leaf in the last step's order. Blocks that were not deferred are zeros.
        """
        last, pending = self.leaves.match(self.state.order), self.leaves.match(self.state.pending)
        places = _each(lambda b, o: o[b.share(share) :], self.cut, last)
        rows = _each(lambda o, p: p[0, : o.size], places, pending)
        zeros = _each(lambda x, r: None if r is None else jnp.zeros((1, *x.shape), jnp.float32), rows, self.residuals)
        sent = self._send(self.plans, Sent(rows, zeros), part=LATE, turn=self.turn)
        nothing = _each(lambda b: None, self.cut)
        return Sent(*(_line(self.cut, nothing, x) for x in sent))

    @functools.cached_property
    def arrived(self) -> Sent:
        """The result of `late` with each block at its place in the leaf, or Nones. The first use ends the exchange."""
        none = self.leaves.match(None)
        if self.begun is None:
            return Sent(none, none)
        places = _each(jnp.argsort, self.leaves.match(self.state.order))
        return Sent(*(_take(places, x) for x in self.begun.end(self.gradients)))

    def now(self, share: float, order: list[Any]) -> tuple[Sent, list[Any], list[Any]]:
        """Exchanges important blocks and whole leaves.

        Returns (all blocks, the blocks that are deferred, the contributions after this step).
        """
        heads = _each(lambda b, o: o[: b.share(share)], self.cut, order)
        tails = _each(lambda b, o: o[b.share(share) :], self.cut, order)
        chosen = Sent(_take(heads, self.gradients), _take(heads, self.residuals))
        sent = self._send(self.plans, chosen, part=NOW, turn=self.turn)
        # A schedule of plans is a conditional. Otherwise, the contributions travel together with the blocks.
        contributions = self.contributions(sent.means if len(self.plans) > 1 else None)
        # The late blocks arrive before these blocks, whose bytes are behind them on the same links. So they are decoded
        # while these bytes travel.
        turn = after((self.arrived.means, sent.means, contributions), self.turn)
        rest, pending = self._rest(
            Sent(*(_take(tails, _each(lambda _, x: x, self.cut, xs)) for xs in (self.gradients, self.residuals))), turn
        )
        return Sent(*(_put(self.cut, order, x, y) for x, y in zip(sent, rest))), pending, contributions

    def _rest(self, given: Sent, turn: jax.Array) -> tuple[Sent, list[Any]]:
        """Treats the other blocks as `rest` says. Returns (the result of their exchange, the blocks that are deferred).

        given: the gradients and residuals of the other blocks.
        """
        rest, first = self.how.rest, turn == 0

        def hold(x: jax.Array, r: Any) -> tuple[Any, Any]:
            """Returns (the deferred blocks, their residuals)."""
            if rest == "drop":
                return None, None if r is None else r + x
            if r is None:
                return x, None
            (x,), (lost,) = carry([x], [r[0]])
            return x, lost[None]

        def pend(b: Blocks, held: tuple[Any, Any]) -> Any:
            if held[0] is None:
                return None
            missing = b.count - b.share(self.how.shares[0]) - len(held[0])
            padded = jnp.pad(jnp.where(first, 0, held[0]), ((0, missing), (0, 0)))[None]
            return _compat.vary(padded, _compat.varying_axes(held[0]))  # padded empty arrays are the same on every rank

        held = _each(hold, given.means, given.residuals)
        other = lambda: Sent(
            _each(lambda x: jnp.zeros(x.shape, x.dtype), given.means), _each(lambda pair: pair[1], held)
        )
        if rest == "quantize":
            short = by_axis(self.settings.ranks.levels, SHORT, Raw())
            plans = [dataclasses.replace(plan, default=short, rules=()) for plan in self.plans]
            other = lambda: self._send(plans, given, part=REST, turn=turn)
        sent = lax.cond(first, lambda: self._send(self.plans, given, part=REST, turn=turn), other)
        return sent, _each(pend, self.cut, held)

    def _send(self, plans: list[Plan], given: Sent, part: int, turn: jax.Array) -> Sent:
        """Exchanges the leaves that aren't None. Returns their means and new residuals."""
        settings, state, none = self.settings, self.state, self.leaves.match(None)
        present = [i for i, x in enumerate(given.means) if x is not None]
        if not present:
            return given
        if part != NOW:
            settings = dataclasses.replace(settings, order=None)
        key = fold(state.key, state.count, part) if settings.stochastic else None
        kept = Kept(residuals=[given.residuals[i] for i in present], momentum=none, factors=none)
        tree = self.leaves.tree(given.means)
        run = lambda plan: exchange(settings, plan, tree, kept, key=key)
        found = switch(settings.phases, turn, [functools.partial(run, plan) for plan in plans])
        of_leaf = dict(zip(present, zip(found.mean, found.kept.residuals)))
        each = [of_leaf.get(i, (None, None)) for i in range(len(given.means))]
        return Sent([mean for mean, _ in each], [residual for _, residual in each])


def _of_blocks(function: str, plan: Plan, leaves: Leaves) -> Plan:
    """Returns a plan that gives blocks the codecs of their leaves.

    The plan itself can't do so, because its conditions and guards are for the shapes of leaves.
    """
    chosen: dict[Any, set[str]] = {}
    assigned = plan.assign(function, "plan", paths=leaves.paths, leaves=leaves.values)
    for path, (codec, _) in zip(leaves.paths, assigned):
        chosen.setdefault(codec, set()).add(spell_path(path))
    rules = [
        Rule(codec, where=lambda path, _, own=frozenset(own): path in own, optional=True)
        for codec, own in chosen.items()
    ]
    return dataclasses.replace(plan, default=Raw(), rules=rules, min_size=0, skip_1d=False)


def _each(function: Callable[..., Any], *values: list[Any]) -> list[Any]:
    """Calls the function with the entries of each leaf. The result is None where the first list has None."""
    return [None if each[0] is None else function(*each) for each in zip(*values)]


def _take(places: list[Any], values: list[Any]) -> list[Any]:
    """Returns the blocks at these places. Whole leaves, which have None as places, stay as they are."""
    take = lambda at, x: x.at[..., at, :].get(mode="promise_in_bounds", unique_indices=True)
    return [x if at is None or x is None else take(at, x) for at, x in zip(places, values)]


def _put(cut: list[Blocks | None], order: list[Any], first: list[Any], rest: list[Any]) -> list[Any]:
    """Returns all blocks of each leaf at their places. `first` and `rest` have the blocks in the order `order`.

    It gathers with the inverse order, because XLA's CPU programs gather much faster than they scatter.
    """
    return _take(_each(jnp.argsort, order), _line(cut, first, rest))


def _line(cut: list[Blocks | None], first: list[Any], rest: list[Any]) -> list[Any]:
    """Returns the blocks of `first` followed by those of `rest`. None stands for zeros. Whole leaves are in `first`."""

    def join(b: Blocks, x: Any, y: Any) -> Any:
        given: Any = x if y is None else y
        if given is None:
            return None
        zeros = jnp.zeros((*given.shape[:-2], b.count - given.shape[-2], b.size), given.dtype)
        x, y = zeros if x is None else x, zeros if y is None else y
        return jnp.concatenate(_compat.match_varying(x, y), -2)

    return [x if b is None else join(b, x, y) for b, x, y in zip(cut, first, rest)]


def _add(some: list[Any], more: list[Any]) -> list[Any]:
    """Returns the sum of two values for each leaf. A None in `more` counts as zeros."""
    return [x if y is None else x + y for x, y in zip(some, more)]
