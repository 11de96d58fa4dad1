"""DGC, BSC and MPQ: exchanges that send the largest elements of leaves, after momentum, with a warm-up."""

import abc
import dataclasses
import math
import re
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from jaxcgx.checks import check_integer, check_number, check_positive, check_type, set_field, wrong
from jaxcgx.codecs import Cast, Codec, Raw, Sampled, TopK
from jaxcgx.plan import Plan
from jaxcgx.plan.leaves import by_axis
from jaxcgx.plan.plan import Sending, sparsification
from jaxcgx.train.exchange import At, Number
from jaxcgx.train.momentum import Momentum
from jaxcgx.train.state import ExchangeState
from jaxcgx.transports.base import Transport
from jaxcgx.typing import PyTree


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
        set_field(self, "epochs", check_integer, 1)
        set_field(self, "steps_per_epoch", check_integer, 1)
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
class Sparse(Sending, Momentum, abc.ABC):
    """A `Momentum` that makes its plan of its fields, at once.

    Over several axes, the plan compresses over the outermost axis alone.

    Args:
      warm_up: a `WarmUp` of the share of elements that is sent, or None.
    The other arguments are those of `Momentum`, and those of a `Plan` that say how messages travel.
    """

    plan: Any = dataclasses.field(init=False, repr=False, compare=False)
    momentum: Number = dataclasses.field(default=0.9, kw_only=True)
    masking: bool = dataclasses.field(default=True, kw_only=True)
    _: dataclasses.KW_ONLY
    warm_up: WarmUp | None = None

    def __post_init__(self) -> None:
        set_field(self, "warm_up", check_type, WarmUp | None, "a jaxcgx.WarmUp")
        try:
            self._plan_of(self._share, ())  # checks the share before the warm-up computes with it
            plans = {start: self._plan_of(share, ()) for start, share in self._shares.items()}
        except (TypeError, ValueError) as error:
            raise type(error)(re.sub("^(Plan|TopK): ", f"{self.op}: ", str(error))) from None
        if min(self._shares.values()) == 1:  # no codec is sparse, so masking would be an error
            object.__setattr__(self, "masking", False)
        object.__setattr__(self, "plan", plans)
        super().__post_init__()

    @property
    @abc.abstractmethod
    def _share(self) -> float:
        """The share of a leaf's elements that is sent after the warm-up."""

    @property
    def _shares(self) -> dict[int, float]:
        return {0: self._share} if self.warm_up is None else self.warm_up.shares(self._share)

    @property
    def _how(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(Sending)}

    @abc.abstractmethod
    def _plan_of(self, share: float, names: tuple[Any, ...]) -> Plan:
        """Returns the plan that sends this share of elements over these axes, outermost first; () for one."""

    def _plan_over(self, phase: int, net: Transport) -> Plan:
        return self._plan_of(list(self._shares.values())[phase], tuple(net.parts))


@dataclasses.dataclass(frozen=True)
class DGC(Sparse):
    """Deep Gradient Compression: every rank sends only its largest elements, the fraction `ratio` of each leaf.

    Elements are compared after momentum, and with the residuals of earlier steps added. The optimizer behind it should
    have no momentum of its own: optax.sgd(rate). Every rank clips its own gradients, before momentum. Over several
    axes, or the nodes of `jaxcgx.mpi.hierarchy()`, all elements are summed over the inner axes, and the fraction of the
    sums is exchanged over the outermost one. The limits may be arrays, as other numbers of `Momentum`.

    Args:
      ratio: the fraction of a leaf's elements that is sent.
      warm_up: a `WarmUp` of the fraction, or None.
      values: the codec of the elements that are sent, as in `TopK`.
      select: how the largest elements are found, as in `TopK`.
      pull: the elements of the sum that ranks get back, as in `TopK`: "all" elements that any rank sent, or only the
        "top" of the sum.
      min_size: smaller leaves travel raw, as in a `Plan`. Their momentum is applied after the reduction.
      skip_1d: whether leaves with at most one dimension travel raw, too.
      clip_value: the largest magnitude of an element.
      clip_norm: the largest norm of a leaf.
      clip_global_norm: the largest norm of the mean of all leaves together. A rank's share of the mean, its gradients
        divided by the number of ranks, is clipped to ranks**-0.5 times this limit.
    The other arguments are those of `Momentum`, and those of a `Plan` that say how messages travel.
    """

    ratio: float = 0.001
    _: dataclasses.KW_ONLY
    values: Codec = Raw()
    select: str | Sampled = "sampled"
    pull: str = "all"
    min_size: int = 0
    skip_1d: bool = True
    clip_value: Number | None = None
    clip_norm: Number | None = None
    clip_global_norm: Number | None = None

    def __post_init__(self) -> None:
        remedy = "Momentum(jaxcgx.Raw()) sends everything"
        set_field(self, "ratio", check_number, lambda x: 0 < x < 1, "a number above 0 and below 1", remedy)
        super().__post_init__()
        self._check_numbers(**dict.fromkeys(("clip_value", "clip_norm", "clip_global_norm"), (check_positive,)))

    @property
    def _share(self) -> float:
        return self.ratio

    def _plan_of(self, share: float, names: tuple[Any, ...]) -> Plan:
        codec = self.values if share == 1 else TopK(share, self.values, select=self.select, pull=self.pull)
        fields = dict[str, Any](min_size=self.min_size, skip_1d=self.skip_1d)
        return Plan(by_axis(names, codec, Raw()), **fields, **self._how)

    def begin(self, grads: PyTree, state: ExchangeState, at: At) -> tuple[Any, ExchangeState]:
        leaves, tree = jax.tree.flatten(grads)
        if (limit := self.clip_value) is not None:
            leaves = [jnp.clip(g, jnp.asarray(-limit, g.dtype), jnp.asarray(limit, g.dtype)) for g in leaves]
        if (norm := self.clip_norm) is not None:
            leaves = [g * _scale(norm, square).astype(g.dtype) for g, square in zip(leaves, _squares(leaves, at))]
        if self.clip_global_norm is not None:
            # In the paper, ranks sum gradients that are already divided by the number of ranks N, and clip them to
            # N^-1/2 times the limit. Here gradients are not divided yet, so the bound is N times larger.
            share = _scale(self.clip_global_norm * math.sqrt(at.net.size), sum(_squares(leaves, at)))
            leaves = [g * share.astype(g.dtype) for g in leaves]
        return super().begin(tree.unflatten(leaves), state, at)


def _scale(limit: Number, square: jax.Array | int) -> jax.Array:
    """Returns the factor that reduces a norm to at most `limit`. `square` is the square of the norm."""
    return jnp.minimum(1, limit / jnp.maximum(jnp.sqrt(square), jnp.finfo(jnp.float32).tiny))


def _squares(leaves: Sequence[jax.Array], at: At) -> list[jax.Array]:
    real: Callable[[jax.Array], jax.Array] = lambda g: jnp.abs(g) if jnp.iscomplexobj(g) else g
    return at.of_shards([jnp.square(real(g).astype(jnp.float32)).sum() for g in leaves])


@dataclasses.dataclass(frozen=True)
class BSC(Sparse):
    """GeoMX's bidirectional sparsification: every rank sends the largest elements of each large leaf.

    As in `DGC`, elements are compared after momentum, and with the residuals of earlier steps added. Any optimizer may
    follow, but it should have no momentum of its own: optax.adam(rate, b1=0). Over several axes, all elements are
    summed over the inner axes, those inside data centers.

    Args:
      threshold: the fraction of a leaf's elements that is sent, above 0.
      size_bound: leaves of up to `size_bound` elements travel raw.
      warm_up: a `WarmUp` of the fraction, or None.
      pull: the elements of the sum that ranks get back. "all": every element that any rank sent. "top": only the
        largest elements of the sum; the rank that owns the sum keeps the other elements for the next step.
      select: how the largest elements are found, as in `TopK`.
    The other arguments are those of `Momentum`, and those of a `Plan` that say how messages travel.
    """

    threshold: float = 0.01
    size_bound: int = 200_000
    _: dataclasses.KW_ONLY
    pull: str = "all"
    select: str | Sampled = "sampled"
    prefer: str = "bytes"
    _tiny: ClassVar[Codec] = Raw()  # of small leaves, over all axes

    @property
    def _share(self) -> float:
        return self.threshold

    def _plan_of(self, share: float, names: tuple[Any, ...]) -> Plan:
        fields = sparsification(
            self.op, share, self.size_bound, names or None, pull=self.pull, select=self.select, tiny=self._tiny
        )
        return Plan(**fields | self._how)


@dataclasses.dataclass(frozen=True)
class MPQ(BSC):
    """GeoMX's mixed-precision quantization: as `BSC`, but small leaves travel as float16, inside data centers too."""

    _tiny: ClassVar[Codec] = Cast("float16")
