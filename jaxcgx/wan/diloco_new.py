"""DiLoCo: centers train on their own, and exchange outer gradients once in many steps. No exchange of gradients.

It is told apart from `Exchange`: it moves parameters, after the update. Only make_train_step takes it.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxcgx.optim.cut import flatten_specs
from jaxcgx.optim.phases import check_plan
from jaxcgx.plan import Plan
from jaxcgx.train.division import OverMesh, in_rows, row, without_row
from jaxcgx.train.exchange import At
from jaxcgx.train.feedback import Feedback
from jaxcgx.train.gradient import Loss, Outputs, find
from jaxcgx.train.state import ExchangeState, Metrics, TrainState
from jaxcgx.typing import Batch, Key, Params, PyTree


@dataclasses.dataclass(frozen=True)
class Diloco:
    """Every `every` steps, the outer parameters move by the mean of (outer - own parameters).

    Args:
      every: the steps of a round.
      plan: a codec or plan of outer gradients.
      rate, momentum: of the outer optimizer, SGD with Nesterov's momentum.
    """

    every: int
    plan: Plan
    rate: float = 0.7
    momentum: float = 0.9

    def __post_init__(self) -> None:
        object.__setattr__(self, "plan", check_plan("Diloco", self.plan))

    @property
    def between(self) -> Feedback:
        return Feedback(self.plan)

    @property
    def outer(self) -> optax.GradientTransformation:
        return optax.sgd(self.rate, momentum=self.momentum, nesterov=True)


class Own(NamedTuple):
    """What each center has for itself, with rows."""

    params: Params
    sent: PyTree


class Shared(NamedTuple):
    count: jax.Array
    outer: PyTree
    sent: PyTree


@dataclasses.dataclass(frozen=True)
class Centers:
    """The rooms of a step of centers: gradient, inner update, and in some steps exchange and outer update."""

    division: OverMesh
    loss: Loss
    optimizer: optax.GradientTransformationExtraArgs
    diloco: Diloco
    accumulate: int

    @property
    def specs(self) -> TrainState:
        rows = self.division.rows
        return TrainState(P(), rows, rows, ExchangeState(rows, P()), None)

    def init(self, params: Params, model_state: PyTree = None) -> TrainState:
        first, rows = self.division.first, self.division.rows
        params, model_state = jax.tree_util.tree_map(jnp.asarray, (params, model_state))
        sent = self.diloco.between.init(params)
        shared = Shared(jnp.zeros((), jnp.int32), self.diloco.outer.init(params), sent.shared)
        exchange = ExchangeState(first(Own(params, sent.own), rows), first(shared, P()))
        inner = first(self.optimizer.init(params), rows)
        return TrainState(first(params, P()), first(model_state, rows), inner, exchange)

    def step(self, state: TrainState, batch: Batch, key: Key | None = None) -> tuple[TrainState, Metrics]:
        batch, specs = self.division.place(batch)
        dims = [next((d for d, name in enumerate(s) if name is not None), None) for _, s in flatten_specs(specs)[0]]

        def of_rank(state: TrainState, batch: Batch, key: Key | None) -> tuple[TrainState, jax.Array]:
            own, shared, net = state.exchange.own, state.exchange.shared, self.division.net()
            key = None if key is None else jax.random.fold_in(key, net.rank)
            params, inner, model_state = without_row((own.params, state.opt_state, state.model_state))
            outputs = Outputs("make_train_step", None, self.division.rows)
            found = find(self.loss, params, model_state, batch, key, dims, self.accumulate, outputs)
            updates, inner = self.optimizer.update(found.grads, inner, params, value=found.loss)
            params, count = optax.apply_updates(params, updates), shared.count + 1
            given = state.params, Own(row(params), own.sent), shared._replace(count=count)
            due = count % self.diloco.every == 0
            outer, own, shared = lax.cond(due, self._round, lambda *same: same, *given)
            new = TrainState(outer, row(found.model_state), row(inner), ExchangeState(own, shared))
            return new, row(found.loss)

        out = self.specs, self.division.rows
        state, loss = self.division.over(of_rank, (self.specs, specs, P()), out)(state, batch, key)
        return state, Metrics(loss, None)

    def _round(self, outer: Params, own: Own, shared: Shared) -> tuple[Params, Own, Shared]:
        """Exchanges outer gradients, and moves outer and own parameters."""
        between, at = self.diloco.between, At(self.division.net())
        moved = jax.tree_util.tree_map(lambda x, y: x.astype(jnp.float32) - y[0].astype(jnp.float32), outer, own.params)

        def exchange(sent: PyTree, moved: PyTree) -> tuple[PyTree, ExchangeState]:
            return between.end(*between.begin(moved, ExchangeState(sent, shared.sent), at), at)

        mean, sent = in_rows(exchange, own.sent, row(moved))
        mean = without_row(mean)
        good = jnp.stack([jnp.isfinite(x).all() for x in jax.tree_util.tree_leaves(mean)]).all()
        given = jax.tree_util.tree_map(lambda d, x: d.astype(x.dtype), mean, outer)
        updates, opt = self.diloco.outer.update(given, shared.outer, outer)
        choose = lambda yes, no: jax.tree_util.tree_map(lambda x, y: jnp.where(good, x, y), yes, no)
        outer, opt = choose((optax.apply_updates(outer, updates), opt), (outer, shared.outer))
        sent = choose(ExchangeState(sent.own, without_row(sent.shared)), ExchangeState(own.sent, shared.sent))
        return outer, Own(row(outer), sent.own), Shared(shared.count, opt, sent.shared)

    priority = step

    def finish(self, state: TrainState) -> TrainState:
        return state
