"""The checked arguments of compress_gradients."""

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import jax
from jax.core import Tracer

from jaxcgx.checks import callers_level, check_flag, check_integer, check_number, check_positive, wrong
from jaxcgx.codecs.spelling import spell
from jaxcgx.collectives.old_arguments import check_each, check_order, check_own, check_schedules
from jaxcgx.plan.overlay import Overlay
from jaxcgx.optim.phases import Phase, check_phases
from jaxcgx.optim.ranks import MeshRanks, Ranks
from jaxcgx.plan import Plan
from jaxcgx.transports.axes import check_axis_names, is_communicator
from jaxcgx.typing import AxisName


def check_ranks(function: str, axis_name: AxisName, argument: str = "axis_name") -> Ranks:
    """Returns the ranks that an argument of the public function `function` names."""
    if is_communicator(axis_name):
        from jaxcgx.optim.processes import Processes  # this import starts MPI, which is optional

        return Processes.over(function, axis_name, argument)
    check_axis_names(function, axis_name, argument)
    return MeshRanks(function, axis_name)


def not_over_mpi(function: str, argument: str, value: Any) -> Exception:
    """Returns the error for an argument that orders exchanges or lets them overlap."""
    remedy = "leave it out: exchanges over MPI wait for one another, and nothing runs beside them"
    return wrong(function, argument, "None between the processes of mpirun", repr(value), remedy)


def check_hyperparameter(function: str, argument: str, value: Any, check: Callable[..., Any], *args: Any) -> None:
    """Checks a number. It may be a scalar array, as from optax.inject_hyperparams.

    Under jit, the value of an array is unknown, so it isn't checked.
    """
    if isinstance(value, jax.Array) and not value.ndim:
        if isinstance(value, Tracer):
            return
        value = value.item()
        if isinstance(value, float) and value.is_integer():  # inject_hyperparams may have made it from an integer
            value = int(value)
    check(function, argument, value, *args)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """The arguments of `compress_gradients`, whose docstring explains them, and some that only jaxcgx itself sets.

    `function` is the public function that errors name. `ranks` are made from `axis_name`, and `phases` from `plan`.
    `scattered` has for each leaf the dimension along which a rank gets only its slice of the mean, or None if it gets
    the whole mean; () means whole means for all leaves. With `keyed`, every state has a key. make_train_step sets both
    if parameters or the optimizer's state are sharded over the ranks.
    """

    function: str
    axis_name: AxisName
    plan: Any
    feedback: bool
    beta: Any
    reset_every: Any
    momentum: Any
    nesterov: bool
    momentum_masking: bool
    weight_decay: Any
    weight_decay_mask: Any
    skip_nonfinite: bool
    telemetry: bool
    seed: Any
    axis_size: Any
    schedule: Any
    own: str
    leader: bool
    strict: bool
    fusion_mb: Any
    order: Any
    slice_elements: Any
    scattered: tuple[int | None, ...] = ()
    keyed: bool = False
    ranks: Ranks = dataclasses.field(init=False)
    phases: tuple[Phase, ...] = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "ranks", check_ranks(self.function, self.axis_name))
        object.__setattr__(self, "phases", check_phases(self.function, self.plan))
        for name in ("feedback", "nesterov", "momentum_masking", "skip_nonfinite", "telemetry", "leader", "strict"):
            check_flag(self.function, name, getattr(self, name))
        self._check_numbers()
        self._check_order()
        self._check_travel()
        self._check_combinations()
        if self.feedback or self.telemetry:
            self._check_rings()
        if self.feedback:
            self._warn_of_order()
        if any(dimension is not None for dimension in self.scattered):
            self._check_scattered()

    @property
    def plans(self) -> list[Plan]:
        return [phase.plan for phase in self.phases]

    @property
    def stochastic(self) -> bool:
        """Whether any codec of any plan draws noise."""
        return any(plan.stochastic for plan in self.plans)

    @property
    def collective(self) -> dict[str, Any]:
        """The options that are passed unchanged to compressed_pmean."""
        return {name: getattr(self, name) for name in ("schedule", "own", "leader", "strict", "fusion_mb")}

    def _check_numbers(self) -> None:
        check_hyperparameter(self.function, "seed", self.seed, check_integer)
        optional = dict(
            beta=(check_number, lambda x: 0 < x <= 1, "a number above 0 and up to 1"),
            momentum=(check_number, lambda x: 0 <= x < 1, "a number from 0 to below 1"),
            weight_decay=(check_number, lambda x: x >= 0, "a number of at least 0"),
            reset_every=(check_integer, 1),
            axis_size=(check_integer, 1),
            slice_elements=(check_integer, 1),
            fusion_mb=(check_positive,),
        )
        for name, (check, *args) in optional.items():
            if getattr(self, name) is not None:
                check_hyperparameter(self.function, name, getattr(self, name), check, *args)

    def _check_order(self) -> None:
        """Checks `order` and `slice_elements`, as far as this is possible without the leaves."""
        for name in ("order", "slice_elements"):
            if getattr(self, name) is not None and not isinstance(self.ranks, MeshRanks):
                raise not_over_mpi(self.function, name, getattr(self, name))
        if self.order is not None:
            check_order(self.function, self.order)

    def _check_travel(self) -> None:
        """Checks schedules, `own` and codecs by axis. compressed_pmean would refuse them too, but only in a step."""
        function, names = self.function, self.ranks.levels
        for each in check_schedules(function, self.schedule, names):
            check_own(function, self.own, each)
        for plan in self.plans:
            for codec in (plan.default, *(rule.codec for rule in plan.rules)):
                if isinstance(codec, dict):
                    check_each(function, "plan", codec, parts=names, what="a codec")
            if isinstance(plan.schedule, dict):
                check_each(function, "plan", plan.schedule, parts=names, what="a schedule")

    def _check_combinations(self) -> None:
        """Checks arguments that depend on one another."""
        if self.momentum is None and (self.nesterov or self.momentum_masking or self.weight_decay is not None):
            raise wrong(
                self.function,
                "momentum",
                "a number with 'nesterov', 'momentum_masking' or 'weight_decay'",
                None,
                "optax.add_decayed_weights is weight decay without momentum",
            )
        if self.weight_decay is None and self.weight_decay_mask is not None:
            raise wrong(self.function, "weight_decay_mask", "None without 'weight_decay'", repr(self.weight_decay_mask))
        fed = self.momentum_masking or self.beta is not None or self.reset_every is not None
        if fed and not self.feedback:
            raise wrong(self.function, "feedback", "True with 'beta', 'reset_every' or 'momentum_masking'", False)
        if self.momentum_masking and not any("momentum" in codec.state for plan in self.plans for codec in plan.codecs):
            expected = "False without jaxcgx.TopK(ratio < 1), the codec that sends some elements and not others"
            raise wrong(self.function, "momentum_masking", expected, True)
        low = next((codec for plan in self.plans for codec in plan.codecs if codec.low_rank), None)
        if low is not None and not self.feedback:
            warnings.warn(
                f"{self.function}: argument 'feedback': {spell(low)} may lose too much of gradients to train without "
                "it; leave feedback=False out",
                stacklevel=callers_level(),
            )

    def _check_scattered(self) -> None:
        """Refuses options that need the whole mean of a leaf on every rank."""
        sharded = f"where gradients are sharded over {self.axis_name!r}"
        if self.momentum is not None:
            remedy = "give the optimizer its momentum, or leave parameters and optimizer state whole"
            raise wrong(self.function, "momentum", f"None {sharded}", self.momentum, remedy)
        if self.leader or any(plan.leader for plan in self.plans):
            raise wrong(self.function, "leader", f"False {sharded}", True, "every rank exchanges its own slices")
        if self.schedule == "tree" or isinstance(self.schedule, Overlay):
            expected = f'"auto", "two_shot", "one_shot" or "ring" {sharded}'
            raise wrong(self.function, "schedule", expected, self.schedule, "every slice has one owner")
        for plan in self.plans:
            for codec in plan.codecs:
                if codec.low_rank:
                    remedy = "take another codec, such as jaxcgx.MaxMin(4), or leave parameters whole"
                    raise wrong(self.function, "plan", f"codecs of slices {sharded}", spell(codec), remedy)
            by_axis = any(isinstance(codec, dict) for codec in (plan.default, *(rule.codec for rule in plan.rules)))
            if by_axis and len(self.ranks.levels) > 1 and (self.feedback or self.telemetry):
                expected = f"one codec over all axes {sharded}, with feedback or telemetry"
                remedy = "pass feedback=False without telemetry, or one codec"
                raise wrong(self.function, "plan", expected, "a codec per axis", remedy)

    def _warn_of_order(self) -> None:
        """Warns of axes in the wrong order: feedback covers the losses of the exchange over the outermost axis only."""
        for codec in (codec for plan in self.plans for codec in (plan.default, *(rule.codec for rule in plan.rules))):
            if not isinstance(codec, dict):
                continue
            (outermost, outer), *inner = [(name, codec[name]) for name in self.ranks.levels]
            lossy = next(((name, each) for name, each in inner if not each.raw), None)
            if outer.raw and lossy is not None:
                warnings.warn(
                    f"{self.function}: argument 'plan': feedback covers only the outermost axis, {outermost!r}, not "
                    f"{spell(lossy[1])} for {lossy[0]!r}; axis_name, or data_axis of make_train_step, lists the "
                    "outermost axis first",
                    stacklevel=callers_level(),
                )

    def _check_rings(self) -> None:
        """Refuses a ring over the outermost axis. It encodes partial sums on the way, and no rank gets their errors."""
        outermost = next(iter(self.ranks.levels), None)  # None: a communicator without a hierarchy
        for plan in self.plans:
            argument, given = ("plan", plan.schedule) if self.schedule == "auto" else ("schedule", self.schedule)
            over: Any = given.get(outermost) if isinstance(given, dict) else given
            if over == "ring" and any(codec.makes_codes for codec in plan.codecs):
                raise wrong(
                    self.function,
                    argument,
                    f'the schedule "two_shot" or "one_shot" over {outermost!r} with feedback or telemetry',
                    '"ring", which encodes sums of several ranks on the way',
                    'pass schedule="two_shot" (CGX_CROSS_REDUCTION_TYPE=SRA), or feedback=False without telemetry',
                )
