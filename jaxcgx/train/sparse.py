"""What DGC, BSC and MPQ share: momentum, a plan that is made of the share of elements that is sent, and its warm-up."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from jaxcgx.checks import check_field, check_integer, check_number, wrong
from jaxcgx.plan import Plan
from jaxcgx.plan.overlay import Overlay
from jaxcgx.train.exchange import Number
from jaxcgx.train.momentum import Momentum
from jaxcgx.transports.base import Transport


@dataclasses.dataclass(frozen=True)
class WarmUp:
    """DGC's warm-up, in which sparsity increases from epoch to epoch.

    Args:
      epochs: the number of epochs in which the share of elements decreases to its final value.
      steps_per_epoch: the number of steps in an epoch.
      coeff: the share in each epoch. None: share**((epoch + 1) / (epochs + 1)). A number c: c**(epoch + 1), but at
        least the final share; the paper has c = 0.25. Or a list of the shares, where 1 sends everything.
    """

    epochs: int
    steps_per_epoch: int
    coeff: float | Sequence[float] | None = None

    def __post_init__(self) -> None:
        check_field(self, "epochs", check_integer, 1)
        check_field(self, "steps_per_epoch", check_integer, 1)
        coeff = list(self.coeff) if isinstance(self.coeff, tuple | list) else self.coeff
        for each in coeff if isinstance(coeff, list) else [] if coeff is None else [coeff]:
            expected = "a number above 0 and up to 1, or a list of them"
            check_number("WarmUp", "coeff", each, lambda x: 0 < x <= 1, expected)
        if isinstance(coeff, list) and len(coeff) != self.epochs:
            raise wrong("WarmUp", "coeff", f"a share for each of {self.epochs} epochs", repr(self.coeff))

    def shares(self, final: float) -> dict[int, float]:
        """Returns {first step: share}: those of the warm-up's epochs, then the final one."""
        coeff, n = self.coeff, self.epochs
        if coeff is None:
            found = [final ** ((epoch + 1) / (n + 1)) for epoch in range(n)]
        elif isinstance(coeff, Sequence):
            found = list(coeff)
        else:
            found = [max(coeff ** (epoch + 1), final) for epoch in range(n)]
        found.append(final)
        steps = self.steps_per_epoch
        return {epoch * steps: now for epoch, now in enumerate(found) if epoch == 0 or now != found[epoch - 1]}


@dataclasses.dataclass(frozen=True)
class Sparse(Momentum):
    """A `Momentum` that makes its plan of its fields, at once.

    Over several axes, the plan compresses over the outermost axis alone.

    Args:
      momentum: the factor of momentum, as in `Momentum`.
      masking: whether momentum becomes 0 where an element was sent.
      warm_up: a `WarmUp` of the fraction, or None.
      schedule: as in `Plan`.
      own: as in `Plan`.
      leader: as in `Plan`.
      strict: as in `Plan`.
      fusion_mb: as in `Plan`.
    """

    plan: Any = dataclasses.field(init=False, repr=False, compare=False)
    momentum: Number = dataclasses.field(default=0.9, kw_only=True)
    masking: bool = dataclasses.field(default=True, kw_only=True)
    _: dataclasses.KW_ONLY
    warm_up: WarmUp | None = None
    schedule: str | Overlay | dict[Any, Any] = "auto"
    own: str = "raw"
    leader: bool = False
    strict: bool = False
    fusion_mb: float | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.warm_up, WarmUp | None):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise wrong(self.op, "warm_up", "a jaxcgx.WarmUp", repr(self.warm_up), kind=TypeError)
        object.__setattr__(self, "plan", {start: self._plan_of(share, ()) for start, share in self._shares.items()})
        super().__post_init__()

    @property
    def _share(self) -> float:
        """The share of a leaf's elements that is sent after the warm-up."""
        raise NotImplementedError(f"{self.op}._share")

    @property
    def _shares(self) -> dict[int, float]:
        return {0: self._share} if self.warm_up is None else self.warm_up.shares(self._share)

    @property
    def _fields(self) -> dict[str, Any]:
        """The fields of a plan that say how messages travel."""
        return {name: getattr(self, name) for name in ("schedule", "own", "leader", "strict", "fusion_mb")}

    def _plan_of(self, share: float, names: tuple[Any, ...]) -> Plan:
        """Returns the plan that sends this share of elements over these axes, outermost first; () for one."""
        raise NotImplementedError(f"{self.op}._plan_of")

    def _plan_over(self, phase: int, net: Transport) -> Plan:
        return self._plan_of(list(self._shares.values())[phase], tuple(net.parts))
