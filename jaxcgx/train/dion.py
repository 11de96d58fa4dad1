"""Dion: an exchange whose factors of low rank travel, and whose results are orthonormal updates (Ahn et al., 2025).

    B = M + G        P = orthonormal(B Q)        R = B^T P        M = B - (1 - momentum) P R^T        Q = R / |columns|

P and R are sums over the ranks, so P, Q and the update are the same on every rank. Each rank has its own M ("decoupled
momentum"), which never travels. Everything is linear in B, so the mean of all M is the M of one process with the mean
gradient. From M, a rank subtracts its own R. With the mean R, the updates would be the same, but what ranks differ by
would add up instead of fading with the momentum.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from jaxcgx.checks import MOST, check_flag, check_integer, check_number, set_field, wrong
from jaxcgx.codecs.powersgd import PowerIteration
from jaxcgx.exchange.message import Carry
from jaxcgx.exchange.routes import Routes
from jaxcgx.plan import Plan
from jaxcgx.train.exchange import At
from jaxcgx.train.feedback import Feedback
from jaxcgx.train.state import ExchangeState
from jaxcgx.typing import Params, PyTree


class Buffers(NamedTuple):
    """What a rank of Dion keeps: M of each matrix, and the residuals of other leaves that are compressed."""

    momentum: PyTree

    @staticmethod
    def per_rank() -> dict[str, str]:
        return {"momentum": "mean"}


@dataclasses.dataclass(frozen=True)
class Dion:
    """Dion's optimizer as an exchange: ranks sum factors of low rank, and get updates of matrices, not gradients.

        dion = cgx.Dion(rank=16, rules=[("embed", cgx.Raw())])
        rates = {"dion": optax.sgd(0.02), "other": optax.adam(1e-3)}
        train = cgx.make_train_step(loss_fn, optax.partition(rates, dion.labels), mesh, dion)

    In place of the mean gradient of a matrix [m, n], a step gets Dion's update, P Q^T sqrt(n / m), to be multiplied
    with a learning rate (optax.sgd). So these leaves need no other optimizer and no momentum. JAX's kernels are
    [inputs, outputs], so n are the rows of the paper's matrices. Leaves that don't have two dimensions travel raw, and
    their optimizer gets the mean of their gradients.

    Args:
      rank: the number of columns of the factors. Matrices with fewer rows or columns have full rank.
      momentum: the factor by which a step multiplies the buffer's part in the span of P. The rest stays whole.
      rules: those of a `Plan`, for leaves that aren't Dion's: Raw() for embeddings and the last layer, Skip() for
        frozen leaves, or a codec. A codec's errors are kept and sent later.
      skip_nonfinite: as in `Feedback`.
    """

    rank: int = 16
    _: dataclasses.KW_ONLY
    momentum: float = 0.95
    rules: Sequence[Any] = ()
    skip_nonfinite: bool = False
    plan: Plan = dataclasses.field(init=False, repr=False, compare=False)
    early: ClassVar[bool] = False
    scatters: ClassVar[bool] = False

    def __post_init__(self) -> None:
        set_field(self, "rank", check_integer, 1, MOST)
        set_field(self, "momentum", check_number, lambda x: 0 <= x < 1, "a number from 0 to below 1")
        set_field(self, "skip_nonfinite", check_flag)
        codec = PowerIteration(self.rank, float(self.momentum))
        plan = Plan(codec, self.rules, min_size=0)
        for other in plan.codecs:
            if other.low_rank and other is not codec:
                raise wrong("Dion", "rules", "codecs that aren't of low rank, or Raw() or Skip()", repr(other))
        object.__setattr__(self, "rules", plan.rules)
        object.__setattr__(self, "plan", plan)

    @property
    def _sum(self) -> Feedback:
        """The exchange that does the work. Its residuals are the momentum."""
        return Feedback(self.plan, skip_nonfinite=self.skip_nonfinite, _op="Dion", _argument="rules")

    def labels(self, params: Params) -> PyTree:
        """Returns "dion" for each leaf of `params` whose updates are Dion's, else "other", for optax.partition."""
        params = jax.eval_shape(lambda x: jax.tree.map(jnp.asarray, x), params)  # in the dtypes that training has
        routes = Routes.of("Dion.labels", self.plan.loose, params, argument="rules")
        return routes.tree.unflatten(["dion" if route.factor else "other" for route in routes.leaves])

    def init(self, params: Params) -> ExchangeState:
        return _outside(self._sum.init(params))

    def begin(self, grads: PyTree, state: ExchangeState, at: At) -> tuple[Any, ExchangeState]:
        for route, axes in zip(Routes.of("Dion", self.plan, grads, argument="rules").leaves, at.shards):
            if route.factor and axes:
                expected, got = "a rule for every matrix that is sharded", f"none for one over {axes}"
                raise wrong("Dion", "rules", expected, got, "Dion's updates are of whole matrices", path=route.path)
        ticket, state = self._sum.begin(grads, _inside(state), at)
        return ticket, _outside(state)

    def end(self, ticket: Any, state: ExchangeState, at: At, grads: PyTree = None) -> tuple[PyTree, ExchangeState]:
        updates, state = self._sum.end(ticket, _inside(state), at)
        return updates, _outside(state)


def _inside(state: ExchangeState) -> ExchangeState:
    return ExchangeState(Carry(state.own.momentum), state.shared)


def _outside(state: ExchangeState) -> ExchangeState:
    return ExchangeState(Buffers(state.own.residuals), state.shared)
