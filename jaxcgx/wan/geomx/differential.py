"""Differential transmission (GeoMX's DGT): sends important blocks of gradients at once, the others later or shorter."""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from jaxcgx.checks import check_choice, check_field, check_flag, check_integer, check_number, wrong
from jaxcgx.codecs.spelling import spell
from jaxcgx.exchange.routes import Routes
from jaxcgx.plan import Plan
from jaxcgx.plan.phases import Phase, check_phases
from jaxcgx.train.exchange import At, check_hyperparameter
from jaxcgx.train.state import ExchangeState
from jaxcgx.typing import Key, Params, PyTree
from jaxcgx.wan.geomx.blocks import Cut, cut, each
from jaxcgx.wan.geomx.transmission import Late, Transmission
from jaxcgx.wan.several import check_centers

OP = "Differential"
LEVELS = 8  # the number of shares that an adaptive share is rounded to


class Own(NamedTuple):
    """What each rank has for itself.

    Attributes:
      residuals: like the gradients, float32, also for whole leaves; None for a leaf that loses nothing.
      pending: [blocks, size] for each leaf that is cut: the other blocks of the last step; None unless rest="defer".
    """

    residuals: PyTree
    pending: PyTree

    per_rank = MappingProxyType({"residuals": "sum", "pending": "mean"})


class Shared(NamedTuple):
    """What is the same on every rank. Trees have None for leaves that are sent whole.

    Attributes:
      count: int32[]: the number of steps so far.
      key: uint32[2], the same in every step.
      contributions: float32[blocks]: the contribution of each block.
      order: int32[blocks]: the order of the last step, most important block first; None unless rest="defer".
      first_loss: float32[]: the loss of the first step; None unless the share is adaptive.
      level: int32[]: the index of the last step's share in `Differential.shares`; None unless it is adaptive.
    """

    count: jax.Array
    key: Key
    contributions: PyTree
    order: PyTree
    first_loss: jax.Array | None
    level: jax.Array | None


@dataclasses.dataclass(frozen=True)
class Differential:
    """An exchange that sends the blocks of each leaf that contribute most at once, the others as `rest` says.

        train = cgx.make_train_step(loss_fn, optimizer, mesh, cgx.wan.Differential(cgx.MaxMin(8), k=0.5))

    In the first step, all blocks are sent at once. Leaves with so few blocks that the share rounds to all of them, and
    leaves that no codec can take, are always sent whole.

    A block's contribution is a moving average of its mean magnitude, averaged over the ranks. It becomes
    `alpha * contribution + (1 - alpha) * mean(abs(g))`. A step ranks blocks by the contributions up to the step before.
    So all ranks choose the same blocks, and send no indices.

    Args:
      plan: a codec, {axis: codec}, a Plan or a schedule of these, {first step: plan}, for the blocks. Rules and guards
        of a plan see the leaves, not the blocks. Low-rank codecs are refused.
      k: the share of a leaf's blocks that is important, above 0 and up to 1.
      block_bytes: the bytes of a block, a multiple of 4.
      alpha: the weight of the old contribution, from 0 to below 1.
      rest: the treatment of the other blocks. "defer": they are sent while the next step computes, and their mean is
        added to the mean of the next step. "quantize": they are sent at once, at 4 bits. "drop": they are not sent. A
        rank adds dropped blocks and quantization errors to its next gradients. With keep=False they are lost for good.
      adaptive: the smallest share K_min of an adaptive share, below k. The share is max(k * loss / first loss, K_min),
        at most k, rounded up to one of 8 values from K_min to k. The loss is the mean loss of all ranks, which
        make_train_step passes. None: the share is always k.
      ranked: whether important blocks are chosen by their contributions. False: at random, as a control.
      keep: whether the errors of compression are kept and sent later.
      seed: the seed of the noise of codecs that round stochastically, and of random blocks.
    """

    plan: Any  # Plan | Codec | {axis: Codec} | {step: Plan}; later a Plan, or {step: Plan}
    k: float = 0.8
    _: dataclasses.KW_ONLY
    block_bytes: int = 4096
    alpha: float = 0.3
    rest: str = "defer"
    adaptive: float | None = None
    ranked: bool = True
    keep: bool = True
    seed: int | jax.Array = 0
    phases: tuple[Phase, ...] = dataclasses.field(init=False, repr=False, compare=False)
    early: ClassVar[bool] = True
    scatters: ClassVar[bool] = False

    def __post_init__(self) -> None:
        phases = check_phases(OP, self.plan)
        object.__setattr__(self, "phases", phases)
        plan: Plan | Mapping[int, Plan] = phases[0].plan if len(phases) == 1 else dict(phases)
        object.__setattr__(self, "plan", plan)
        check_field(self, "k", check_number, lambda x: 0 < x <= 1, "a number above 0 and up to 1")
        check_field(self, "block_bytes", check_integer, 4)
        if self.block_bytes % 4:
            remedy = f"write {self.block_bytes // 4 * 4 + 4}; GeoMX's is 4096"
            raise wrong(OP, "block_bytes", "a multiple of 4", self.block_bytes, remedy)
        check_field(self, "alpha", check_number, lambda x: 0 <= x < 1, "a number from 0 to below 1")
        check_field(self, "rest", check_choice, ("defer", "quantize", "drop"))
        if self.adaptive is not None:
            remedy = "it is the smallest share, which k * loss / first loss doesn't go below"
            expected = f"None, or a number above 0 and below k, {self.k}"
            check_field(self, "adaptive", check_number, lambda x: 0 < x < self.k, expected, remedy)
        check_field(self, "ranked", check_flag)
        check_field(self, "keep", check_flag)
        check_hyperparameter(OP, "seed", self.seed, check_integer)
        low = [codec for phase in phases for codec in phase.plan.codecs if codec.low_rank]
        if low:
            expected = "codecs of blocks, which are others in every step"
            raise wrong(OP, "plan", expected, spell(low[0]), "take another one, such as jaxcgx.MaxMin(4)")

    @property
    def shares(self) -> tuple[float, ...]:
        """The shares of blocks that may count as important, the smallest first."""
        if self.adaptive is None:
            return (self.k,)
        step = (self.k - self.adaptive) / (LEVELS - 1)
        return (*(self.adaptive + i * step for i in range(LEVELS - 1)), self.k)

    def routes(self, tree: PyTree) -> list[Routes]:
        """Returns the routes of whole leaves, for each phase."""
        return [Routes.of(OP, phase.plan, tree) for phase in self.phases]

    def cut(self, routes: Routes) -> Cut:
        return cut(routes, self.block_bytes, self.shares[0])

    def init(self, params: Params) -> ExchangeState:
        first, *others = self.routes(params)
        blocks, defers, adapts = self.cut(first), self.rest == "defer", self.adaptive is not None
        tree = first.tree.unflatten
        encoded = [any(each.encoded for each in routes) for routes in zip(first.leaves, *(r.leaves for r in others))]
        lossy = [self.keep and (has or (b and not defers)) for has, b in zip(encoded, blocks)]
        residuals = [jnp.zeros(r.shape, jnp.float32) if loses else None for r, loses in zip(first.leaves, lossy)]
        pend = lambda b, r: jnp.zeros((b.count - b.share(self.shares[0]), b.size), r.dtype)
        key = jax.random.key_data(jax.random.key(self.seed, impl="threefry2x32"))
        shared = Shared(
            count=jnp.zeros((), jnp.int32),
            key=key,
            contributions=tree(each(lambda b: jnp.zeros(b.count, jnp.float32), blocks)),
            order=tree(each(lambda b: jnp.zeros(b.count, jnp.int32), blocks)) if defers else None,
            first_loss=jnp.zeros((), jnp.float32) if adapts else None,
            level=jnp.zeros((), jnp.int32) if adapts else None,
        )
        return ExchangeState(Own(tree(residuals), tree(each(pend, blocks, first.leaves)) if defers else None), shared)

    def begin(self, grads: PyTree, state: ExchangeState, at: At) -> tuple[Late | None, ExchangeState]:
        """Begins the exchange of the blocks that the last step deferred, if it needs no conditional."""
        check_centers(OP, at.net)
        if self.rest != "defer" or at.params is None or len(self.shares) > 1 or len(self.phases) > 1:
            return None, state
        return Transmission(self, state, at, at.params).begin_late(), state

    def end(
        self, ticket: Late | None, state: ExchangeState, at: At, grads: PyTree = None
    ) -> tuple[PyTree, ExchangeState]:
        """Exchanges important blocks. An adaptive share needs the loss."""
        return Transmission(self, state, at, grads).run(ticket)
