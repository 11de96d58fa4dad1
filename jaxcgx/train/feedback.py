"""Feedback: a plan whose compression errors are sent later. LoCo's settings, schedules, telemetry; CGX's variables."""

import dataclasses
import functools
import os
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from jaxcgx import _compat
from jaxcgx.checks import check_flag, check_integer, check_number, set_field, warn, wrong
from jaxcgx.codecs.base import Codec, spell
from jaxcgx.exchange.message import Carry
from jaxcgx.exchange.reduce import Ticket, begin, end, plain_reduce, reduce, travel_with
from jaxcgx.exchange.routes import Routes, Travel
from jaxcgx.plan import Plan
from jaxcgx.plan.plan import Phase, switch
from jaxcgx.train.division import after, choose, zeros
from jaxcgx.train.exchange import At, Exchange, Number, check_hyperparameter, is_rounds, routes_of, set_phases
from jaxcgx.train.state import ExchangeState
from jaxcgx.transports.base import Transport
from jaxcgx.typing import Key, Params, PyTree

TINY = 2.0**-126  # the smallest normal float32


class Telemetry(NamedTuple):
    """The errors of compression in a step, per leaf and over all ranks, as trees like the gradients, of float32[].

    `lost` is the error that feedback keeps. With own="raw" it includes both roundings of an exchange, with
    own="encoded" only the first. In a hierarchy, it includes only the exchange over the outermost axis. `meant` is the
    sum of gradients and residuals, which a step should send.

    Attributes:
      vnmse: `|lost|^2 / |meant|^2`.
      saturation: the fraction of elements that are not 0 and whose error is not finite, or at least as large as the
        element. Codecs take their scale from a bucket's range and don't clip. So these are small elements in a bucket
        with a large one.
      bytes: the bytes of the encoded leaf; in a hierarchy, for the outermost axis.
      uncompressed: the bytes of the leaf, uncompressed.
    """

    vnmse: PyTree
    saturation: PyTree
    bytes: PyTree
    uncompressed: PyTree


class Shared(NamedTuple):
    """What is the same on every rank.

    Attributes:
      count: int32[]: the number of steps so far.
      key: uint32[2], the same in every step.
      factors: PowerSGD's factors, like the gradients, `float32[rank, n]`; None without.
      trace: like the gradients: the momentum of the means of raw leaves, and of weight decay; None without.
      telemetry: the Telemetry of the last step; None without.
    """

    count: jax.Array  # pyright: ignore[reportIncompatibleMethodOverride]  (tuple.count)
    key: Key
    factors: PyTree = None
    trace: PyTree = None
    telemetry: Telemetry | None = None


class SentGradients(NamedTuple):
    ticket: Ticket | None  # the sum that has begun; None: `end` sends the gradients
    grads: PyTree  # the gradients, if `end` needs them
    before: PyTree  # the residuals before, if `end` needs them
    momentum: PyTree = None  # the momentum before, of `Momentum`


@dataclasses.dataclass(frozen=True)
class Feedback:
    """An exchange that keeps the errors of compression, as residuals, and sends them later (error feedback).

    Leaves that travel raw under every plan have no residual. `beta`, `reset_every` and `seed` may be arrays, so
    optax.inject_hyperparams can set them.

    Args:
      plan: a codec, {axis: codec} or a Plan; or a schedule of these. {0: plan, 1000: other} uses `other` from step 1000
        on, counted from 0. A schedule is one compiled program, which chooses the plan by the step. PowerSGDs of
        different ranks share the factors of the largest.
      beta: the new residual is (1 - beta) * the old residual + beta * the error of the step (LoCo). None: the new
        residual is the error of the step.
      reset_every: the number of steps after which residuals are set to zero again (LoCo). None: never.
      keep: whether the errors are kept and sent later.
      skip_nonfinite: whether the state stays as it is in a step whose mean is not finite everywhere. This is for
        optimizers that skip such steps (optax.apply_if_finite, loss scaling). Residuals are then not updated in place.
      telemetry: whether to measure the errors of each step, a `Telemetry`.
      seed: the seed of the noise of codecs that round stochastically.

    Attributes:
      phases: the plans in the order of their first steps.
    """

    plan: Any  # Plan | Codec | {axis: Codec} | {step: Plan}; later a Plan, or {step: Plan}
    _: dataclasses.KW_ONLY
    beta: Number | None = None
    reset_every: int | jax.Array | None = None
    keep: bool = True
    skip_nonfinite: bool = False
    telemetry: bool = False
    seed: int | jax.Array = 0
    # The function and the argument that errors name, if a plan was passed in place of this (`as_exchange`).
    _op: str = dataclasses.field(default="", repr=False, compare=False)
    _argument: str = dataclasses.field(default="plan", repr=False, compare=False)
    phases: tuple[Phase, ...] = dataclasses.field(init=False, repr=False, compare=False)
    early: ClassVar[bool] = False
    scatters: ClassVar[bool] = True

    def __post_init__(self) -> None:
        set_phases(self, self.op, self._argument)
        for name in ("keep", "skip_nonfinite", "telemetry"):
            set_field(self, name, check_flag)
        self._check_numbers(
            seed=(check_integer,),
            beta=(check_number, lambda x: 0 < x <= 1, "a number above 0 and up to 1"),
            reset_every=(check_integer, 1),
        )
        if not self.keep and (self.beta is not None or self.reset_every is not None):
            raise wrong(self.op, "keep", "True with 'beta' or 'reset_every'", False)
        if not self.keep:
            warn_of_loss(self.op, "keep", self._codecs, "write keep=True")

    @property
    def op(self) -> str:
        """The name that errors have."""
        return self._op or type(self).__name__

    @property
    def _codecs(self) -> list[Codec]:
        return [codec for phase in self.phases for codec in phase.plan.codecs]

    def _check_numbers(self, **checks: tuple[Any, ...]) -> None:
        for name, check in checks.items():
            if getattr(self, name) is not None:
                check_hyperparameter(self.op, name, getattr(self, name), *check)

    def init(self, params: Params) -> ExchangeState:
        first, *others = routes_of(self.op, self.phases, params, self._argument)
        carry = zeros(first.carry(others, residuals=self.keep))
        key = jax.random.key_data(jax.random.key(self.seed, impl="threefry2x32"))
        scalars = jax.tree.map(lambda _: jnp.zeros((), jnp.float32), params)
        telemetry = Telemetry(*[scalars] * 4) if self.telemetry else None
        shared = Shared(jnp.zeros((), jnp.int32), key, carry.factors, telemetry=telemetry)
        return ExchangeState(Carry(carry.residuals), shared)

    def begin(self, grads: PyTree, state: ExchangeState, at: At) -> tuple[Any, ExchangeState]:
        own, shared = state.own, state.shared
        watched = self.beta is not None or self.skip_nonfinite or self.telemetry
        before = own.residuals if watched else None
        # Branches of a conditional can't return tickets of different messages. And without feedback, the state has no
        # place for the errors that telemetry measures.
        if len(self.phases) > 1 or (self.telemetry and not self.keep):
            return SentGradients(None, grads, before), state
        travel = self._travel(0, grads, own.residuals, at)
        given = Carry(own.residuals, own.momentum, shared.factors)
        ticket, carry = begin(grads, given, travel, at.noise(shared) if travel.routes.stochastic else None)
        sent = SentGradients(ticket, grads if self.telemetry else None, before)
        return sent, ExchangeState(Carry(carry.residuals, carry.momentum), shared._replace(factors=carry.factors))

    def end(self, ticket: Any, state: ExchangeState, at: At, grads: PyTree = None) -> tuple[PyTree, ExchangeState]:
        own, shared, sent = state.own, state.shared, ticket
        old = Carry(own.residuals, own.momentum, shared.factors)
        if sent.ticket is None:
            branches = [functools.partial(self._reduce, i, shared, at) for i in range(len(self.phases))]
            mean, carry, telemetry = switch(self.phases, _turn(shared.count, at), branches, sent.grads, old)
        else:
            mean, carry = end(sent.ticket, old)
            telemetry, travel = None, sent.ticket.travel
            if self.telemetry:
                telemetry = measure(travel, at, sent.grads, sent.before, mean=mean, lost=carry.residuals)
        residuals, factors, count = carry.residuals, carry.factors, shared.count + 1
        each = jax.tree.map
        if (beta := self.beta) is not None:
            damp = lambda old, new: (1 - beta) * old + beta * new
            residuals = each(damp, sent.before, residuals)
        if self.skip_nonfinite:
            good = at.nonfinite(self.op, mean) == 0
            residuals, factors = choose(good, (residuals, factors), (sent.before, old.factors))
        if self.reset_every is not None:
            residuals = each(lambda r: jnp.where(count % self.reset_every == 0, 0, r), residuals)
        shared = shared._replace(count=count, factors=factors, telemetry=telemetry)
        return mean, ExchangeState(Carry(residuals, carry.momentum), shared)

    def _plan_over(self, phase: int, net: Transport) -> Plan:
        return self.phases[phase].plan

    def _travel(self, phase: int, grads: PyTree, residuals: PyTree, at: At) -> Travel:
        plan = self._plan_over(phase, at.net)
        routes = Routes.of(self.op, plan, grads, argument=self._argument)
        travel = travel_with(Carry(residuals), routes, at.net, at.way, x=grads, argument="grads")
        if self.keep and len(at.net.parts) > 1:
            self._warn_of_order(plan, at.net)
        return travel

    def _warn_of_order(self, plan: Plan, net: Transport) -> None:
        """Warns of axes in the wrong order: feedback covers the losses over the outermost axis only."""
        for codecs in (plan.default, *(rule.codec for rule in plan.rules)):
            if isinstance(codecs, Mapping):
                outermost, *inner = net.parts
                lossy = next((name for name in inner if not codecs[name].raw), None)
                if codecs[outermost].raw and lossy is not None:
                    why = f"feedback covers only the outermost axis, {outermost!r}, not {spell(codecs[lossy])}"
                    remedy = "the axes of the ranks are listed outermost first"
                    warn(f"{self.op}: argument '{self._argument}': {why} for {lossy!r}; {remedy}")

    def _reduce(
        self, phase: int, shared: Shared, at: At, grads: PyTree, carry: Carry
    ) -> tuple[PyTree, Carry, Telemetry | None]:
        """Begins and ends the sum with the plan of a phase. Returns (mean, new carry, telemetry)."""
        given, factors = carry.residuals, carry.factors
        if self.telemetry and not self.keep:  # it needs residuals, which collect the errors
            routes = Routes.of(self.op, self.phases[phase].plan, grads, argument=self._argument)
            given = zeros(routes.carry().residuals)
        travel = self._travel(phase, grads, given, at)
        routes = travel.routes
        shapes = [route.factor for route in routes.leaves]
        if factors is not None:
            first = [s and q[: s[0]] for s, q in zip(shapes, routes.each(factors))]
            factors = routes.tree.unflatten(first)
        key = at.noise(shared) if routes.stochastic else None
        mean, new = reduce(grads, Carry(given, carry.momentum, factors), travel, key)
        telemetry = measure(travel, at, grads, given, mean=mean, lost=new.residuals) if self.telemetry else None
        if factors is not None:
            both = zip(shapes, routes.each(carry.factors), routes.each(new.factors))
            factors = routes.tree.unflatten([q if s is None else q.at[: s[0]].set(x) for s, q, x in both])
        return mean, Carry(new.residuals if self.keep else carry.residuals, new.momentum, factors), telemetry


FEW_BITS = 3  # with fewer bits per element, training without feedback may fail, as in MuLoCo's paper


def warn_of_loss(op: str, argument: str, codecs: Iterable[Codec], remedy: str) -> None:
    """Warns of a codec that may lose too much to train without feedback.

    That is a sparse codec, one of low rank, or one with few bits that rounds to nearest: the errors of others average
    out. Scales don't count as bits, because they don't make codes finer. `remedy` says how to write feedback.
    """
    bits = lambda codec: codec.code_bytes(2**16, jnp.dtype(jnp.float32)) / 2**13
    few = lambda codec: codec.makes_codes and not codec.stochastic and bits(codec) < FEW_BITS
    lossy = lambda codec: codec.low_rank or few(codec) or (codec.sparse and bits(codec) < 32)
    if codec := next(filter(lossy, codecs), None):
        why = f"{spell(codec)} may lose too much of gradients to train without feedback"
        fed = "" if codec.diverges or not codec.contracts else f"{remedy}, or "
        warn(f"{op}: argument '{argument}': {why}; {fed}take jaxcgx.Eden, or a codec of 4 bits")


def as_exchange(given: Any, op: str = "make_train_step", argument: str = "exchange") -> Exchange:
    """Returns an exchange. A codec, {axis: codec}, a plan or a schedule of plans is one with feedback."""
    checked = isinstance(given, Feedback) and given.op != type(given).__name__  # it has been here before
    if isinstance(given, Codec | Plan | dict):
        given = Feedback(given, _op=op, _argument=argument)
    if not all(callable(getattr(given, name, None)) for name in ("init", "begin", "end")) or isinstance(given, type):
        expected = "a codec, {axis: codec}, a Plan, {first step: plan}, or an exchange, such as jaxcgx.DGC()"
        got, remedy = repr(given), ""
        if is_rounds(given):
            got, remedy = type(given).__name__, "pass it to make_train_step: it moves parameters, not gradients"
        raise wrong(op, argument, expected, got, remedy, kind=TypeError)
    if type(given) is Feedback and not checked and given.keep and given.beta is given.reset_every is None:
        for codec in {codec: None for phase in given.phases for codec in phase.plan.codecs if codec.diverges}:
            why = f"training with feedback may diverge with {spell(codec)}"
            warn(f"{op}: argument '{argument}': {why}; write jaxcgx.Eden(1), which has one bit, too")
    return given


def _turn(count: jax.Array, at: At) -> jax.Array:
    """Returns the step by which a conditional chooses its plan.

    XLA runs the exchanges of a conditional at the same time as others, in an order that differs from rank to rank. So
    the conditional waits for the mean of the loss. A loss that varies is no mean.
    """
    loss = None if at.loss is None else jnp.asarray(at.loss)
    return count if loss is None or _compat.varying_axes(loss) else after(loss, count)


def measure(travel: Travel, at: At, grads: PyTree, before: PyTree, mean: PyTree, lost: PyTree) -> Telemetry:
    """Returns the telemetry of an exchange: residuals were `before` and are `lost`. A rank may have slices of means."""
    routes, net = travel.routes, travel.net
    leaves, scalars = routes.each(grads), [jnp.zeros((), jnp.float32)] * len(routes.leaves)
    vnmse, saturation = list(scalars), list(scalars)
    if encoded := [i for i, route in enumerate(routes.leaves) if route.encoded]:
        given, means, after = routes.each(before), routes.each(mean), routes.each(lost)
        # A rank has only its slice of the mean of a scattered leaf. Its own gradient takes the place of the mean.
        seen = [x if travel.way.cuts(i) else m for i, (x, m) in enumerate(zip(leaves, means))]
        each = [_sums(leaves[i], given[i], seen[i], after[i]) if i in encoded else None for i in range(len(leaves))]
        nothing = jnp.zeros(4, jnp.float32)
        rows = at.of_shards([nothing if x is None else x for x in each])
        total = jnp.stack(_compat.match_varying(*(rows[i] for i in encoded)))
        for i, row in zip(encoded, plain_reduce(routes.op, total, net, mean=False)):
            vnmse[i] = row[0] / jnp.maximum(row[1], TINY)
            saturation[i] = row[2] / jnp.maximum(row[3], TINY)
    whole = [0 if route.skipped else route.nbytes for route in routes.leaves]
    outermost = lambda codec: codec[next(iter(net.parts))] if isinstance(codec, Mapping) else codec
    wire = lambda route: outermost(route.codec).wire_bytes(route.shape, route.dtype)
    sent = [wire(route) if route.encoded else size for route, size in zip(routes.leaves, whole)]
    numbers = lambda counts: routes.tree.unflatten([jnp.float32(n) for n in counts])
    return Telemetry(routes.tree.unflatten(vnmse), routes.tree.unflatten(saturation), numbers(sent), numbers(whole))


def _sums(leaf: jax.Array, residual: jax.Array, mean: jax.Array, lost: jax.Array) -> jax.Array:
    """Returns a rank's sums: the squares of what is lost and meant, the elements that are lost altogether, and all."""
    meant = leaf.astype(jnp.float32) + residual
    lost = jnp.where(jnp.isfinite(mean), lost, jnp.nan)  # elsewhere the residual stayed unchanged: it is no error
    gone = (meant != 0) & ~(jnp.abs(lost) < jnp.abs(meant))
    sums = (lost**2).sum(), (meant**2).sum(), gone.sum(dtype=jnp.float32), jnp.float32(leaf.size)
    return jnp.stack(_compat.match_varying(*sums))


@dataclasses.dataclass(frozen=True)
class FromEnv(Feedback):
    """A `Feedback` whose plan follows from CGX's variables and from the axes that it travels over."""

    plan: Any = dataclasses.field(init=False, repr=False, compare=False)
    _: dataclasses.KW_ONLY
    variables: Mapping[str, str]  # those of CGX
    options: Mapping[str, Any]  # the arguments of `Plan.from_env`

    def __post_init__(self) -> None:
        object.__setattr__(self, "plan", Plan.from_env(None, self.variables, **self.options))
        super().__post_init__()

    @property
    def op(self) -> str:
        return "from_env"

    def _plan_over(self, phase: int, net: Transport) -> Plan:
        return Plan.from_env(tuple(net.parts) or None, self.variables, **self.options)


def from_env(
    environ: Mapping[str, str] | None = None,
    *,
    keep: bool = False,
    bits: int | None = None,
    bucket_size: int | None = None,
    min_size: int | None = None,
    skip_1d: bool = False,
) -> Feedback:
    """Returns the exchange that CGX's environment variables describe, for any ranks.

        train = cgx.make_train_step(loss_fn, optimizer, cgx.mpi.hierarchy(), cgx.from_env())

    It is `Feedback(Plan.from_env(axes), keep=False)` with the axes of the ranks: those of a mesh, or the nodes of
    `jaxcgx.mpi.hierarchy()`. docs/plans.md has a table of the variables.

    Args:
      environ: the environment variables; None: those of this process.
      keep: whether the errors of compression are kept and sent later, which CGX doesn't do. A ring, CGX's default
        between nodes, keeps none: set CGX_CROSS_REDUCTION_TYPE=SRA.
      bits, bucket_size, min_size, skip_1d: as in `Plan.from_env`.
    """
    given = os.environ if environ is None else environ
    variables = {name: value for name, value in given.items() if name.startswith("CGX_")}
    options = dict(bits=bits, bucket_size=bucket_size, min_size=min_size, skip_1d=skip_1d)
    return FromEnv(variables=variables, options=options, keep=keep)
