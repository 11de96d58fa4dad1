"""Training whose gradients travel until the next step needs them: P3 (Jayarajan et al., MLSys 2019)."""

import dataclasses
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from jaxcgx.optim.halves import Halves
from jaxcgx.optim.pending import InFlight, Pending
from jaxcgx.optim.training import Found, Training
from jaxcgx.transports.axes import crosses


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class PriorityTraining(Training):
    """A step updates the parameters with the gradients of the step before, and finds new ones.

    The optimizer's state ends with these, or with None before the first step and after `finish`. The update of a leaf
    depends on its own mean alone, except in optimizers that couple leaves, and a layer of the loss depends on its own
    parameters. So XLA runs the first layers while the gradients of later ones still travel.

    Over Tcp a sum begins in the step that finds its gradients, and ends in the next step. Over other transports an
    exchange is one operation of a program. There the next step sends the gradients.
    """

    halves: dict[Any, Halves] = dataclasses.field(default_factory=dict)  # by what they were traced for

    def init(self, params: Any, model_state: Any = None) -> tuple[Any, Any, Any]:
        params, model_state, opt_state = super().init(params, model_state)
        return params, model_state, (*opt_state, None)

    def step(self, params: Any, model_state: Any, opt_state: Any, batch: Any, key: Any = None) -> tuple[Any, ...]:
        *inner, pending = opt_state
        find, ends = self.prepare(params, model_state, sent=inner[0], batch=batch, key=key)
        # What the loss uses first has its gradient last.
        params, inner = self._receive(params, inner, pending, order=ends and ends[::-1])
        found = find(params, inner[0])
        metrics = found.metrics(inner[0])
        return params, found.model_state, self._send(params, inner, found, order=ends), metrics

    def finish(self, params: Any, model_state: Any, opt_state: Any) -> tuple[Any, ...]:
        """(parameters, model state, optimizer state) after the update with what the last step found."""
        *inner, pending = opt_state
        params, inner = self._receive(params, inner, pending, order=None)
        return params, model_state, (*inner, None)

    def _send(self, params: Any, inner: Any, found: Found, order: Any) -> tuple[Any, ...]:
        """The optimizer's state with what was found, which is on its way where the transport can do that."""
        if not crosses(self.placement.data_axis) or self.placement.state:
            return *inner, Pending(found.gradients, found.loss)
        sent, *rest = inner
        function = self.exchanging(params, order)
        placement, given = self.placement, (params, found.gradients, sent, found.loss)
        leaves, tree = jax.tree_util.tree_flatten(given)
        known = order, tree, *map(jax.typeof, leaves)

        def begin(*given: Any) -> list[Any]:
            # The same object for the same arrays: a state with another one would compile the step anew.
            halves = self.halves.get(known) or self.halves.setdefault(known, Halves.of(function, *given))
            return halves.first(*given)

        values = placement.over_ranks(
            begin,
            in_specs=(placement.params_of_rank, placement.rows, placement.specs_of_rows(sent), P()),
            out_specs=placement.rows,
            check_vma=False,
        )(*given)
        return None, *rest, InFlight(values, found.loss, self.halves[known])

    def _receive(self, params: Any, inner: Any, pending: Any, order: Any) -> tuple[Any, Any]:
        """(parameters, optimizer's state) after the update with what the step before found."""
        if pending is None:
            return params, inner
        if isinstance(pending, Pending):
            return self.apply(params, inner, pending.gradients, loss=pending.loss, order=order)
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
