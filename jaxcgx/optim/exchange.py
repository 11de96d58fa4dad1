"""The exchange of one step with one plan: sends gradients, and returns their mean and the new state."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxcgx.checks import check_varying
from jaxcgx.collectives.old_arguments import Dimension, Options, check_order
from jaxcgx.collectives.old_psum_scatter import Scatter
from jaxcgx.collectives.state import State
from jaxcgx.exchange.keys import fold
from jaxcgx.optim.leaves import Leaves, encoders, flatten, loose
from jaxcgx.optim.settings import Settings
from jaxcgx.optim.telemetry import Telemetry, measure
from jaxcgx.plan import Plan
from jaxcgx.plan.leaves import factor_shape


class Kept(NamedTuple):
    """The state that an exchange reads and renews: lists with an entry per leaf, None for a leaf without state."""

    residuals: list[Any]  # float32[1, *shape]
    momentum: list[Any]  # [1, *shape]
    factors: list[Any]  # float32[rank, n]


class Exchanged(NamedTuple):
    """The mean of each leaf, or this rank's slice of the mean, and the state after the exchange."""

    mean: list[Any]
    kept: Kept
    telemetry: Telemetry | None = None


def exchange(settings: Settings, plan: Plan, gradients: Any, kept: Kept, *, key: jax.Array | None) -> Exchanged:
    """Exchanges gradients with one plan.

    Args:
      settings: the arguments of compress_gradients.
      plan: the plan.
      gradients: the tree of gradients that this rank sends.
      kept: the state. It has entries for every leaf that any plan of the schedule compresses.
      key: the key of this step's noise.
    """
    leaves = flatten(gradients)
    codecs = encoders(settings, plan, leaves)
    sent = [i for i, each in enumerate(codecs) if each is not None]
    paths, values = [leaves.paths[i] for i in sent], [leaves.values[i] for i in sent]
    check_varying(settings.function, settings.ranks.net().names, paths, values, argument="updates")
    residuals = kept.residuals
    if settings.telemetry and not settings.feedback:  # telemetry needs residuals, which collect the errors
        zeros = lambda x: jnp.zeros((1, *x.shape), jnp.float32)
        residuals = [zeros(x) if each else None for x, each in zip(leaves.values, codecs)]
    masked = [settings.momentum_masking and bool(each) and "momentum" in each[0].state for each in codecs]
    shapes = [factor_shape(x, each or ()) for x, each in zip(leaves.values, codecs)]
    given = Kept(
        residuals=residuals,
        momentum=[u if has else None for u, has in zip(kept.momentum, masked)],
        factors=[shape and q[: shape[0]] for q, shape in zip(kept.factors, shapes)],
    )
    noise = key if plan.stochastic else None
    dimensions = [None if each is None else d for d, each in zip(settings.scattered or leaves.match(None), codecs)]
    found = _pmean(settings, plan, key=noise, leaves=leaves, given=given, dimensions=dimensions)
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
        # A rank has only its slice of the mean of a scattered leaf. Its own gradient takes the place of the mean.
        mean = [m if d is None else x for m, x, d in zip(found.mean, leaves.values, dimensions)]
        telemetry = measure(
            settings.ranks.net(), leaves, codecs=codecs, residuals=residuals, mean=mean, lost=found.kept.residuals
        )
    return Exchanged(found.mean, renewed, telemetry)


def _pmean(
    settings: Settings, plan: Plan, key: jax.Array | None, leaves: Leaves, given: Kept, dimensions: list[int | None]
) -> Exchanged:
    """Returns the mean of all ranks' leaves, and the new state.

    For a leaf with a dimension, the mean is only this rank's slice along this dimension.
    """

    def send(given: Kept) -> Exchanged:
        if not _any(dimensions):
            return _whole(settings, plan, key=key, leaves=leaves, given=given)
        slices, noise = functools.partial(_slices, dimensions=dimensions), fold(key, 0)
        found: list[Exchanged] = []
        for send_part, cut, words in ((_whole, False, key), (slices, True, noise)):
            take = lambda values, cut=cut: [x if (d is not None) == cut else None for x, d in zip(values, dimensions)]
            part = leaves._replace(values=take(leaves.values))
            # `encoders` has already checked with all leaves that each rule of the plan matches a leaf.
            found.append(send_part(settings, loose(plan), key=words, leaves=part, given=Kept(*map(take, given))))
        return jax.tree_util.tree_map(lambda x, y: y if x is None else x, *found, is_leaf=lambda x: x is None)

    if not _any(given.residuals):
        return send(given)
    # Donated residuals are overwritten in place if they keep the shape [1, ...]. Reshaping them would make two copies.
    rows = given._replace(factors=leaves.match(None))
    found = jax.vmap(lambda rows: send(rows._replace(factors=given.factors)))(rows)
    return found._replace(mean=[x.reshape(x.shape[1:]) for x in found.mean])


def _any(values: list[Any]) -> bool:
    return any(value is not None for value in values)


def _whole(settings: Settings, plan: Plan, key: jax.Array | None, leaves: Leaves, given: Kept) -> Exchanged:
    """Returns the compressed mean of whole leaves, and the new state."""
    trees = {name: leaves.tree(values) for name, values in given._asdict().items() if _any(values)}
    gradients = leaves.tree(leaves.values)
    travel = dict(order=_order(settings, leaves), slice_elements=settings.slice_elements, **settings.collective)
    found = settings.ranks.compressed_pmean(gradients, plan, State(**trees), key=key, **travel)
    named = dict(zip(("mean", *trees), found if trees else [found]))
    kept = Kept(**{name: leaves.match(named.get(name)) for name in Kept._fields})
    return Exchanged(leaves.match(named["mean"]), kept)


def _order(settings: Settings, leaves: Leaves) -> tuple[int, ...] | None:
    """Returns the order of the leaves that are not None, numbered without the others; or None if no order is set."""
    if settings.order is None:
        return None
    check_order(settings.function, settings.order, len(leaves.values))
    present = [i for i, value in enumerate(leaves.values) if value is not None]
    return tuple(present.index(i) for i in settings.order if i in present)


def _slices(
    settings: Settings, plan: Plan, key: jax.Array | None, leaves: Leaves, given: Kept, dimensions: list[int | None]
) -> Exchanged:
    """Returns this rank's slices of the mean, and the new residuals. There is no other state."""
    op, asked = "compressed_psum_scatter", settings.collective
    schedule = plan.schedule if asked["schedule"] == "auto" else asked["schedule"]
    fusion_mb = plan.fusion_mb if asked["fusion_mb"] is None else asked["fusion_mb"]
    options = Options(
        key=key,
        schedule="ring" if schedule == "ring" else "auto",
        own=asked["own"],
        strict=asked["strict"],
        fusion_mb=fusion_mb,
        join_raw=True,
    )
    dimension = Dimension(leaves.tree(dimensions), tiled=True)
    net = settings.ranks.net()
    scatter = Scatter(
        op, leaves.tree(leaves.values), net=net, codec=plan, options=options, dimension=dimension, mean=True
    )
    found = scatter.run(leaves.tree(given.residuals)) if _any(given.residuals) else (scatter.run(), None)
    none = leaves.match(None)
    return Exchanged(leaves.match(found[0]), Kept(leaves.match(found[1]), momentum=none, factors=none))
