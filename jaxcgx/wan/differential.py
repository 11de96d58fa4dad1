"""Differential transmission (GeoMX's DGT): sends important blocks of gradients at once, the others later or shorter."""

import dataclasses
from typing import TYPE_CHECKING, Any

from jaxcgx.checks import check_choice, check_field, check_flag, check_integer, check_number, wrong
from jaxcgx.codecs.base import Codec
from jaxcgx.codecs.raw import Raw
from jaxcgx.codecs.spelling import spell
from jaxcgx.optim.compress import check_settings
from jaxcgx.optim.halves import Early
from jaxcgx.optim.initial import init_state
from jaxcgx.optim.require import import_optax
from jaxcgx.plan import Plan
from jaxcgx.typing import AxisName
from jaxcgx.wan.centers import check_centers
from jaxcgx.wan.transmission import DifferentialState, Transmission

if TYPE_CHECKING:
    import optax

OP = "Differential"
LEVELS = 8  # the number of shares that an adaptive share is rounded to
# Options of compress_gradients that need whole gradients.
REFUSED = (
    "beta",
    "momentum",
    "momentum_masking",
    "nesterov",
    "reset_every",
    "skip_nonfinite",
    "telemetry",
    "weight_decay",
)

__all__ = ["Differential", "DifferentialState"]


@dataclasses.dataclass(frozen=True)
class Differential:
    """Differential transmission: sends the blocks of each leaf that contribute most at once, the others as `rest` says.

        train = cgx.make_train_step(
            loss_fn, optimizer, mesh, compress=cgx.wan.Differential(k=0.5), plan=cgx.MaxMin(8)
        )

    Call it with an axis and a plan to get an optax.GradientTransformation that turns every rank's own gradients into
    their mean: `cgx.wan.Differential(k=0.5)("data", cgx.Raw())`. In the first step, all blocks are sent at once. Leaves
    with so few blocks that the share rounds to all of them, and leaves that no codec can take, are always sent whole.

    A block's contribution is a moving average of its mean magnitude, averaged over the ranks. It becomes
    `alpha * contribution + (1 - alpha) * mean(abs(g))`. A step ranks blocks by the contributions up to the step before.
    So all ranks choose the same blocks, and send no indices.

    Args:
      k: the share of a leaf's blocks that is important, above 0 and up to 1.
      block_bytes: the bytes of a block, a multiple of 4.
      alpha: the weight of the old contribution, from 0 to below 1.
      rest: the treatment of the other blocks. "defer": they are sent while the next step computes, and their mean is
        added to the mean of the next step. "quantize": they are sent at once, at 4 bits. "drop": they are not sent.
        With feedback, a rank adds dropped blocks and quantization errors to its next gradients. With feedback=False
        they are lost for good.
      adaptive: the smallest share K_min of an adaptive share, below k. The share is max(k * loss / first loss, K_min),
        at most k, rounded up to one of 8 values from K_min to k. The loss is the argument `value` of `update`, which
        make_train_step passes. None: the share is always k.
      ranked: whether important blocks are chosen by their contributions. False: at random, as a control.
    """

    k: float = 0.8
    block_bytes: int = 4096
    alpha: float = 0.3
    rest: str = "defer"
    adaptive: float | None = None
    ranked: bool = True

    def __post_init__(self) -> None:
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

    @property
    def shares(self) -> tuple[float, ...]:
        """The shares of blocks that may count as important, the smallest first."""
        if self.adaptive is None:
            return (self.k,)
        step = (self.k - self.adaptive) / (LEVELS - 1)
        return (*(self.adaptive + i * step for i in range(LEVELS - 1)), self.k)

    def __call__(
        self, axis_name: AxisName, plan: Codec | Plan | dict[Any, Any] = Raw(), **options: Any
    ) -> "optax.GradientTransformationExtraArgs":
        """Makes the optax.GradientTransformation. With an adaptive share, its `update` takes the loss as `value`.

        Args:
          axis_name: the axis of the ranks, or a tuple of axes, outermost first; or an MPI communicator, or
            `jaxcgx.mpi.hierarchy()`.
          plan: a codec, {axis: codec}, a Plan or a schedule of plans, for the blocks. Rules and guards of a plan see
            the leaves, not the blocks. Low-rank codecs are refused.
          **options: `feedback`, `seed`, `axis_size`, `schedule`, `own`, `leader`, `strict`, `fusion_mb` and `order` of
            `compress_gradients`.
        """
        settings = check_settings(OP, axis_name, plan, options, maker=self)
        for name in REFUSED:
            if options.get(name):
                moves = name not in ("skip_nonfinite", "telemetry")
                remedy = "leave it out" + ", or give the optimizer behind its momentum and weight decay" * moves
                raise wrong(OP, name, "none", repr(options[name]), remedy)
        for each in settings.plans:
            if low := next((codec for codec in each.codecs if codec.low_rank), None):
                expected = "codecs of blocks, which are others in every step"
                raise wrong(OP, "plan", expected, spell(low), "take another one, such as jaxcgx.MaxMin(4)")
        transmission = Transmission(self, settings)

        def init(params: Any) -> DifferentialState:
            check_centers(OP, settings.ranks)
            return init_state(settings, params, transmission.describe)

        return import_optax(OP).GradientTransformationExtraArgs(init, Early(transmission.begin, transmission.update))
