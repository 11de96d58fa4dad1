"""Diloco: centers train independently, and exchange compressed outer gradients once in many steps."""

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxcgx import _programs
from jaxcgx.checks import check_choice, check_flag, check_integer, check_number, set_field, warn, wrong
from jaxcgx.codecs.base import Codec, spell
from jaxcgx.codecs.raw import Raw
from jaxcgx.exchange.message import Carry, fold
from jaxcgx.exchange.reduce import Ticket, begin, end, travel_with
from jaxcgx.exchange.routes import Routes, Way
from jaxcgx.plan.leaves import by_axis, values
from jaxcgx.plan.overlay import Overlay
from jaxcgx.train.division import choose, row, without_row, zeros
from jaxcgx.train.exchange import AnyExchange, At
from jaxcgx.train.rounds import Act, Acted
from jaxcgx.train.state import ExchangeState
from jaxcgx.transports.axes import axis_names, crosses
from jaxcgx.transports.base import Transport
from jaxcgx.typing import AxisName, Key, Params, PyTree
from jaxcgx.wan.diloco.fragments import Fragment, cut, finite, wide, wide_zeros
from jaxcgx.wan.diloco.outer import OuterTelemetry, as_optimizer, as_outer_plan, init_outer, outer_step


@dataclasses.dataclass(frozen=True)
class Diloco:
    """Rounds of low-communication training (DiLoCo), for `make_train_step`.

        diloco = cgx.wan.Diloco(cgx.MaxMin(4), every=100)
        train = cgx.make_train_step(loss_fn, optax.adamw(1e-3), mesh, diloco, sharding=cgx.Sharding("dc"))
        state = train.init(params)
        for batch in batches:
            state, metrics = train.step(state, batch)

    The places along the outermost axis of the ranks are the centers. Every center trains its own parameters with the
    optimizer of make_train_step, whose state is never averaged. Every `every` steps the centers exchange their outer
    gradients, D = outer parameters - own parameters, and the outer optimizer moves the outer parameters by the mean of
    D. The centers go on from the new outer parameters. `state.params` are the outer parameters: evaluate, save and
    restore these. They change only in steps in which an exchange ends. In other steps, centers send nothing to each
    other.

    Args:
      plan: a codec, {axis: codec} or a Plan, for outer gradients. A codec that isn't given by axis is used between
        centers. The ranks of a center share the work, and exchange uncompressed arrays.
      every: the number of steps between two exchanges of a parameter, H.
      inside: how the ranks of a center exchange their gradients in every step: a codec, a Plan or an exchange.
      outer: an optax.GradientTransformation. "nesterov" is SGD of rate 0.7 with Nesterov's momentum 0.9, for `every` in
        the hundreds. "sgd" is SGD of rate 1: the outer parameters become the mean of the centers' parameters. Momentum
        of 0.9 hurts if `every` is small; see `telemetry`.
      fragments: the number of fragments of the parameters, P. One fragment is exchanged every `every` / P steps. All
        fragments have about the same number of bytes. Large parameters are cut along their first dimension.
      overlap: the number of steps, less than `every` / P, after which the result of an exchange is applied. Over `Tcp`,
        the exchange goes on while these steps run.
      alpha: the weight of a center's own parameters when a result is applied, from 0 to below 1: own = alpha * own +
        (1 - alpha) * outer.
      eager: whether the result of an exchange is applied when the fragment's next exchange begins, `every` steps later.
        Until then, a center goes on from an outer step with its own part of the mean alone. `overlap` and `alpha` must
        be 0.
      decay: the factor of residuals after each exchange, above 0 and up to 1 (SparseLoCo's beta).
      telemetry: whether `metrics.telemetry.outer` reports the outer steps. The state then also has the mean of the
        outer gradients of the last round.
      keep: whether residuals, the compression errors of outer gradients, are kept and sent later.
      forward: the dtype of the forward pass, "bfloat16" or "float16". Elements of an outer gradient that don't change
        the outer parameters in this dtype are zero in the message, and stay in the residuals (PULSELoCo). It pays with
        a sparse codec. Parameters that travel raw are sent whole.
      seed: the seed of the noise of codecs that round stochastically.

    Attributes:
      optimizer: the outer optimizer, an optax.GradientTransformation.
    """

    plan: Any  # Plan | Codec | {axis: Codec}; later a Plan
    every: int
    _: dataclasses.KW_ONLY
    inside: AnyExchange = Raw()
    outer: Any = "nesterov"
    fragments: int = 1
    overlap: int = 0
    alpha: float = 0.0
    eager: bool = False
    decay: float = 1.0
    telemetry: bool = False
    keep: bool = True
    forward: str | None = None
    seed: int = 0
    optimizer: Any = dataclasses.field(init=False, repr=False, compare=False)  # the outer one
    _every: ClassVar[str] = "every"  # how errors spell it
    alone: ClassVar[bool] = False

    def __post_init__(self) -> None:
        op = self.op
        object.__setattr__(self, "optimizer", as_optimizer(op, self.outer))
        for name, low in (("every", 1), ("fragments", 1), ("overlap", 0)):
            check_integer(op, name, getattr(self, name), low)
        check_integer(op, "seed", self.seed)
        check_number(op, "alpha", self.alpha, lambda x: 0 <= x < 1, "a number from 0 to below 1")
        check_number(op, "decay", self.decay, lambda x: 0 < x <= 1, "a number above 0 and up to 1")
        for name in ("eager", "telemetry", "keep"):
            set_field(self, name, check_flag)
        if self.decay != 1 and not self.keep:
            raise wrong(op, "decay", "1 without feedback", self.decay, "leave out keep=False, or pass decay=1.0")
        if self.forward is not None:
            check_choice(op, "forward", self.forward, ("bfloat16", "float16"))
            if not self.keep:
                raise wrong(op, "keep", "True with 'forward', whose unseen elements wait", False, "leave it out")
        if self.eager and (self.overlap or self.alpha):
            name = "overlap" if self.overlap else "alpha"
            raise wrong(op, name, "0 with eager=True", getattr(self, name), f"leave out {name} or eager")
        self._check_fragments()
        if self.overlap >= self.period:
            expected = (
                f"less than {self._every} / fragments = {self.period} steps, as a fragment ends before the next begins"
            )
            remedy = f"pass overlap={self.period - 1}, fewer fragments, or a larger {self._every}"
            raise wrong(op, "overlap", expected, self.overlap, remedy)
        object.__setattr__(self, "plan", as_outer_plan(op, self.plan, self.keep))

    @property
    def op(self) -> str:
        return type(self).__name__

    @property
    def period(self) -> int:
        """The number of steps from the exchange of one fragment to the exchange of the next fragment."""
        return self.every // self.fragments

    @property
    def later(self) -> bool:
        """Whether an exchange ends in a later step than it begins."""
        return self.eager or self.overlap > 0

    def _check_fragments(self) -> None:
        if self.every % self.fragments:
            remedy = f"pass every={max(self.period, 1) * self.fragments}"
            raise wrong(self.op, "every", f"a multiple of fragments={self.fragments}", self.every, remedy)

    @property
    def turns(self) -> Sequence[Sequence[Act]]:
        if self.overlap:
            return [self._acts("end", self.overlap), self._acts("begin", 0)]
        return [self._acts("eager" if self.eager else "at_once", 0)]

    @property
    def last(self) -> Sequence[Act]:
        return self._acts("end", 0) if self.later else ()

    def _acts(self, name: str, delay: int) -> list[Act]:
        """Returns an act for each fragment, `delay` steps after its turn. The first one has the last turn."""
        turns = [p or self.fragments for p in range(self.fragments)]
        return [Act(name, p, first=turn * self.period + delay, every=self.every) for p, turn in enumerate(turns)]

    def warn(self, axis: AxisName) -> None:
        """Warns if exchanges are to go on in later steps but can't."""
        name = axis_names(axis)[0]
        if crosses(axis):
            why = next(filter(None, map(self._waits, self.plan.codecs)), "")
        else:  # a single process only simulates centers
            why = f"over {name!r} the step in which an exchange begins waits for it; pass jaxcgx.Tcp({name!r})"
            why = why if jax.process_count() > 1 and jax.default_backend() == "cpu" else ""
        if self.later and why:
            warn(f"{self.op}: argument '{'eager' if self.eager else 'overlap'}': {why}")

    def _waits(self, codec: Codec) -> str:
        """Says for what the last step of an exchange with this codec waits, or nothing."""
        if codec.low_rank:
            return f"the last step waits for the second sum of {spell(codec)}; take another codec"
        hops = any(each == "tree" or isinstance(each, Overlay) for each in values(self.plan.schedule))
        if codec.sparse and (hops or self.plan.leader):
            how = "along trees" if hops else "by leaders"
            return f'the last step waits for the whole exchange of {spell(codec)} {how}; write schedule="one_shot"'
        return ""

    def settings(self, params: Params) -> dict[str, str]:
        names = "every", "fragments", "overlap", "alpha", "eager", "decay", "telemetry", "keep", "forward", "seed"
        parts = [jax.eval_shape(fragment.take, params) for fragment in self._fragments(params)]

        def moved(parts: list[PyTree]) -> list[PyTree]:
            return [self.optimizer.update(part, self.optimizer.init(part), part) for part in parts]

        outer = f"an optimizer with the digest {_programs.digest_of(moved, parts)} for these parameters"
        return {name: str(getattr(self, name)) for name in names} | {"outer": outer}

    def init(self, params: Params, at: At) -> list[ExchangeState]:
        turn = self._turn(params, at)
        return [turn.init(fragment.take(params), p) for p, fragment in enumerate(self._fragments(params))]

    def specs(self, center: P, rank: P) -> ExchangeState:
        return ExchangeState(OfCenter(center, center, rank), P())

    def act(self, act: Act, outer: Params, own: Params, state: ExchangeState | None, at: At) -> Acted:
        assert state is not None  # only an act without a part has none
        turn, fragment = self._turn(outer, at), self._fragments(outer)[act.part]
        parts = fragment.take(outer), fragment.take(own)
        if act.name == "begin":
            return outer, own, turn.begin(*parts, state)
        moved, followed, state = getattr(turn, act.name)(*parts, state)  # end, at_once or eager
        return fragment.put(outer, moved), fragment.put(own, followed), state

    def measured(self, states: Sequence[ExchangeState]) -> tuple[OuterTelemetry | None, ...] | None:
        return tuple(state.shared.telemetry for state in states) if self.telemetry else None

    def _turn(self, params: Params, at: At) -> "Turn":
        return Turn(self, Routes.of(self.op, self.plan, params), at.net)

    def _fragments(self, params: Params) -> tuple[Fragment, ...]:
        return cut(self.op, params, Routes.of(self.op, self.plan, params).skipped, self.fragments)


class Waiting(NamedTuple):
    """A round that began in an earlier step."""

    # The arrays are the mean of outer gradients that is still to be applied, or what ends its exchange. Only the
    # process that began an exchange can end it.
    begun: jax.Array  # bool[]: whether one has begun
    arrays: PyTree


class OfCenter(NamedTuple):
    """What each center has of a fragment."""

    residuals: PyTree  # of the exchange, like the outer gradients, float32; None without feedback
    start: PyTree  # the own parameters when the round began; None if they always equal the outer parameters
    waiting: PyTree  # the exchange that goes on while later steps run, a Waiting with a row for each rank; or None

    @staticmethod
    def per_rank() -> dict[str, str]:
        return {"residuals": "sum", "start": "mean", "waiting": "zeros"}


# (the sum that has begun, its carry, the part of outer gradients that waits for a later round, or None)
Begun = tuple[Ticket, Carry, PyTree]


class OfAll(NamedTuple):
    """What is the same in every center."""

    factors: PyTree  # PowerSGD's; None without
    number: jax.Array  # int32[]: the number of exchanges so far
    key: Key  # uint32[2], the same in every round
    outer: PyTree  # the state of the outer optimizer
    waiting: Waiting | None  # the mean that is still to be applied; None if it is at once, or if exchanges go on
    before: PyTree  # the mean of outer gradients of the round before; None without telemetry
    telemetry: OuterTelemetry | None  # of the last round


@dataclasses.dataclass(frozen=True, eq=False)
class Turn:
    """What is done with a fragment. Arguments and results are its part of the parameters, and its state."""

    # All ranks of a center have the same outer gradients. The exchange takes those of the first rank, and zeros from
    # the other ranks. The same holds for residuals, unless each rank trains alone: then each rank keeps its own, and
    # the sum of all is that of the centers. Inside a center, the ranks share the work and exchange uncompressed arrays.
    how: Diloco
    whole: Routes  # of the whole parameters; parts of a leaf get its codec, whatever the fragments are
    net: Transport  # the centers and their ranks

    @property
    def _crosses(self) -> bool:
        """Whether an exchange goes on while the programs of later steps run."""
        return self.how.later and self.net.begin_sum is not None

    def init(self, params: Params, number: int) -> ExchangeState:
        """Returns the state of a fragment before the first round. Those with different numbers draw different noise."""
        how = self.how
        moved = wide_zeros(params)
        carry = self._routes(moved).carry(residuals=how.keep)
        key = jax.random.key_data(jax.random.key(how.seed, impl="threefry2x32"))
        key = fold(key, number) if number else key
        assert key is not None
        shared = OfAll(
            factors=zeros(carry.factors),
            number=jnp.zeros((), jnp.int32),
            key=key,
            outer=init_outer(how.op, how.optimizer, params),
            waiting=Waiting(jnp.zeros((), bool), moved) if how.later and not self._crosses else None,
            before=moved if how.telemetry else None,
            telemetry=OuterTelemetry(*jnp.zeros(2, jnp.float32)) if how.telemetry else None,
        )
        own = OfCenter(zeros(carry.residuals), params if how.eager else None, None)
        if self._crosses:
            ticket = jax.eval_shape(self._send, params, moved, ExchangeState(own, shared))
            own = own._replace(waiting=Waiting(jnp.zeros((), bool), zeros(jax.tree.leaves(ticket))))
        return ExchangeState(own, shared)

    def begin(self, outer: Params, own: Params, state: ExchangeState) -> ExchangeState:
        """Begins the exchange of outer gradients. It also ends the exchange if this can't go on in later steps."""
        begun = self._send(outer, self._moved(outer, own, state), state)
        if self._crosses:
            waiting = Waiting(jnp.ones((), bool), jax.tree.leaves(begun))
            return ExchangeState(state.own._replace(waiting=waiting), state.shared)
        mean, state = self._receive(begun, state)
        return ExchangeState(state.own, state.shared._replace(waiting=Waiting(jnp.ones((), bool), mean)))

    def end(self, outer: Params, own: Params, state: ExchangeState) -> tuple[Params, Params, ExchangeState]:
        """Moves the outer parameters by the mean, and the center's own parameters to the outer parameters."""
        # If the mean isn't finite, the outer parameters stay as they are, and the center goes back to them. If no
        # exchange has begun, nothing changes.
        mean, begun, state = self._arrived(outer, state)
        good = begun & finite(mean)
        after, state = self._move(outer, state, mean, good)
        new = after
        if weight := self.how.alpha:
            mix = lambda x, y: (weight * wide(x) + (1 - weight) * wide(y)).astype(x.dtype)
            new = choose(good, jax.tree.map(mix, own, after), after)
        new = choose(begun, new, own)
        if self.how.eager:  # `finish` ends the last round
            state = ExchangeState(state.own._replace(start=choose(begun, new, state.own.start)), state.shared)
        return after, new, state

    def at_once(self, outer: Params, own: Params, state: ExchangeState) -> tuple[Params, Params, ExchangeState]:
        """Exchanges outer gradients, and moves the parameters by their mean in the same step."""
        after, new, done = self.end(outer, own, self.begin(outer, own, state))
        return after, new, ExchangeState(done.own, done.shared._replace(waiting=None))

    def eager(self, outer: Params, own: Params, state: ExchangeState) -> tuple[Params, Params, ExchangeState]:
        """Moves the outer parameters by the mean of the round before, and exchanges this round's outer gradients."""
        # The center goes on from a preliminary outer step with its own part of this round's mean alone.
        moved = self._moved(outer, own, state)
        mean, begun, done = self._arrived(outer, state)
        after, done = self._move(outer, done, mean, begun & finite(mean))
        part = jax.tree.map(lambda d: d / jax.lax.axis_size(self.net.names[0]), moved)
        ahead, *_ = outer_step(self.how.optimizer, after, done.shared.outer, part)
        start = choose(finite(moved), ahead, after)
        done = self.begin(outer, own, done)
        return after, start, ExchangeState(done.own._replace(start=start), done.shared)

    def _moved(self, outer: Params, own: Params, state: ExchangeState) -> PyTree:
        start = outer if state.own.start is None else state.own.start
        return jax.tree.map(lambda x, y: wide(x) - wide(y), start, own)

    def _routes(self, part: PyTree) -> Routes:
        """Returns the routes of a fragment. Inside a center, codecs that aren't given by axis leave arrays raw."""
        names, pairs = self.net.names, zip(self.whole.codecs, self.whole.each(part))
        given = [codec for codec, x in pairs if x is not None]
        codecs = [codec if isinstance(codec, dict) else by_axis(names, codec, Raw()) for codec in given]
        return Routes.of(self.whole.op, self.whole.plan, part, codecs)

    def _send(self, outer: Params, moved: PyTree, state: ExchangeState) -> Begun:
        """Begins an exchange of the outer gradients `moved`. Returns what `_receive` needs."""
        residuals, shared = state.own.residuals, state.shared
        if inner := self.net.names[1:]:
            first = jax.lax.axis_index(inner) == 0
            of_first = lambda tree: jax.tree.map(lambda x: jnp.where(first, x, 0), tree)
            moved, residuals = of_first(moved), residuals if self.how.alone else of_first(residuals)
        moved, residuals, unseen = self._split(outer, moved, residuals)
        carry = Carry(residuals, factors=shared.factors)
        travel = travel_with(carry, self._routes(moved), self.net, Way(later=True), x=moved, argument="params")
        key = fold(shared.key, shared.number) if travel.routes.stochastic else None
        return *begin(moved, carry, travel, key), unseen

    def _split(self, outer: Params, moved: PyTree, residuals: PyTree) -> tuple[PyTree, PyTree, PyTree]:
        """Returns (outer gradients to send, the residuals to add to them, what the forward pass wouldn't see)."""
        dtype, each = self.how.forward, jax.tree.map
        if dtype is None:
            return moved, residuals, None
        total = each(lambda d, r: d if r is None else d + r, moved, residuals)
        # XLA drops a conversion there and back, so that a comparison of values could see all bits of float32.
        bits = lambda x: jax.lax.bitcast_convert_type(x.astype(dtype), jnp.uint16)
        beyond = lambda x: jnp.abs(wide(x)) > float(jnp.finfo(dtype).max)  # only infinity in float16
        seen = lambda t, x: jnp.where((bits(wide(x) - t) != bits(x)) | beyond(x), t, 0)
        sent = each(lambda t, x, r: t if r is None else seen(t, x), total, outer, residuals)
        return sent, zeros(residuals), each(lambda t, s, r: None if r is None else t - s, total, sent, residuals)

    def _receive(self, begun: Begun, state: ExchangeState) -> tuple[PyTree, ExchangeState]:
        """Ends an exchange. Returns (mean, state)."""
        # Residuals are multiplied by `decay`. If the mean isn't finite, the state stays as it is.
        own, shared, each = state.own, state.shared, jax.tree.map
        ticket, carry, unseen = begun
        mean, carry = end(ticket, carry)
        residuals = carry.residuals
        if unseen is not None:
            residuals = each(jnp.add, residuals, unseen)
        if inner := self.net.names[1:]:
            ranks = jax.lax.axis_size(inner)
            mean = each(lambda x: x * ranks, mean)
            residuals = residuals if self.how.alone else each(lambda r: jax.lax.psum(r, inner), residuals)
        if self.how.decay != 1:
            residuals = each(lambda r: self.how.decay * r, residuals)
        new, old = (residuals, carry.factors, shared.number + 1), (own.residuals, shared.factors, shared.number)
        # With a row, as in the state of a step: XLA doesn't update in place what it reshapes.
        residuals, factors, number = without_row(choose(finite(mean), row(new), row(old)))
        return mean, ExchangeState(own._replace(residuals=residuals), shared._replace(factors=factors, number=number))

    def _arrived(self, outer: Params, state: ExchangeState) -> tuple[PyTree, jax.Array, ExchangeState]:
        """Ends the round that began in an earlier step. Returns (mean, whether one has begun, state)."""
        own, shared = state.own, state.shared
        if not self._crosses:
            mean, begun = shared.waiting.arrays, shared.waiting.begun
            waiting = shared.waiting._replace(begun=jnp.zeros((), bool))
            return mean, begun, ExchangeState(own, shared._replace(waiting=waiting))
        none = wide_zeros(outer)
        tree = jax.tree.structure(jax.eval_shape(self._send, outer, none, state))

        def receive() -> tuple[PyTree, ExchangeState]:
            mean, done = self._receive(tree.unflatten(own.waiting.arrays), state)
            waiting = jax.tree.map(jnp.zeros_like, own.waiting)
            return mean, ExchangeState(done.own._replace(waiting=waiting), done.shared)

        mean, state = jax.lax.cond(own.waiting.begun, receive, lambda: (none, state))
        return mean, own.waiting.begun, state

    def _move(
        self, before: Params, state: ExchangeState, mean: PyTree, good: jax.Array
    ) -> tuple[Params, ExchangeState]:
        """Returns (outer parameters, state) after an outer step with the mean, or both unchanged unless `good`."""
        shared = state.shared
        moved, outer, step = outer_step(self.how.optimizer, before, shared.outer, mean)
        done = shared._replace(outer=outer)
        if self.how.telemetry:
            done = done._replace(before=mean, telemetry=OuterTelemetry.of(mean, step, shared.before))
        after, shared = choose(good, (moved, done), (before, shared))
        return after, ExchangeState(state.own, shared)
