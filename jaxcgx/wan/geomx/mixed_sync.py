"""MixedSync: applies gradients some steps late, with DCASGD's compensation for the delay (GeoMX's mixed sync)."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from jaxcgx.checks import check_integer, check_number, set_field, wrong
from jaxcgx.plan import Plan
from jaxcgx.train.dion import Dion
from jaxcgx.train.exchange import At, Number, check_centers, check_hyperparameter
from jaxcgx.train.feedback import as_exchange
from jaxcgx.train.state import ExchangeState
from jaxcgx.typing import Key, Params, PyTree

OP = "MixedSync"


class Held(NamedTuple):
    """What each rank has for itself."""

    grads: list[PyTree]  # of the last steps, which are still to be exchanged, oldest first
    exchange: PyTree  # the same of the exchange

    @staticmethod
    def per_rank() -> dict[str, str]:
        return {"grads": "mean"}


class Delayed(NamedTuple):
    """What is the same on every rank."""

    params: list[Params]  # those at which the held gradients were computed, oldest first
    waited: jax.Array  # int32[]: the number of held gradients
    exchange: PyTree  # the same of the exchange

    @property
    def count(self) -> jax.Array:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.exchange.count

    @property
    def key(self) -> Key:
        return self.exchange.key

    @property
    def telemetry(self) -> PyTree:
        """The Telemetry of the last exchange."""
        return getattr(self.exchange, "telemetry", None)


@dataclasses.dataclass(frozen=True)
class MixedSync:
    """An exchange whose means are `staleness` steps late and compensated for the delay.

        train = cgx.make_train_step(loss_fn, optax.sgd(0.1), mesh, cgx.wan.MixedSync(cgx.MaxMin(4)))

    A step exchanges the gradients of the step `staleness` steps before. The exchange doesn't depend on the step's own
    computation, so over `Tcp` both run at the same time. The result is mean + compensation * mean^2 * (params - the
    params at which these gradients were computed), as in DCASGD. All ranks have the same delay, so replicas stay equal.
    The first `staleness` steps change nothing. The gradients of the last `staleness` steps stay in the state.

    Args:
      exchange: a codec, {axis: codec}, a Plan or a schedule of these: a `Feedback`. Or another exchange, except `Dion`.
      staleness: the delay in steps, at least 1.
      compensation: DCASGD's lambda. 0: no compensation.
    """

    exchange: Any
    _: dataclasses.KW_ONLY
    staleness: int = 1
    compensation: Number = 0.04
    early: ClassVar[bool] = True
    scatters: ClassVar[bool] = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "exchange", as_exchange(self.exchange, OP))
        if isinstance(self.exchange, Dion):
            remedy = "pass Dion itself to make_train_step, or jaxcgx.PowerSGD with optax.contrib.muon here"
            raise wrong(OP, "exchange", "one of gradients, which it compensates", "Dion, which returns updates", remedy)
        set_field(self, "staleness", check_integer, 1)
        at_least = lambda x: x >= 0
        check_hyperparameter(OP, "compensation", self.compensation, check_number, at_least, "a number of at least 0")

    @property
    def plan(self) -> Plan | Mapping[int, Plan] | None:
        return self.exchange.plan

    def init(self, params: Params) -> ExchangeState:
        inner = self.exchange.init(params)
        zeros = lambda: [jax.tree.map(jnp.zeros_like, params) for _ in range(self.staleness)]
        return ExchangeState(Held(zeros(), inner.own), Delayed(zeros(), jnp.zeros((), jnp.int32), inner.shared))

    def begin(self, grads: PyTree, state: ExchangeState, at: At) -> tuple[Any, ExchangeState]:
        check_centers(OP, *at.centers)
        due = None if self.exchange.early else state.own.grads[0]
        ticket, inner = self.exchange.begin(due, _inner(state), at)
        return ticket, _outer(state, inner)

    def end(self, ticket: Any, state: ExchangeState, at: At, grads: PyTree = None) -> tuple[PyTree, ExchangeState]:
        if at.params is None:
            remedy = "call update(gradients, state, params)"
            raise wrong(OP, "params", "the parameters", None, remedy, kind=TypeError)
        held, shared = state.own, state.shared
        mean, inner = self.exchange.end(ticket, _inner(state), at, held.grads[0] if self.exchange.early else None)
        waited = shared.waited == self.staleness  # before, means are 0, even if momentum and weight decay are not

        def compensate(g: jax.Array, now: jax.Array, then: jax.Array) -> jax.Array:
            if not jnp.issubdtype(g.dtype, jnp.inexact):  # a frozen leaf
                return g
            moved = (now - then).astype(g.dtype)
            return jnp.where(waited, g + jnp.asarray(self.compensation, g.dtype) * g * g * moved, 0)

        late = jax.tree.map(compensate, mean, at.params, shared.params[0])
        new = jax.tree.map(lambda g, old: g.astype(old.dtype), grads, held.grads[0])
        held = held._replace(grads=[*held.grads[1:], new])
        count = jnp.minimum(shared.waited + 1, self.staleness)
        shared = shared._replace(params=[*shared.params[1:], at.params], waited=count)
        return late, _outer(ExchangeState(held, shared), inner)


def _inner(state: ExchangeState) -> ExchangeState:
    return ExchangeState(state.own.exchange, state.shared.exchange)


def _outer(state: ExchangeState, inner: ExchangeState) -> ExchangeState:
    """Returns the state with another one of the exchange inside."""
    return ExchangeState(state.own._replace(exchange=inner.own), state.shared._replace(exchange=inner.shared))
