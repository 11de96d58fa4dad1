"""Sums of low rank (codecs/powersgd.py): what ranks send are sums of factors, one of P and one of Q for a whole
message.

Each rank multiplies its own numbers with the factors; the sum that every rank makes of the sums of both is the same.
What a rank
lost is what the basis, which is everybody's, leaves of its own numbers. It is orthogonal to what was sent of them:
residuals stay
bounded, and over all ranks they are what is missing in the sum. (What others sent has no part in it; in the published
algorithm,
where a residual is the rank's numbers without the mean, differences between ranks pile up in residuals and cancel in
their sum.)

Of a hierarchy the inner ranks first sum, whole, with their own codecs; each has then all of what the node lost, and
keeps a share.
"""

import math

import jax
import jax.numpy as jnp

from jaxcgx import _compat
from jaxcgx.codecs.checks import check_codec
from jaxcgx.codecs.powersgd import begin, left, matrix, multiply, orthonormal, right
from jaxcgx.exchange import hierarchy, scopes
from jaxcgx.plan import Plan
from jaxcgx.plan.leaves import factor_shape

_LARGE = 2**20  # elements


def init_factors(x, codec):
    """`factors` for a first call: zeros, in a tree like `x`, and None for leaves that have none.

    x: a pytree of arrays or jax.ShapeDtypeStruct. codec: that of the call.
    """
    op = "init_factors"
    found, tree = jax.tree_util.tree_flatten_with_path(x)
    paths, leaves = [path for path, _ in found], [leaf for _, leaf in found]
    if isinstance(codec, Plan):
        chosen = [given for given, _ in codec.assign(op, "codec", paths, leaves)]
    else:
        chosen = [codec if isinstance(codec, dict) else check_codec(op, codec)] * len(leaves)
    shapes = [
        factor_shape(leaf, list(given.values()) if isinstance(given, dict) else [given])
        for leaf, given in zip(leaves, chosen)
    ]
    return tree.unflatten([None if shape is None else jnp.zeros(shape, jnp.float32) for shape in shapes])


def allreduce(stages, leaves, residuals, factors, ids, key, schedule, own, divisor):
    """The leaves' sum over all stages, outermost first, divided by `divisor`; new residuals, if there were any; new
    factors."""
    (net, codec), inner = stages[0], math.prod(part.size for part, _ in stages[1:])
    terms = [[x.astype(jnp.float32) for x in leaves]] + ([residuals] if residuals is not None else [])
    if inner > 1:
        terms = [hierarchy.sum_inside(stages, [sum(each) for each in zip(*terms)], ids, key, schedule, own)]
    # matrices of one shape are multiplied together, and compile as one; large ones would have to be copied for that
    alike = {}
    for i, x in enumerate(leaves):
        alike.setdefault((matrix(x.shape), i if x.size > _LARGE else None), []).append(i)
    # Of products the sum, not products of the sum: that is no array of its own.
    matrices = [
        [jnp.stack([term[i].reshape(shape) for i in each]) for term in terms] for (shape, _), each in alike.items()
    ]
    if factors is None:
        warm = [jnp.zeros((len(each), *codec.factor_shape(shape)), jnp.float32) for (shape, _), each in alike.items()]
    else:
        warm = [jnp.stack([factors[i] for i in each]) for each in alike.values()]
    saving = sum(x.size * x.dtype.itemsize for x in leaves) / sum(codec.wire_bytes(x.shape, x.dtype) for x in leaves)
    with scopes.scope(scopes.Exchange("psum", codec, saving)):
        first = [begin(q) for q in warm]
        bases = [
            orthonormal(p) for p in _psum(net, [sum(left(x, q) for x in each) for each, q in zip(matrices, first)])
        ]
        mine = [sum(right(basis, x) for x in each) for basis, each in zip(bases, matrices)]
        found = [q / divisor for q in _psum(net, mine)]
    results, lost, new = [None] * len(leaves), [None] * len(leaves), [None] * len(leaves)
    for each, given, basis, own_q, q, old in zip(alike.values(), matrices, bases, mine, found, warm):
        total, gone = multiply(basis, q), (sum(given) - multiply(basis, own_q)) / inner
        q = jnp.where(jnp.isfinite(q).all((1, 2), keepdims=True), q, old)
        for k, i in enumerate(each):
            results[i], new[i] = total[k].reshape(leaves[i].shape), q[k]
            if residuals is not None:
                lost[i] = jnp.where(jnp.isfinite(results[i]), gone[k].reshape(leaves[i].shape), residuals[i])
    return [y.astype(x.dtype) for y, x in zip(results, leaves)], None if residuals is None else lost, new


def _psum(net, arrays):
    """Their sums, by one collective."""
    flat = net.plain_psum(jnp.concatenate([x.reshape(-1) for x in _compat.match_varying(*arrays)]))
    ends = [sum(x.size for x in arrays[: k + 1]) for k in range(len(arrays))]
    return [flat[end - x.size : end].reshape(x.shape) for end, x in zip(ends, arrays)]
