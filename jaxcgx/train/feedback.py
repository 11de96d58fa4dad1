"""Feedback: a plan whose compression errors are sent later. LoCo's beta and reset_every."""

import dataclasses
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from jaxcgx.exchange.keys import fold
from jaxcgx.optim.phases import check_plan
from jaxcgx.plan import Plan
from jaxcgx.train.exchange import At, seed_words, zeros
from jaxcgx.exchange.reduce import Ticket, begin, end
from jaxcgx.exchange.routes import Routes
from jaxcgx.exchange.carry import Carry
from jaxcgx.train.state import ExchangeState
from jaxcgx.typing import Params, PyTree


class Shared(NamedTuple):
    count: jax.Array
    key: jax.Array
    factors: PyTree


class Sent(NamedTuple):
    ticket: Ticket
    before: PyTree  # the residuals before, if the new ones depend on them


@dataclasses.dataclass(frozen=True)
class Feedback:
    """Error feedback around a plan.

    Args:
      plan: a codec, {axis: codec} or a Plan.
      beta: the new residual is (1 - beta) * the old one + beta * the error of the step.
      reset_every: the steps after which residuals become zero.
      keep: whether errors are kept at all.
      seed: of the noise of stochastic rounding.
    """

    plan: Plan
    beta: float | None = None
    reset_every: int | None = None
    keep: bool = True
    seed: int = 0
    early: ClassVar[bool] = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "plan", check_plan("Feedback", self.plan))

    def init(self, params: Params) -> ExchangeState:
        carry = zeros(Routes.of("Feedback", self.plan, params).carry(feedback=self.keep, momentum=False))
        shared = Shared(jnp.zeros((), jnp.int32), seed_words(self.seed), carry.factors)
        return ExchangeState(Carry(carry.residuals), shared)

    def begin(self, grads: PyTree, state: ExchangeState, at: At) -> tuple[Sent, ExchangeState]:
        travel, shared = Routes.of("Feedback", self.plan, grads).over(at.net, at.dims), state.shared
        key = fold(shared.key, shared.count) if travel.routes.stochastic else None
        given = Carry(state.own.residuals, factors=shared.factors)
        ticket, carry = begin(grads, given, travel, key)
        return Sent(ticket, None if self.beta is None else given.residuals), _with(state, carry)

    def end(self, sent: Sent, state: ExchangeState, at: At, grads: PyTree = None) -> tuple[PyTree, ExchangeState]:
        shared = state.shared
        mean, carry = end(sent.ticket, Carry(state.own.residuals, factors=shared.factors))
        residuals, count = carry.residuals, shared.count + 1
        if self.beta is not None:
            damp = lambda old, new: (1 - self.beta) * old + self.beta * new
            residuals = jax.tree_util.tree_map(damp, sent.before, residuals)
        if self.reset_every is not None:
            residuals = jax.tree_util.tree_map(lambda r: jnp.where(count % self.reset_every == 0, 0, r), residuals)
        return mean, ExchangeState(Carry(residuals), Shared(count, shared.key, carry.factors))


def _with(state: ExchangeState, carry: Carry) -> ExchangeState:
    return ExchangeState(Carry(carry.residuals), state.shared._replace(factors=carry.factors))
