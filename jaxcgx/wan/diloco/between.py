"""The exchange of outer gradients between centers. It ends in the step in which it begins, or in a later step."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxcgx.exchange.message import Carry, fold
from jaxcgx.exchange.reduce import Ticket, begin, check_input, end
from jaxcgx.exchange.routes import Routes, Way
from jaxcgx.plan import Plan
from jaxcgx.transports.base import Transport
from jaxcgx.typing import Key, Params, PyTree
from jaxcgx.wan.parts import plan_of_parts


class Sent(NamedTuple):
    """What exchanges of outer gradients keep.

    Attributes:
      residuals: like the outer gradients, float32, those of a center; None without feedback.
      factors: PowerSGD's factors, the same in every center; None without.
      number: int32[]: the number of exchanges so far.
      key: uint32[2], the same in every round.
    """

    residuals: PyTree
    factors: PyTree
    number: jax.Array
    key: Key


@dataclasses.dataclass(frozen=True)
class Between:
    """A compressed mean of outer gradients over the centers, with error feedback, for a part of the parameters.

    All ranks of a center have the same outer gradients. The exchange takes those of the first rank, and zeros from the
    other ranks. The same holds for residuals, unless each rank trains alone. Inside a center, the ranks share the work
    and exchange uncompressed arrays.

    Attributes:
      routes: the routes of the whole parameters. Parts of a leaf get its codec, whatever the fragments are.
      net: the centers and their ranks.
      alone: whether each rank keeps its own residuals, because the state has a row for each rank. The sum of all rows
        is then that of the centers, on any number of ranks per center.
    """

    routes: Routes
    net: Transport
    alone: bool

    @property
    def centers(self) -> int:
        return lax.axis_size(self.net.names[0])

    @property
    def _inner(self) -> tuple[Any, ...]:
        return self.net.names[1:]

    @property
    def plan(self) -> Plan:
        return plan_of_parts(self.routes, self.net.names)

    def init(self, params: Params, seed: int, number: int, *, keep: bool) -> Sent:
        """Returns the state before the first exchange, for outer gradients like these params.

        `number` is the number of this part of the parameters. Parts with different numbers draw different noise.
        """
        like = jax.tree_util.tree_map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.float32), params)
        carry = Routes.of(self.routes.op, self.plan, like).carry(residuals=keep)
        zeros = lambda tree: jax.tree_util.tree_map(lambda x: jnp.zeros(x.shape, x.dtype), tree)
        key = jax.random.key_data(jax.random.key(seed, impl="threefry2x32"))
        key = fold(key, number) if number else key
        assert key is not None
        return Sent(zeros(carry.residuals), zeros(carry.factors), jnp.zeros((), jnp.int32), key)

    def begin(self, moved: PyTree, sent: Sent) -> tuple[Ticket, Carry]:
        """Begins an exchange of the outer gradients `moved`. Returns what `end` needs."""
        travel = Routes.of(self.routes.op, self.plan, moved).over(self.net, Way(later=True))
        residuals = sent.residuals
        if self._inner:
            first = lax.axis_index(self._inner) == 0
            of_first = lambda tree: jax.tree_util.tree_map(lambda x: jnp.where(first, x, 0), tree)
            moved, residuals = of_first(moved), residuals if self.alone else of_first(residuals)
        carry = Carry(residuals, factors=sent.factors)
        check_input(moved, carry, travel, "params")
        return begin(moved, carry, travel, fold(sent.key, sent.number) if travel.routes.stochastic else None)

    def end(self, begun: tuple[Ticket, Carry], sent: Sent) -> tuple[PyTree, Sent]:
        """Ends an exchange. Returns (mean, state). `sent` is the state that `begin` got."""
        mean, carry = end(*begun)
        residuals = carry.residuals
        if self._inner:
            ranks, each = lax.axis_size(self._inner), jax.tree_util.tree_map
            mean = each(lambda x: x * ranks, mean)
            residuals = residuals if self.alone else each(lambda r: lax.psum(r, self._inner), residuals)
        return mean, sent._replace(residuals=residuals, factors=carry.factors, number=sent.number + 1)
