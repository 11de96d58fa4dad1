"""MixedSync: gradients are exchanged while the next step computes, and applied a step late (GeoMX; DCASGD)."""

import dataclasses
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from jaxcgx.plan import Plan
from jaxcgx.train.exchange import At, Exchange, as_exchange
from jaxcgx.train.state import ExchangeState
from jaxcgx.typing import Params, PyTree


class Held(NamedTuple):
    grads: PyTree
    inner: PyTree


class Shared(NamedTuple):
    then: Params  # the parameters of the held gradients
    waited: jax.Array  # whether there are any
    inner: PyTree


@dataclasses.dataclass(frozen=True)
class MixedSync:
    """A step late: mean + compensation * mean^2 * (params - the params of these gradients).

    Args:
      inner: a codec, a plan or an exchange of gradients.
      compensation: DCASGD's lambda.
    """

    inner: Exchange
    compensation: float = 0.04
    early: ClassVar[bool] = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "inner", as_exchange(self.inner))

    @property
    def plan(self) -> Plan:
        return self.inner.plan

    def init(self, params: Params) -> ExchangeState:
        inner = self.inner.init(params)
        like = jax.tree_util.tree_map(jnp.zeros_like, params)
        return ExchangeState(Held(like, inner.own), Shared(like, jnp.zeros((), bool), inner.shared))

    def begin(self, grads: None, state: ExchangeState, at: At) -> tuple[PyTree, ExchangeState]:
        ticket, inner = self.inner.begin(state.own.grads, ExchangeState(state.own.inner, state.shared.inner), at)
        own, shared = state.own._replace(inner=inner.own), state.shared._replace(inner=inner.shared)
        return ticket, ExchangeState(own, shared)

    def end(self, ticket: PyTree, state: ExchangeState, at: At, grads: PyTree = None) -> tuple[PyTree, ExchangeState]:
        shared = state.shared
        mean, inner = self.inner.end(ticket, ExchangeState(state.own.inner, shared.inner), at)

        def compensate(g: jax.Array, now: jax.Array, then: jax.Array) -> jax.Array:
            moved = (now - then).astype(g.dtype)
            return jnp.where(shared.waited, g + jnp.asarray(self.compensation, g.dtype) * g * g * moved, 0)

        late = jax.tree_util.tree_map(compensate, mean, at.params, shared.then)
        new = Shared(at.params, jnp.ones((), bool), inner.shared)
        return late, ExchangeState(Held(grads, inner.own), new)
