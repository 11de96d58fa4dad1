"""Measures gradients: whether all are finite, and for `Plan.adapt` the error of each codec on each leaf."""

import collections
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxcgx import _compat
from jaxcgx.checks import check_varying, wrong
from jaxcgx.codecs import Codec, MaxMin, roundtrip
from jaxcgx.codecs.checks import as_key, check_codec
from jaxcgx.exchange.resolve import transport_over_axes
from jaxcgx.plan.adapt import GradientStatistics
from jaxcgx.plan.leaves import spell_path, why_unfit
from jaxcgx.typing import AxisName, Key, PyTree

BITS_2_TO_8 = tuple(MaxMin(bits) for bits in range(2, 9))
TOP = 100  # the number of largest magnitudes whose norm is in `tops`, as in CGX


def gradient_statistics(
    grads: PyTree, axis_name: AxisName = None, codecs: Sequence[Codec] = BITS_2_TO_8, *, key: Key | None = None
) -> GradientStatistics:
    """Returns the squared error of every codec and the squared norm, leaf by leaf, for `Plan.adapt`.

    Statistics of several steps can be added: `statistics + gradient_statistics(...)`.

    Args:
      grads: a pytree of this rank's gradients.
      axis_name: an axis, or a tuple of axes, over which lax.psum adds the numbers. Every rank then has the same numbers
        and makes the same choice. None: the numbers are this rank's.
      codecs: the candidates.
      key: a random key, for codecs that round stochastically.
    """
    op = "gradient_statistics"
    if not isinstance(codecs, tuple | list) or not codecs:
        raise wrong(op, "codecs", "a list of codecs", repr(codecs), kind=TypeError)
    for codec in codecs:
        as_key(op, check_codec(op, codec, "codecs"), key)
    net = None if axis_name is None else transport_over_axes(op, axis_name)
    if key is not None and net is not None:  # ranks draw independent noise
        key = jax.random.fold_in(key, net.rank)
    paths, leaves = _measured(op, grads)
    if net is not None:
        check_varying(op, net.names, paths, leaves, argument="grads")
    keys = [None if key is None else jax.random.fold_in(key, i) for i in range(len(leaves))]
    rows = jnp.stack([_measure(leaf, codecs, key) for leaf, key in zip(leaves, keys)])
    if net is not None:
        rows = net.plain_psum(rows)
    n = len(codecs)
    return GradientStatistics(
        errors=rows[:, :n],
        norms=rows[:, n],
        tops=rows[:, n + 1],
        paths=tuple(map(spell_path, paths)),
        shapes=tuple(leaf.shape for leaf in leaves),
        dtypes=tuple(str(leaf.dtype) for leaf in leaves),
        codecs=tuple(codecs),
    )


def _measured(op: str, grads: PyTree) -> tuple[list[Any], list[jax.Array]]:
    """Returns (JAX paths, arrays) of the leaves that codecs can take. Their paths must differ."""
    found = [(path, jnp.asarray(leaf)) for path, leaf in jax.tree.flatten_with_path(grads)[0]]
    found = [(path, leaf) for path, leaf in found if not why_unfit(leaf)]
    if not found:
        raise wrong(op, "grads", "a float32, bfloat16 or float16 array among the leaves", "none")
    names = collections.Counter(spell_path(path) for path, _ in found)
    if twice := [name for name, n in names.items() if n > 1]:
        got = f"several whose path is {twice[0]!r}, which no rule could tell apart"
        raise wrong(op, "grads", "leaves of different paths", got, "rename one")
    return [path for path, _ in found], [leaf for _, leaf in found]


def _measure(x: jax.Array, codecs: Sequence[Codec], key: Key | None) -> jax.Array:
    """Returns float32[codecs + 2]: the squared errors, the squared norm, the squared norm of the largest magnitudes."""
    exact = x.astype(jnp.float32)
    errors = [roundtrip(x, codec, key if codec.stochastic else None).astype(jnp.float32) - exact for codec in codecs]
    top = jax.lax.top_k(jnp.abs(exact.reshape(-1)), min(TOP, x.size))[0]
    return jnp.stack([jnp.square(e).sum() for e in (*errors, exact, top)])


def all_finite(grads: PyTree, axis_name: AxisName) -> jax.Array:
    """Returns whether every element is finite on every rank of an axis, as bool[]. All ranks get the same answer.

    Pass gradients after their exchange: a mean may overflow though no rank's gradient does. Each rank sends 4 bytes.

    Args:
      grads: a pytree of arrays.
      axis_name: one name, or a tuple of names.
    """
    net = transport_over_axes("all_finite", axis_name)
    leaves = [x for x in map(jnp.asarray, jax.tree.leaves(grads)) if jnp.issubdtype(x.dtype, jnp.inexact)]
    bad = sum(((~jnp.isfinite(x)).any().astype(jnp.int32) for x in leaves), jnp.int32(0))
    # The axes of the mesh over which the gradients are sharded, in the same order in every process.
    if shards := tuple(sorted(_compat.varying_axes(bad) - set(net.names), key=str)):
        bad = jax.lax.psum(bad, shards)
    return net.plain_psum(_compat.vary_over(bad, net.names)) == 0
