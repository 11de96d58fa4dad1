"""What gradients lose when they are encoded, leaf by leaf and codec by codec: what a plan chooses bits by
(Plan.adapt)."""

import collections

import jax
import jax.numpy as jnp
from jax import lax

from jaxcgx.checks import check_varying
from jaxcgx.codecs.checks import check_codec, check_key
from jaxcgx.codecs.coding import roundtrip
from jaxcgx.codecs.maxmin import MaxMin
from jaxcgx.plan.leaves import spell_path, why_unfit
from jaxcgx.plan.statistics import TOP, GradientStatistics
from jaxcgx.transports.resolve import check_axes


def gradient_statistics(grads, axis_name=None, codecs=tuple(MaxMin(bits) for bits in range(2, 9)), *, key=None):
    """Of every leaf the squared error of every codec, and its squared norm, for `Plan.adapt`.

    grads: a pytree of this rank's gradients. axis_name: sums over that axis (or a tuple of them) by lax.psum, so that
    every rank
    has the same numbers and chooses alike. codecs: the candidates. key: a random key, if one of them draws noise.

    Statistics of several steps add up: `statistics + gradient_statistics(...)`.
    """
    op = "gradient_statistics"
    if not isinstance(codecs, (tuple, list)) or not codecs:
        raise TypeError(f"{op}: argument 'codecs': expected a list of codecs, got {codecs!r}")
    for codec in codecs:
        check_key(op, check_codec(op, codec, "codecs"), key)
    net = None if axis_name is None else check_axes(op, axis_name)
    if key is not None and net is not None:  # ranks draw independent noise
        key = jax.random.fold_in(key, net.rank)
    found = [(path, jnp.asarray(leaf)) for path, leaf in jax.tree_util.tree_flatten_with_path(grads)[0]]
    found = [(path, leaf) for path, leaf in found if not why_unfit(leaf)]
    if not found:
        raise ValueError(
            f"{op}: argument 'grads': expected a float32, bfloat16 or float16 array among the leaves, got none"
        )
    paths, leaves = zip(*found)
    names = tuple(map(spell_path, paths))
    if twice := [name for name, n in collections.Counter(names).items() if n > 1]:
        raise ValueError(
            f"{op}: argument 'grads': expected leaves of different paths, got several whose path is {twice[0]!r}, which "
            "no "
            "rule could tell apart; rename one"
        )
    if net is not None:
        check_varying(op, net.names, paths, leaves, argument="grads")
    keys = [None if key is None else jax.random.fold_in(key, i) for i in range(len(leaves))]
    rows = jnp.stack([_row(leaf, codecs, key) for leaf, key in zip(leaves, keys)])
    if net is not None:
        rows = net.plain_psum(rows)
    n = len(codecs)
    return GradientStatistics(
        rows[:, :n],
        rows[:, n],
        rows[:, n + 1],
        names,
        tuple(leaf.shape for leaf in leaves),
        tuple(str(leaf.dtype) for leaf in leaves),
        tuple(codecs),
    )


def _row(x, codecs, key):
    """float32[codecs + 2]: squared errors, the squared norm, that of the largest magnitudes."""
    exact = x.astype(jnp.float32)
    errors = [roundtrip(x, codec, key if codec.stochastic else None).astype(jnp.float32) - exact for codec in codecs]
    top = lax.top_k(jnp.abs(exact.reshape(-1)), min(TOP, x.size))[0]
    return jnp.stack([jnp.square(e).sum() for e in (*errors, exact, top)])
