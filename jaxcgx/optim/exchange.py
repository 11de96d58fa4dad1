"""One step's exchange with one plan: gradients out, their mean back, and what is kept renewed."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxcgx.collectives import compressed_pmean
from jaxcgx.optim.leaves import Leaves, encoders, flatten
from jaxcgx.optim.settings import Settings
from jaxcgx.optim.telemetry import Telemetry, measure
from jaxcgx.plan import Plan
from jaxcgx.plan.leaves import factor_shape
from jaxcgx.transports.resolve import check_axes


class Kept(NamedTuple):
    """The state that an exchange reads and returns anew: lists with an entry for each leaf, None where it has none."""

    residuals: list[Any]  # float32[1, *shape]
    momentum: list[Any]  # [1, *shape]
    factors: list[Any]  # float32[rank, n]


class Exchanged(NamedTuple):
    """The mean of each leaf, and what is kept after the exchange."""

    mean: list[Any]
    kept: Kept
    telemetry: Telemetry | None = None


def exchange(settings: Settings, plan: Plan, gradients: Any, kept: Kept, *, key: jax.Array | None) -> Exchanged:
    """Exchanges gradients with one plan.

    Args:
      settings: the arguments of compress_gradients.
      plan: the plan.
      gradients: the tree that this rank sends.
      kept: the state for all plans.
      key: the key of this step's noise.
    """
    leaves = flatten(gradients)
    codecs = encoders(settings, plan, leaves)
    residuals = kept.residuals
    if settings.telemetry and not settings.feedback:  # without residuals nothing tells what is lost
        zeros = lambda x: jnp.zeros((1, *x.shape), jnp.float32)
        residuals = [zeros(x) if each else None for x, each in zip(leaves.values, codecs)]
    masked = [settings.momentum_masking and bool(each) and each[0].sparse for each in codecs]
    shapes = [factor_shape(x, each or ()) for x, each in zip(leaves.values, codecs)]
    given = Kept(
        residuals=residuals,
        momentum=[u if has else None for u, has in zip(kept.momentum, masked)],
        factors=[shape and q[: shape[0]] for q, shape in zip(kept.factors, shapes)],
    )
    noise = key if any(codec.stochastic for codec in plan.codecs) else None
    found = _pmean(settings, plan, key=noise, leaves=leaves, given=given)
    renewed = Kept(
        residuals=found.kept.residuals if settings.feedback else leaves.match(None),
        momentum=[u if new is None else new for u, new in zip(kept.momentum, found.kept.momentum)],
        factors=[
            q if shape is None else q.at[: shape[0]].set(new.reshape(shape))
            for q, new, shape in zip(kept.factors, found.kept.factors, shapes)
        ],
    )
    telemetry = None
    if settings.telemetry:
        names = check_axes(settings.function, settings.axis_name).names
        telemetry = measure(
            names, leaves, codecs=codecs, residuals=residuals, mean=found.mean, lost=found.kept.residuals
        )
    return Exchanged(found.mean, renewed, telemetry)


def _pmean(settings: Settings, plan: Plan, key: jax.Array | None, leaves: Leaves, given: Kept) -> Exchanged:
    """compressed_pmean of lists. What is given to it comes back renewed."""
    has = lambda values: any(value is not None for value in values)

    def send(given: Kept) -> Exchanged:
        trees = {name: leaves.tree(values) for name, values in given._asdict().items() if has(values)}
        gradients = leaves.tree(leaves.values)
        found = compressed_pmean(gradients, settings.axis_name, plan, key=key, **trees, **settings.collective)
        named = dict(zip(("mean", *trees), found if trees else [found]))
        kept = Kept(**{name: leaves.match(named.get(name)) for name in Kept._fields})
        return Exchanged(leaves.match(named["mean"]), kept)

    if not has(given.residuals):
        return send(given)
    # Donated residuals are overwritten in place as they are, [1, ...]. A reshape would copy them, there and back.
    rows = given._replace(factors=leaves.match(None))
    found = jax.vmap(lambda rows: send(rows._replace(factors=given.factors)))(rows)
    return found._replace(mean=[x.reshape(x.shape[1:]) for x in found.mean])
