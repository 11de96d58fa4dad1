"""Training in which gradients travel until the next step needs them: P3 (Jayarajan et al., MLSys 2019)."""

import dataclasses
from typing import Any

import jax

from jaxcgx.optim.halves import Halves
from jaxcgx.optim.nesting import check_opt_state
from jaxcgx.optim.pending import InFlight, Pending
from jaxcgx.optim.training import VALUE, Found, Training
from jaxcgx.transports.axes import crosses


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class PriorityTraining(Training):
    """Training in which a step applies the gradients of the step before, and then computes new gradients.

    The last entry of the optimizer's state has these pending gradients, or None before the first step and after
    `finish`. The update of a leaf depends only on the mean of this leaf's gradient, except in optimizers that couple
    leaves. A layer depends only on its own parameters and on earlier layers. So XLA runs the first layers while the
    gradients of later layers still travel.

    Over Tcp, a sum begins in the step that computes its gradients, and ends in the next step. Over other transports, an
    exchange is one operation of a program, so the next step sends the gradients. The same holds if gradients are
    sharded over the ranks.
    """

    # {the order, structure and types that they were traced for: halves}
    halves: dict[Any, Halves] = dataclasses.field(default_factory=dict)

    def init(self, params: Any, model_state: Any = None) -> tuple[Any, Any, Any]:
        params, model_state, opt_state = super().init(params, model_state)
        return params, model_state, (*opt_state, None)

    def step(self, params: Any, model_state: Any, opt_state: Any, batch: Any, key: Any = None) -> tuple[Any, ...]:
        check_opt_state(opt_state)
        *inner, pending = opt_state
        find, ends = self.prepare(params, model_state, sent=inner[0], batch=batch, key=key)
        # The parameters that the loss uses first have gradients that are ready last.
        params, inner = self._receive(params, inner, pending, order=ends and ends[::-1])
        found = find(params, inner[0])
        metrics = found.metrics(inner[0])
        return params, found.model_state, self._send(params, inner, found, order=ends), metrics

    def finish(self, params: Any, model_state: Any, opt_state: Any) -> tuple[Any, ...]:
        """Returns (parameters, model state, optimizer state) after the update with the pending gradients."""
        *inner, pending = opt_state
        params, inner = self._receive(params, inner, pending, order=None)
        return params, model_state, (*inner, None)

    def _send(self, params: Any, inner: Any, found: Found, order: Any) -> tuple[Any, ...]:
        """Returns the optimizer's state with the new gradients.

        If the transport can send while later programs run, the sums of these gradients have begun.
        """
        if not crosses(self.placement.data_axis) or self.placement.state:
            return *inner, Pending(found.gradients, found.loss)
        sent, *rest = inner
        function = self.exchanging(params, order)
        placement, given = self.placement, (params, found.gradients, sent, dict(value=found.loss))
        leaves, tree = jax.tree_util.tree_flatten(given)
        known = order, tree, *map(jax.typeof, leaves)

        def begin(*given: Any) -> list[Any]:
            # `halves` is part of the state's structure. A new object would compile the next step again.
            halves = self.halves.get(known) or self.halves.setdefault(known, Halves.of(function, *given))
            return halves.first(*given)

        values = placement.over_ranks(
            begin,
            in_specs=(placement.params_of_rank, placement.rows, placement.specs_of_rows(sent), VALUE),
            out_specs=placement.rows,
            check_vma=False,
        )(*given)
        return None, *rest, InFlight(values, found.loss, self.halves[known])

    def _receive(self, params: Any, inner: Any, pending: Any, order: Any) -> tuple[Any, Any]:
        """Returns (parameters, optimizer's state) after the update with the pending gradients."""
        if pending is None:
            return params, inner
        if isinstance(pending, Pending):
            return self.apply(params, inner, pending.gradients, extra=dict(value=pending.loss), order=order)
        placement, (_, *rest) = self.placement, inner
        _, sent = pending.halves.results
        end = placement.over_ranks(
            pending.halves.second,
            in_specs=(placement.params_of_rank, placement.rows),
            out_specs=(placement.gradients_of_rank(self.skipped(params)), placement.specs_of_rows(sent)),
            check_vma=False,
        )
        means, sent = end(params, pending.values)
        return self.update(params, (sent, *rest), means, loss=pending.loss)
