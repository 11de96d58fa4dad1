"""Diloco: centers train independently, and exchange compressed outer gradients once in many steps. And its forms."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxcgx.checks import check_field, check_flag, check_integer, check_number, warn, wrong
from jaxcgx.codecs.maxmin import MaxMin
from jaxcgx.codecs.raw import Raw
from jaxcgx.codecs.spelling import spell
from jaxcgx.codecs.topk import TopK
from jaxcgx.exchange.routes import Routes
from jaxcgx.plan import Plan
from jaxcgx.plan.plan import check_phases
from jaxcgx.train.exchange import At
from jaxcgx.train.rounds import Act
from jaxcgx.train.state import ExchangeState
from jaxcgx.train.update import import_optax
from jaxcgx.transports.axes import axis_names, crosses
from jaxcgx.typing import AxisName, Params, PyTree
from jaxcgx.wan.diloco.between import Between
from jaxcgx.wan.diloco.outer import OuterTelemetry, check_outer, digest_of
from jaxcgx.wan.diloco.turn import Both, Own, Turn
from jaxcgx.wan.fragments import Fragment, cut
from jaxcgx.wan.several import check_several

FEW_BITS = 3  # with fewer bits per element, training without feedback may fail, as in MuLoCo's paper


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
      seed: the seed of the noise of codecs that round stochastically.

    Attributes:
      optimizer: the outer optimizer, an optax.GradientTransformation.
    """

    plan: Any  # Plan | Codec | {axis: Codec}; later a Plan
    every: int
    _: dataclasses.KW_ONLY
    inside: Any = Raw()
    outer: Any = "nesterov"
    fragments: int = 1
    overlap: int = 0
    alpha: float = 0.0
    eager: bool = False
    decay: float = 1.0
    telemetry: bool = False
    keep: bool = True
    seed: int = 0
    optimizer: Any = dataclasses.field(init=False, repr=False, compare=False)  # the outer one

    def __post_init__(self) -> None:
        op = self.op
        object.__setattr__(self, "optimizer", check_outer(op, self.outer))
        for name, low in (("every", 1), ("fragments", 1), ("overlap", 0)):
            check_integer(op, name, getattr(self, name), low)
        check_integer(op, "seed", self.seed)
        check_number(op, "alpha", self.alpha, lambda x: 0 <= x < 1, "a number from 0 to below 1")
        check_number(op, "decay", self.decay, lambda x: 0 < x <= 1, "a number above 0 and up to 1")
        for name in ("eager", "telemetry", "keep"):
            check_field(self, name, check_flag)
        if self.decay != 1 and not self.keep:
            raise wrong(op, "decay", "1 without feedback", self.decay, "leave out keep=False, or pass decay=1.0")
        if self.eager and (self.overlap or self.alpha):
            name = "overlap" if self.overlap else "alpha"
            raise wrong(op, name, "0 with eager=True", getattr(self, name), f"leave out {name} or eager")
        self._check_rhythm()
        phase, *others = check_phases(op, self.plan)
        if others:
            raise wrong(op, "plan", "one plan for the whole training", "a schedule of plans", "pass one of them")
        object.__setattr__(self, "plan", phase.plan)
        if not self.keep:
            warn_of_few_bits(op, "keep", self.plan)

    @property
    def op(self) -> str:
        """The name that errors have."""
        return type(self).__name__

    @property
    def alone(self) -> bool:
        """Whether each rank trains its own parameters."""
        return False

    @property
    def period(self) -> int:
        """The number of steps from the exchange of one fragment to the exchange of the next fragment."""
        return self.every // self.fragments

    @property
    def later(self) -> bool:
        """Whether an exchange ends in a later step than it begins."""
        return self.eager or self.overlap > 0

    def _check_rhythm(self) -> None:
        if self.every % self.fragments:
            remedy = f"pass every={max(self.period, 1) * self.fragments}"
            raise wrong(self.op, "every", f"a multiple of fragments={self.fragments}", self.every, remedy)
        if self.overlap >= self.period:
            expected = f"less than every / fragments = {self.period} steps, as a fragment ends before the next begins"
            remedy = f"pass overlap={self.period - 1}, fewer fragments, or a larger every"
            raise wrong(self.op, "overlap", expected, self.overlap, remedy)

    @property
    def turns(self) -> Sequence[Sequence[Act]]:
        if self.later:
            both = [self._acts("end", self.overlap), self._acts("begin", 0)]
            return [self._acts("eager", 0)] if self.eager else both
        return [self._acts("at_once", 0)]

    @property
    def last(self) -> Sequence[Act]:
        return self._acts("end", 0) if self.later else ()

    def _acts(self, name: str, delay: int) -> list[Act]:
        """Returns an act for each fragment, `delay` steps after its turn. The first one has the last turn."""
        turns = [p or self.fragments for p in range(self.fragments)]
        return [Act(name, p, first=turn * self.period + delay, every=self.every) for p, turn in enumerate(turns)]

    def check(self, mesh: Any, axis: AxisName) -> None:
        """Checks that there are several centers. Warns if exchanges are to go on in later steps but can't."""
        name = axis_names(axis)[0]
        check_several(self.op, f"centers along {name!r}", mesh.shape[name])
        argument = next((argument for argument in ("overlap", "eager") if getattr(self, argument)), None)
        whole = [codec for codec in self.plan.codecs if codec.sparse or codec.low_rank]
        if crosses(axis):
            why = f"a step waits for the whole exchange of {spell(whole[0])}; take another codec" if whole else ""
        else:  # a single process only simulates centers
            why = f"over {name!r} the step in which an exchange begins waits for it; pass jaxcgx.Tcp({name!r})"
            why = why if jax.process_count() > 1 and jax.default_backend() == "cpu" else ""
        if argument and why:
            warn(f"{self.op}: argument '{argument}': {why}")

    def settings(self, params: Params) -> dict[str, str]:
        names = "every", "fragments", "overlap", "alpha", "eager", "decay", "telemetry", "keep", "seed"
        parts = [jax.eval_shape(fragment.take, params) for fragment in self._fragments(params)]

        def moved(parts: list[PyTree]) -> list[PyTree]:
            return [self.optimizer.update(part, self.optimizer.init(part), part) for part in parts]

        outer = f"an optimizer with the digest {digest_of(moved, parts)} for these parameters"
        return {name: str(getattr(self, name)) for name in names} | {"outer": outer}

    def init(self, params: Params, at: At) -> list[ExchangeState]:
        return [
            self._turn(p, params, at).init(params, p, seed=self.seed, keep=self.keep) for p in range(self.fragments)
        ]

    def specs(self, center: P, rank: P) -> ExchangeState:
        own: PyTree = Own
        return ExchangeState(own(center, center, rank), P())

    def act(
        self, act: Act, outer: Params, own: Params, state: ExchangeState | None, at: At
    ) -> tuple[Params, Params, ExchangeState | None]:
        turn = self._turn(act.part, outer, at)
        both, state = getattr(turn, act.name)(Both(outer, own), state)  # begin, end, at_once or eager
        return both.outer, both.own, state

    def measured(self, states: Sequence[ExchangeState]) -> tuple[OuterTelemetry | None, ...] | None:
        return tuple(state.shared.telemetry for state in states) if self.telemetry else None

    def _turn(self, p: int, params: Params, at: At) -> Turn:
        routes = Routes.of(self.op, self.plan, params)
        return Turn(
            op=self.op,
            fragment=self._fragments(params)[p],
            between=Between(routes, at.net, self.alone),
            optimizer=self.optimizer,
            later=self.later,
            ahead=self.eager,
            alpha=self.alpha,
            decay=self.decay,
            telemetry=self.telemetry,
        )

    def _fragments(self, params: Params) -> tuple[Fragment, ...]:
        return cut(self.op, params, Routes.of(self.op, self.plan, params).skipped, self.fragments)


def warn_of_few_bits(op: str, argument: str, plan: Plan) -> None:
    """Warns if a codec of the plan may lose too much of outer gradients to train without feedback.

    Scales don't count as bits: they don't make codes finer.
    """
    bits = lambda codec: codec.code_bytes(2**16, jnp.dtype(jnp.float32)) / 2**13
    few = [codec for codec in plan.codecs if codec.low_rank or (codec.makes_codes and bits(codec) < FEW_BITS)]
    if few:
        warn(
            f"{op}: argument '{argument}': {spell(few[0])} may lose too much of outer gradients to train without "
            f"feedback; leave {argument}=False out, or take 4 bits"
        )


def sparseloco(
    plan: Any = None,
    every: int = 30,
    *,
    ratio: float | None = None,
    bits: int | None = None,
    rate: float = 1.0,
    decay: float = 0.95,
    **options: Any,
) -> Diloco:
    """Returns SparseLoCo, a form of `Diloco`.

    Centers send the largest elements of their outer gradients at few bits. Feedback takes the place of outer momentum.

    Args:
      plan: as in `Diloco`. None: a TopK.
      every: the number of steps between two exchanges.
      ratio: the share of each parameter's elements that is sent. None: 0.01, or what `plan` says.
      bits: the bits of the value of an element that is sent. Its index takes further bits. None: 2, or what `plan`
        says.
      rate: the learning rate of the outer SGD.
      decay: the factor of residuals after each exchange.
      **options: other fields of `Diloco`.
    """
    op = "sparseloco"
    if ratio is not None:
        check_number(op, "ratio", ratio, lambda x: 0 < x <= 1, "a number above 0 and up to 1")
    check_number(op, "rate", rate, lambda x: x > 0, "a number above 0")
    _check_beside_plan(op, plan, ratio=ratio, bits=bits)
    codec = TopK(0.01 if ratio is None else ratio, values=MaxMin(2 if bits is None else bits))
    outer = import_optax(op).sgd(rate)
    return Diloco(codec if plan is None else plan, every, outer=outer, decay=decay, **options)


def muloco(plan: Any = None, every: int = 30, *, bits: int | None = None, **options: Any) -> Diloco:
    """Returns MuLoCo's exchange, a form of `Diloco`.

    Centers send their outer gradients at 2 bits, with feedback. MuLoCo's inner optimizer is Muon (optax.contrib.muon).

    Args:
      plan: as in `Diloco`. None: a MaxMin.
      every: the number of steps between two exchanges.
      bits: the bits of an element. None: 2, or what `plan` says.
      **options: other fields of `Diloco`.
    """
    _check_beside_plan("muloco", plan, bits=bits)
    return Diloco(MaxMin(2 if bits is None else bits) if plan is None else plan, every, **options)


def pier(
    plan: Any,
    *,
    rounds: int,
    rate: float = 0.7,
    momentum: float = 0.9,
    warmup: float = 0.1,
    decay_from: float = 0.8,
    **options: Any,
) -> Diloco:
    """Returns Pier, a form of `Diloco`.

    The outer optimizer has Nesterov's momentum. The momentum rises linearly from 0 at the beginning of the training,
    and falls linearly to 0 at the end.

    Args:
      plan: as in `Diloco`.
      rounds: the number of exchanges in the whole training, steps / `every`.
      rate: the learning rate of the outer SGD.
      momentum: the largest momentum, from 0 to below 1.
      warmup: the share of the rounds in which momentum rises, at the beginning.
      decay_from: the share of the rounds after which momentum falls.
      **options: `every` and other fields of `Diloco`.
    """
    op = "pier"
    check_integer(op, "rounds", rounds, 1)
    check_number(op, "rate", rate, lambda x: x > 0, "a number above 0")
    check_number(op, "momentum", momentum, lambda x: 0 <= x < 1, "a number from 0 to below 1")
    check_number(op, "warmup", warmup, lambda x: 0 <= x <= 1, "a number from 0 to 1")
    check_number(op, "decay_from", decay_from, lambda x: warmup <= x <= 1, "a number from warmup to 1")
    optax = import_optax(op)
    rises, falls = round(warmup * rounds), round(decay_from * rounds)
    momenta = optax.join_schedules(
        [
            optax.linear_schedule(0.0, momentum, rises),
            optax.constant_schedule(momentum),
            optax.linear_schedule(momentum, 0.0, rounds - falls),
        ],
        [rises, falls],
    )
    sgd = optax.inject_hyperparams(optax.sgd, static_args=("learning_rate", "nesterov"))
    return Diloco(plan, outer=sgd(rate, momentum=momenta, nesterov=True), **options)


def _check_beside_plan(op: str, plan: Any, **wanted: Any) -> None:
    """Checks that a caller who passes a plan doesn't describe the codec, {argument: value or None}, too."""
    for name, value in wanted.items() if plan is not None else ():
        if value is not None:
            raise wrong(op, name, "None with 'plan', which says what is sent", repr(value), f"leave out {name} or plan")
