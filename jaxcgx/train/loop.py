"""make_train_step: the loop's room. jit, donation, and the order of the other rooms."""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P

from jaxcgx.codecs.base import Codec
from jaxcgx.optim.cut import flatten_specs
from jaxcgx.optim.frozen import join, part
from jaxcgx.optim.halves import after
from jaxcgx.plan import Plan
from jaxcgx.wan import diloco_new as diloco
from jaxcgx.train.division import Division, OverMesh, OverProcesses, in_rows, row, without_row
from jaxcgx.train.exchange import At, Exchange, as_exchange
from jaxcgx.train.gradient import Loss, Outputs, find, of_all
from jaxcgx.exchange.routes import Routes
from jaxcgx.train.state import ExchangeState, Metrics, Sharding, TrainState
from jaxcgx.typing import Batch, Key, Params, PyTree, Specs
from jaxcgx.train.update import update


class TrainStep(NamedTuple):
    """The functions of a training loop. `finish` applies what is pending, before a checkpoint or at the end."""

    init: Callable[..., TrainState]
    step: Callable[..., tuple[TrainState, Metrics]]
    finish: Callable[[TrainState], TrainState]


def make_train_step(
    loss_fn: Callable[..., PyTree],
    optimizer: optax.GradientTransformation,
    mesh: jax.sharding.Mesh | PyTree,
    exchange: "Exchange | diloco.Diloco | Codec | Plan",
    *,
    axis: PyTree = "data",
    sharding: Sharding = Sharding(),
    accumulate: int = 1,
    overlap: str | None = None,
    has_state: bool = False,
    has_aux: bool = False,
    weighted: bool = False,
    aux_specs: Specs = None,
    donate: bool = True,
) -> TrainStep:
    division = OverMesh(mesh, axis, sharding) if isinstance(mesh, jax.sharding.Mesh) else OverProcesses(mesh)
    loss = Loss(loss_fn, has_state, has_aux, weighted)
    optimizer = optax.with_extra_args_support(optimizer)
    if isinstance(exchange, diloco.Diloco):
        training = diloco.Centers(division, loss, optimizer, exchange, accumulate)
    else:
        training = Training(division, loss, optimizer, as_exchange(exchange), accumulate, aux_specs)
    step = training.priority if overlap == "priority" else training.step
    jit = functools.partial(jax.jit, donate_argnums=0 if donate else ())
    return TrainStep(training.init, jit(step), jit(training.finish))


class Pending(NamedTuple):
    """Gradients whose exchange has begun, with rows for the ranks, and their loss."""

    ticket: PyTree
    loss: jax.Array


@dataclasses.dataclass(frozen=True)
class Training:
    """A step's rooms: division, gradient, exchange, update."""

    division: Division
    loss: Loss
    optimizer: optax.GradientTransformationExtraArgs
    exchange: Exchange
    accumulate: int
    aux_specs: Specs

    @property
    def specs(self) -> ExchangeState:
        return ExchangeState(self.division.rows, P())

    def skipped(self, params: Params) -> PyTree:
        return Routes.of("make_train_step", self.exchange.plan, params).skipped

    def init(self, params: Params, model_state: PyTree = None) -> TrainState:
        first = self.division.first
        params, model_state = jax.tree_util.tree_map(jnp.asarray, (params, model_state))
        sent = self.exchange.init(params)
        return TrainState(
            params=first(params, P()),
            model_state=first(model_state, P()),
            opt_state=first(self.optimizer.init(part(params, self.skipped(params))[0]), P()),
            exchange=ExchangeState(first(sent.own, self.division.rows), first(sent.shared, P())),
        )

    def step(self, state: TrainState, batch: Batch, key: Key | None = None) -> tuple[TrainState, Metrics]:
        """A step: begin what is late, gradient, exchange, update."""
        division, early = self.division, self.exchange.early
        batch, specs = division.place(batch)
        outputs = self._outputs()

        def of_rank(state: TrainState, batch: Batch, key: Key | None) -> tuple[PyTree, ...]:
            ticket, sent = None, state.exchange
            if early:
                ticket, sent = self._begin(None, sent, state.params, None)
                if division.crosses:
                    batch = jax.tree_util.tree_map(lambda x: after(ticket, x), batch)
            grads, loss, model_state, aux = self._gradient(state, batch, key, specs, outputs)
            if not early:
                return *self._reduce(row(grads), sent, state.params, loss), model_state, loss, aux
            if division.crosses:
                ticket = jax.tree_util.tree_map(lambda x: after(grads, x), ticket)
            return *self._end(ticket, sent, state.params, loss, row(grads)), model_state, loss, aux

        in_specs = (self._state_specs, specs, P())
        out = (self.division.sharding.optimizer or P(), self.specs, P(), P(), outputs.out_specs)
        mean, sent, model_state, loss, aux = division.over(of_rank, in_specs, out)(state, batch, key)
        params, opt_state = self._update(mean, state, loss)
        return TrainState(params, model_state, opt_state, sent), Metrics(loss, outputs.tree_of(aux))

    def priority(self, state: TrainState, batch: Batch, key: Key | None = None) -> tuple[TrainState, Metrics]:
        """A step that ends the exchange of the step before, and begins its own (P3)."""
        state = self.finish(state)
        batch, specs = self.division.place(batch)
        outputs = self._outputs()

        def of_rank(state: TrainState, batch: Batch, key: Key | None) -> tuple[PyTree, ...]:
            grads, loss, model_state, aux = self._gradient(state, batch, key, specs, outputs)
            ticket, sent = self._begin(row(grads), state.exchange, state.params, loss)
            return ticket, sent, model_state, loss, aux

        in_specs, out = (self._state_specs, specs, P()), (self.division.rows, self.specs, P(), P(), outputs.out_specs)
        ticket, sent, model_state, loss, aux = self.division.over(of_rank, in_specs, out)(state, batch, key)
        state = TrainState(state.params, model_state, state.opt_state, sent, Pending(ticket, loss))
        return state, Metrics(loss, outputs.tree_of(aux))

    def finish(self, state: TrainState) -> TrainState:
        """Ends the exchange that is pending, and applies its mean."""
        if state.pending is None:
            return state
        end = lambda ticket, sent, params, loss: self._end(ticket, sent, params, loss, None)
        specs = (self.division.rows, self.specs, P(), P())
        ticket, loss = state.pending
        mean, sent = self.division.over(end, specs, (P(), self.specs))(ticket, state.exchange, state.params, loss)
        params, opt_state = self._update(mean, state, loss)
        return TrainState(params, state.model_state, opt_state, sent)

    @property
    def _state_specs(self) -> TrainState:
        return TrainState(P(), P(), P(), self.specs, None)

    def _outputs(self) -> Outputs:
        return Outputs("make_train_step", self.aux_specs, self.division.rows)

    def _gradient(
        self, state: TrainState, batch: Batch, key: Key | None, specs: Specs, outputs: Outputs
    ) -> tuple[PyTree, ...]:
        net, skipped = self.division.net(), self.skipped(state.params)
        trained, frozen = part(state.params, skipped)
        loss = Loss(lambda p, *rest: self.loss.function(join(p, frozen), *rest), *dataclasses.astuple(self.loss)[1:])
        dims = [next((d for d, name in enumerate(s) if name is not None), None) for _, s in flatten_specs(specs)[0]]
        key = None if key is None else jax.random.fold_in(key, net.rank)
        given = jax.tree_util.tree_map(lambda x: _own_key(x, net.rank), state.model_state)
        found = find(loss, trained, given, batch, key, dims, self.accumulate, outputs)
        grads, value, model_state, aux = of_all(found, given, outputs, net)
        return join(grads, frozen), value, model_state, aux

    def _begin(self, grads: PyTree, sent: ExchangeState, params: Params, loss: PyTree) -> tuple[PyTree, ExchangeState]:
        at = At(self.division.net(), params, loss, self.division.dims)
        begin = lambda own, grads: self.exchange.begin(grads, ExchangeState(own, sent.shared), at)
        ticket, new = in_rows(begin, sent.own, grads)
        return ticket, ExchangeState(new.own, without_row(new.shared))

    def _end(
        self, ticket: PyTree, sent: ExchangeState, params: Params, loss: PyTree, grads: PyTree
    ) -> tuple[PyTree, ExchangeState]:
        at = At(self.division.net(), params, loss, self.division.dims)
        end = lambda own, ticket, grads: self.exchange.end(ticket, ExchangeState(own, sent.shared), at, grads)
        mean, new = in_rows(end, sent.own, ticket, grads)
        return without_row(mean), ExchangeState(new.own, without_row(new.shared))

    def _reduce(self, grads: PyTree, sent: ExchangeState, params: Params, loss: PyTree) -> tuple[PyTree, ExchangeState]:
        """Begins and ends an exchange in one program."""
        at = At(self.division.net(), params, loss, self.division.dims)

        def both(own: PyTree, grads: PyTree) -> tuple[PyTree, ExchangeState]:
            ticket, mid = self.exchange.begin(grads, ExchangeState(own, sent.shared), at)
            return self.exchange.end(ticket, mid, at, grads)

        mean, new = in_rows(both, sent.own, grads)
        return without_row(mean), ExchangeState(new.own, without_row(new.shared))

    def _update(self, mean: PyTree, state: TrainState, loss: jax.Array) -> tuple[Params, PyTree]:
        skipped = self.skipped(state.params)
        return update(self.optimizer, mean, state.opt_state, state.params, skipped, loss, self.division, self.division.sharding.optimizer)


def _own_key(x: jax.Array, rank: jax.Array) -> jax.Array:
    return jax.random.fold_in(x, rank) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
