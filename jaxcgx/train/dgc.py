"""DGC: every rank sends its largest elements, with momentum correction, masking, clipping and warm-up."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxcgx.checks import check_field, check_flag, check_integer, check_number, check_positive
from jaxcgx.codecs.base import Codec
from jaxcgx.codecs.raw import Raw
from jaxcgx.codecs.topk import Sampled, TopK, check_pull, check_select, check_values
from jaxcgx.plan import Plan
from jaxcgx.plan.leaves import by_axis
from jaxcgx.train.exchange import At, Number
from jaxcgx.train.sparse import Sparse
from jaxcgx.train.state import ExchangeState
from jaxcgx.typing import PyTree


@dataclasses.dataclass(frozen=True)
class DGC(Sparse):
    """Deep Gradient Compression: every rank sends only its largest elements, the fraction `ratio` of each leaf.

    Elements are compared after momentum, and with the residuals of earlier steps added. The optimizer behind it should
    have no momentum of its own: optax.sgd(rate). Every rank clips its own gradients, before momentum. Over several
    axes, or the nodes of `jaxcgx.mpi.hierarchy()`, all elements are summed over the inner axes, and the fraction of the
    sums is exchanged over the outermost one. The limits may be arrays, as other numbers of `Momentum`.

    Args:
      ratio: the fraction of a leaf's elements that is sent.
      momentum: the factor of momentum, as in `Momentum`.
      masking: whether momentum becomes 0 where an element was sent.
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
    The other arguments are those of `Momentum`, and `schedule`, `own`, `leader`, `strict` and `fusion_mb` of a `Plan`.
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
        check_field(self, "ratio", check_number, lambda x: 0 < x < 1, "a number above 0 and below 1", remedy)
        for name, check in dict(values=check_values, select=check_select, pull=check_pull).items():
            check_field(self, name, check)
        check_field(self, "min_size", check_integer, 0)
        check_field(self, "skip_1d", check_flag)
        super().__post_init__()
        self._check_numbers(**dict.fromkeys(("clip_value", "clip_norm", "clip_global_norm"), (check_positive,)))

    @property
    def _share(self) -> float:
        return self.ratio

    def _plan_of(self, share: float, names: tuple[Any, ...]) -> Plan:
        codec = self.values if share == 1 else TopK(share, self.values, select=self.select, pull=self.pull)
        return Plan(by_axis(names, codec, Raw()), min_size=self.min_size, skip_1d=self.skip_1d, **self._fields)

    def begin(self, grads: PyTree, state: ExchangeState, at: At) -> tuple[Any, ExchangeState]:
        return super().begin(self._clip(grads, at), state, at)

    def _clip(self, grads: PyTree, at: At) -> PyTree:
        """Returns a rank's gradients, clipped."""
        leaves, tree = jax.tree_util.tree_flatten(grads)
        if (limit := self.clip_value) is not None:
            leaves = [jnp.clip(g, jnp.asarray(-limit, g.dtype), jnp.asarray(limit, g.dtype)) for g in leaves]
        if (norm := self.clip_norm) is not None:
            leaves = [g * _scale(norm, square).astype(g.dtype) for g, square in zip(leaves, _squares(leaves, at))]
        if self.clip_global_norm is not None:
            # In the paper, ranks sum gradients that are already divided by the number of ranks N, and clip them to
            # N^-1/2 times the limit. Here gradients are not divided yet, so the bound is N times larger.
            share = _scale(self.clip_global_norm * math.sqrt(at.net.size), sum(_squares(leaves, at)))
            leaves = [g * share.astype(g.dtype) for g in leaves]
        return tree.unflatten(leaves)


def _scale(limit: Number, square: jax.Array | int) -> jax.Array:
    """Returns the factor that reduces a norm to at most `limit`. `square` is the square of the norm."""
    return jnp.minimum(1, limit / jnp.maximum(jnp.sqrt(square), jnp.finfo(jnp.float32).tiny))


def _squares(leaves: Sequence[jax.Array], at: At) -> list[jax.Array]:
    """Returns the sum of each leaf's squares over all of its shards."""
    real: Callable[[jax.Array], jax.Array] = lambda g: jnp.abs(g) if jnp.iscomplexobj(g) else g
    return at.of_shards([jnp.square(real(g).astype(jnp.float32)).sum() for g in leaves])
