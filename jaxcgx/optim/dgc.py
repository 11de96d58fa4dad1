"""Deep Gradient Compression, and GeoMX's bidirectional sparsification: compress_gradients with the plans and the
momentum of these."""

import math
import numbers

import jax
import jax.numpy as jnp
from jax import lax

from jaxcgx import _compat
from jaxcgx.codecs.raw import Raw
from jaxcgx.codecs.topk import TopK
from jaxcgx.optim.compress import check_number, compress_gradients
from jaxcgx.plan import Plan
from jaxcgx.plan.by_axis import by_axis
from jaxcgx.transports.axes import axis_names
from jaxcgx.transports.resolve import check_axes

OP = "dgc"


def dgc(
    axis_name,
    ratio=0.001,
    *,
    momentum=0.9,
    nesterov=False,
    momentum_masking=True,
    values=Raw(),
    select="sampled",
    pull="all",
    min_size=0,
    skip_1d=True,
    clip_value=None,
    clip_norm=None,
    clip_global_norm=None,
    warmup_epochs=0,
    warmup_coeff=None,
    steps_per_epoch=None,
    weight_decay=None,
    **options,
):
    """Deep Gradient Compression, an optax.GradientTransformation: every rank sends the `ratio` of its elements that are
    largest after
    momentum and all that it has not sent before. The optimizer behind has no momentum of its own: optax.sgd(rate).

    axis_name: the axis of the ranks; of a tuple the inner axes sum everything, and the outermost one exchanges a
    `ratio` of that.
    momentum, nesterov, momentum_masking, weight_decay, and all other options: as in `compress_gradients`. values,
    select, pull: as in
    `TopK`. min_size, skip_1d: which leaves travel raw, as in a `Plan`; their momentum comes after the reduction.

    Clipping is of every rank's own gradients, before momentum. clip_value: elements, to so much either way. clip_norm:
    each leaf, to
    that norm. clip_global_norm: all leaves together, by what the norm of the mean should be at most: a rank's share of
    it, its
    gradients divided by the number of ranks, to ranks**-0.5 times that. (Without check_vma norms are of the shards of a
    device alone.)

    Warm-up: in the first `warmup_epochs`, of `steps_per_epoch` steps each, the ratio comes down to what it is.
    warmup_coeff: None
    for ratio**((epoch + 1) / (warmup_epochs + 1)); a number c for c**(epoch + 1), of which 0.25 is the paper's; or a
    list of the
    epochs' ratios, of which 1 sends everything.
    """
    _check_plan(OP, options, "ratio, values, select, pull, min_size and skip_1d")
    check_number(OP, "ratio", ratio, numbers.Real, lambda x: 0 < x < 1, "a number above 0 and below 1", static=True)
    limits = dict(clip_value=clip_value, clip_norm=clip_norm, clip_global_norm=clip_global_norm)
    for name, limit in limits.items():
        if limit is not None:
            check_number(OP, name, limit, numbers.Real, lambda x: x > 0, "a positive number")

    def plan(ratio):
        codec = values if ratio == 1 else TopK(ratio, values, select, pull)
        return Plan(by_axis(axis_names(axis_name), codec, Raw()), min_size=min_size, skip_1d=skip_1d)

    ratios = [*warm_up(ratio, warmup_epochs, warmup_coeff, steps_per_epoch), ratio]
    steps = {
        epoch * (steps_per_epoch or 1): plan(now)
        for epoch, now in enumerate(ratios)
        if epoch == 0 or now != ratios[epoch - 1]
    }
    inner = compress_gradients(
        axis_name,
        steps,
        momentum=momentum,
        nesterov=nesterov,
        momentum_masking=momentum_masking,
        weight_decay=weight_decay,
        **options,
    )

    def update(updates, state, params=None):
        return inner.update(_clip(updates, check_axes(OP, axis_name), **limits), state, params)

    return inner._replace(update=update)


def bsc(
    axis_name,
    threshold=0.01,
    size_bound=200_000,
    *,
    momentum=0.9,
    momentum_masking=True,
    pull="all",
    select="sampled",
    **options,
):
    """GeoMX's bidirectional sparsification, an optax.GradientTransformation: of leaves of more than `size_bound`
    elements every rank sends
    the `threshold` of its elements that are largest after momentum and all that it has not sent before. As `dgc`; the
    optimizer behind,
    any, should have no momentum of its own: optax.adam(rate, b1=0).

    axis_name: the axis of the data centers, or a tuple in which it is the outermost; the inner axes sum everything.
    pull: what
    comes back; "all" that any of them sent, or the "top" of the sum, the rest of which its owner keeps. select: as in
    `TopK`.
    All other options: as in `compress_gradients`.
    """
    _check_plan("bsc", options, "threshold, size_bound, pull and select")
    plan = Plan.bsc(threshold, size_bound, axis_name, pull, select)
    return compress_gradients(axis_name, plan, momentum=momentum, momentum_masking=momentum_masking, **options)


def _check_plan(op, options, made_of):
    if "plan" in options:
        raise TypeError(
            f"{op}: argument 'plan': expected none, as {made_of} make it, got {options['plan']!r}; another plan with "
            "momentum is for "
            "jaxcgx.compress_gradients"
        )


def warm_up(ratio, epochs, coeff, steps_per_epoch):
    """The ratio of each of the epochs."""
    check_number(
        OP, "warmup_epochs", epochs, numbers.Integral, lambda x: x >= 0, "an integer of at least 0", static=True
    )
    if not epochs:
        if not coeff is steps_per_epoch is None:
            raise ValueError(
                f"{OP}: argument 'warmup_epochs': expected a positive integer with 'warmup_coeff' or 'steps_per_epoch', "
                "got 0"
            )
        return []
    check_number(
        OP,
        "steps_per_epoch",
        steps_per_epoch,
        numbers.Integral,
        lambda x: x > 0,
        "a positive integer with 'warmup_epochs'",
        static=True,
    )
    if coeff is None:
        return [ratio ** ((epoch + 1) / (epochs + 1)) for epoch in range(epochs)]
    given = coeff if isinstance(coeff, (tuple, list)) else [coeff]
    for each in given:
        check_number(
            OP,
            "warmup_coeff",
            each,
            numbers.Real,
            lambda x: 0 < x <= 1,
            "a number above 0 and up to 1, or a list of them",
            static=True,
        )
    if given is not coeff:
        return [max(coeff ** (epoch + 1), ratio) for epoch in range(epochs)]
    if len(coeff) != epochs:
        raise ValueError(f"{OP}: argument 'warmup_coeff': expected a ratio for each of {epochs} epochs, got {coeff!r}")
    return list(coeff)


def _clip(grads, net, clip_value, clip_norm, clip_global_norm):
    """Every rank's own gradients."""

    def scale(limit, squares):
        return jnp.minimum(1, limit / jnp.maximum(jnp.sqrt(squares), jnp.finfo(jnp.float32).tiny))

    def square(g):
        """Of all of a leaf, which other axes of the mesh than the ranks' may cut."""
        found = jnp.square(g.astype(jnp.float32)).sum()
        axes = tuple(_compat.varying_axes(found) - set(net.names))
        return lax.psum(found, axes) if axes else found

    each = lambda change: jax.tree_util.tree_map(lambda g: change(g).astype(g.dtype), grads)
    if clip_value is not None:
        grads = each(lambda g: jnp.clip(g, jnp.asarray(-clip_value, g.dtype), jnp.asarray(clip_value, g.dtype)))
    if clip_norm is not None:
        grads = each(lambda g: g * scale(clip_norm, square(g)).astype(g.dtype))
    if clip_global_norm is not None:
        # The paper adds up gradients that are divided by the number of ranks already: N^-1/2 of the limit is for those.
        share = scale(clip_global_norm * math.sqrt(net.size), sum(map(square, jax.tree_util.tree_leaves(grads))))
        grads = each(lambda g: g * share.astype(g.dtype))
    return grads
