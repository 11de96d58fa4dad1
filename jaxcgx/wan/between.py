"""The exchange of outer gradients between centers: it begins in one step, and ends in the same or in a later one."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxcgx.codecs.base import Codec
from jaxcgx.codecs.raw import Raw
from jaxcgx.collectives.crossing import begin_pmean, end_pmean
from jaxcgx.exchange.keys import fold
from jaxcgx.optim.compress import compress_gradients
from jaxcgx.optim.leaves import loose
from jaxcgx.optim.state import CompressState
from jaxcgx.plan import Plan
from jaxcgx.plan.by_axis import by_axis
from jaxcgx.transports.axes import axis_names, crosses


@dataclasses.dataclass(frozen=True)
class Between:
    """A compressed mean over the centers, with feedback, of a part of the parameters.

    The ranks of a center share the work uncompressed. All of them have the same outer gradients and residuals, of which
    the first rank's count.
    """

    axis: Any  # the axis of the centers, then those of a center's ranks; some of them marked
    plan: Plan
    feedback: bool
    seed: int
    options: dict[str, Any]  # of begin_pmean

    @property
    def crosses(self) -> bool:
        """Whether an exchange goes on while the next steps' programs run."""
        return crosses(self.axis) and not self._inner

    @property
    def centers(self) -> int:
        return lax.axis_size(axis_names(self.axis)[0])

    @property
    def _inner(self) -> tuple[Any, ...]:
        return axis_names(self.axis)[1:]

    @property
    def _parts(self) -> Plan:
        """The plan for a part of the parameters, by axis."""
        names, plan = axis_names(self.axis), loose(self.plan)
        by_name = lambda codec: by_axis(names, codec, Raw()) if isinstance(codec, Codec) and not codec.skips else codec
        rules = [dataclasses.replace(rule, codec=by_name(rule.codec)) for rule in plan.rules]
        return dataclasses.replace(plan, default=by_name(plan.default), rules=rules)

    def init(self, params: Any) -> CompressState:
        """The state before the first exchange of outer gradients like these parameters."""
        made: Any = compress_gradients(self.axis, self._parts, feedback=self.feedback, seed=self.seed)
        return made.init(params)

    def begin(self, moved: Any, sent: CompressState) -> tuple[Any, CompressState]:
        """Begins an exchange: (a ticket, the state)."""
        key = fold(sent.key, sent.count) if self.plan.stochastic else None
        residuals = jax.tree_util.tree_map(lambda r: r[0], sent.residuals)
        if self._inner:
            first = lax.axis_index(self._inner) == 0
            moved, residuals = jax.tree_util.tree_map(lambda x: jnp.where(first, x, 0), (moved, residuals))
        state = {"residuals": residuals, "factors": sent.factors}
        state = {name: tree for name, tree in state.items() if jax.tree_util.tree_leaves(tree)}
        found = begin_pmean(moved, self.axis, self._parts, key=key, **state, **self.options)
        ticket, *new = found if state else (found,)
        renewed = dict(zip(state, new))
        if "residuals" in renewed:
            renewed["residuals"] = jax.tree_util.tree_map(lambda r: r[None], renewed["residuals"])
        count = None if sent.count is None else sent.count + 1
        return ticket, sent._replace(count=count, **renewed)

    def end(self, ticket: Any, sent: CompressState) -> tuple[Any, CompressState]:
        """Ends an exchange: (the mean, the state)."""
        residuals = jax.tree_util.tree_map(lambda r: r[0], sent.residuals)
        fed = bool(jax.tree_util.tree_leaves(residuals))
        mean, residuals = end_pmean(ticket, residuals) if fed else (end_pmean(ticket), residuals)
        if self._inner:
            ranks = lax.axis_size(self._inner)
            mean = jax.tree_util.tree_map(lambda x: x * ranks, mean)
            residuals = jax.tree_util.tree_map(lambda r: lax.psum(r, self._inner), residuals)
        return mean, sent._replace(residuals=jax.tree_util.tree_map(lambda r: r[None], residuals))
