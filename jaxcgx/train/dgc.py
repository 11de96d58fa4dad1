"""DGC: every rank sends its largest elements, with momentum correction, masking and warm-up."""

import dataclasses
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from jaxcgx.codecs.topk import TopK
from jaxcgx.exchange.keys import fold
from jaxcgx.optim.clipping import Clipping
from jaxcgx.optim.phases import Phase, switch
from jaxcgx.plan import Plan
from jaxcgx.train.exchange import At, seed_words, zeros
from jaxcgx.exchange.reduce import Ticket, begin, end, reduce
from jaxcgx.exchange.routes import Routes
from jaxcgx.exchange.carry import Carry
from jaxcgx.train.state import ExchangeState
from jaxcgx.typing import Params, PyTree


class Shared(NamedTuple):
    count: jax.Array
    key: jax.Array
    trace: PyTree  # the momentum of leaves that travel raw


class Sent(NamedTuple):
    ticket: Ticket | PyTree  # with a warm-up: the gradients
    before: PyTree  # the momentum before


@dataclasses.dataclass(frozen=True)
class DGC:
    """Deep Gradient Compression.

    Args:
      ratio: the share of a leaf's elements that is sent.
      momentum: of every rank's own gradients, before they are sent.
      masking: whether momentum becomes 0 where an element was sent.
      warm_up: {first step: ratio} before `ratio` holds: ((0, 0.25), (100, 0.06)).
      clip_norm: the largest norm of a leaf.
    """

    ratio: float = 0.001
    momentum: float = 0.9
    masking: bool = True
    warm_up: tuple[tuple[int, float], ...] = ()
    clip_norm: float | None = None
    min_size: int = 0
    skip_1d: bool = True
    seed: int = 0
    early: ClassVar[bool] = False

    @property
    def phases(self) -> tuple[Phase, ...]:
        make = lambda r: Plan(TopK(r, select="sampled"), min_size=self.min_size, skip_1d=self.skip_1d)
        return tuple(Phase(start, make(r)) for start, r in self.warm_up) or (Phase(0, make(self.ratio)),)

    @property
    def plan(self) -> Plan:
        return self.phases[-1].plan

    def init(self, params: Params) -> ExchangeState:
        routes = Routes.of("DGC", self.plan, params)
        carry = zeros(routes.carry(feedback=True, momentum=True))
        trace = [None if r.encoded else jnp.zeros(r.shape, r.dtype) for r in routes.leaves]
        shared = Shared(jnp.zeros((), jnp.int32), seed_words(self.seed), routes.tree.unflatten(trace))
        return ExchangeState(carry, shared)

    def begin(self, grads: PyTree, state: ExchangeState, at: At) -> tuple[Sent, ExchangeState]:
        grads = Clipping(clip_value=None, clip_norm=self.clip_norm, clip_global_norm=None).clip(
            grads, at.net.names, at.net.size
        )
        before = state.own.momentum
        moved = _map2(lambda u, g: u if u is None else jnp.asarray(self.momentum, u.dtype) * u + g, before, grads)
        send = _map2(lambda u, g: g if u is None else u, moved, grads)
        given = Carry(state.own.residuals, moved)
        if len(self.phases) > 1:  # branches of a conditional can't return tickets of different messages
            return Sent(send, before), ExchangeState(given, state.shared)
        ticket, carry = begin(send, given, self._travel(self.plan, send, at), self._key(state))
        return Sent(ticket, before), ExchangeState(carry, state.shared)

    def end(self, sent: Sent, state: ExchangeState, at: At, grads: PyTree = None) -> tuple[PyTree, ExchangeState]:
        if len(self.phases) > 1:
            run = lambda plan: lambda x, c: reduce(x, self._masked(c), self._travel(plan, x, at), self._key(state))
            branches = [run(phase.plan) for phase in self.phases]
            mean, carry = switch(self.phases, state.shared.count, branches, sent.ticket, state.own)
        else:
            mean, carry = end(sent.ticket, self._masked(state.own))
        u = carry.momentum if self.masking else state.own.momentum
        finite = lambda old, new, x: None if new is None else jnp.where(jnp.isfinite(x) & jnp.isfinite(new), new, old)
        held = jax.tree_util.tree_map(finite, sent.before, u, mean, is_leaf=_none)
        trace = _map2(lambda t, x: t if t is None else self.momentum * t + x, state.shared.trace, mean)
        mean = _map2(lambda t, x: x if t is None else t, trace, mean)
        shared = Shared(state.shared.count + 1, state.shared.key, trace)
        return mean, ExchangeState(Carry(carry.residuals, held), shared)

    def _masked(self, carry: Carry) -> Carry:
        return carry if self.masking else Carry(carry.residuals)

    def _travel(self, plan: Plan, grads: PyTree, at: At):
        return Routes.of("DGC", plan, grads).over(at.net)

    def _key(self, state: ExchangeState) -> jax.Array | None:
        stochastic = any(c.stochastic for c in self.plan.codecs)
        return fold(state.shared.key, state.shared.count) if stochastic else None


def _none(x: PyTree) -> bool:
    return x is None


def _map2(function, holes: PyTree, tree: PyTree) -> PyTree:
    return jax.tree_util.tree_map(function, holes, tree, is_leaf=_none)
