"""value_and_grad: jax.value_and_grad for a jit program whose batch is split over an axis."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxcgx.codecs.base import Codec
from jaxcgx.collectives.splitting import Ranks
from jaxcgx.optim.cut import flatten_specs
from jaxcgx.plan import Plan
from jaxcgx.transports.axes import axis_names
from jaxcgx.train.division import OverMesh, in_rows, row, without_row
from jaxcgx.train.exchange import At, Exchange, as_exchange
from jaxcgx.train.feedback import Feedback
from jaxcgx.train.gradient import Loss, Outputs, find, of_all
from jaxcgx.train.state import ExchangeState, Sharding
from jaxcgx.typing import Key, Params, PyTree, Specs


@dataclasses.dataclass(frozen=True)
class ValueAndGrad:
    """The result of `value_and_grad`. With an exchange that keeps a state: `init(params)`, and `state=` in each call."""

    loss: Loss
    axis: PyTree
    exchange: Exchange
    stateful: bool
    mesh: jax.sharding.Mesh | None
    batch_specs: Specs
    aux_specs: Specs

    def init(self, params: Params) -> ExchangeState:
        division, sent = self._division((params,)), self.exchange.init(params)
        return ExchangeState(division.first(sent.own, division.rows), division.first(sent.shared, P()))

    def __call__(self, params: Params, *args: PyTree, state: ExchangeState | None = None, codec_key: Key | None = None):
        division = self._division((params, args))
        args, specs = division.place(args)
        outputs = Outputs("value_and_grad", self.aux_specs, division.rows)
        dims = [next((d for d, name in enumerate(s) if name is not None), None) for _, s in flatten_specs(specs)[0]]
        given = self.exchange.init(params) if state is None else state
        given = ExchangeState(row(given.own), given.shared) if state is None else given

        def of_rank(params: Params, args: PyTree, sent: ExchangeState) -> tuple[PyTree, ...]:
            net = division.net()
            found = find(self.loss, params, None, args, None, dims, 1, outputs)
            grads, value, _, aux = of_all(found, None, outputs, net)
            at = At(net, params, value)

            def both(own: PyTree, grads: PyTree) -> tuple[PyTree, ExchangeState]:
                ticket, mid = self.exchange.begin(grads, ExchangeState(own, sent.shared), at)
                return self.exchange.end(ticket, mid, at, grads)

            mean, new = in_rows(both, sent.own, row(grads))
            return value, without_row(mean), ExchangeState(new.own, without_row(new.shared)), aux

        rows = ExchangeState(division.rows if self.stateful else P(), P())
        out = (P(), P(), rows, outputs.out_specs)
        value, grads, new, aux = division.over(of_rank, (P(), specs, rows), out)(params, args, given)
        result = ((value, outputs.tree_of(aux)) if self.loss.has_aux else value), grads
        return (result, new) if self.stateful else result

    def _division(self, arrays: PyTree) -> OverMesh:
        ranks = Ranks.of("value_and_grad", self.mesh, axis_names(self.axis), jax.tree_util.tree_leaves(arrays))
        return OverMesh(ranks.mesh, self.axis, Sharding(batch=self.batch_specs))


def value_and_grad(
    loss_fn: Callable[..., PyTree],
    axis: PyTree,
    exchange: "Exchange | Codec | Plan",
    *,
    has_aux: bool = False,
    weighted: bool = False,
    mesh: jax.sharding.Mesh | None = None,
    batch_specs: Specs = None,
    aux_specs: Specs = None,
) -> ValueAndGrad:
    """A codec or a plan keeps nothing here, as a function has no state; `Feedback(...)` does."""
    stateful = not isinstance(exchange, Codec | Plan | dict)
    made = exchange if stateful else Feedback(exchange, keep=False)
    call = lambda params, batch, key=None: loss_fn(params, *batch)
    loss = Loss(call, False, has_aux, weighted)
    return ValueAndGrad(loss, axis, as_exchange(made), stateful, mesh, batch_specs, aux_specs)
