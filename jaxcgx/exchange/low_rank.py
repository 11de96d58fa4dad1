"""Low-rank sums (codecs/powersgd.py): ranks sum only factors, all P of a message at once, then all Q.

All ranks share one basis. A rank's residual is its own numbers minus their projection on that basis. Both are
orthogonal, so residuals stay bounded. The sum of all ranks' residuals is the error of the sum. (In the published
algorithm, a residual is the rank's numbers minus the mean, so differences between ranks accumulate in it.)

In a hierarchy the inner ranks first sum whole leaves with their own codecs. Each inner rank then knows the whole loss
of its node, and keeps an equal share of it as its residual.
"""

import math
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from jaxcgx import _compat
from jaxcgx.codecs.base import LowRank
from jaxcgx.exchange import hierarchy, scopes
from jaxcgx.exchange.message import Message, Sum
from jaxcgx.transports.base import Transport

_LARGE = 2**20  # leaves with more elements are not stacked with others


class _Stack(NamedTuple):
    """Leaves whose matrices have the same shape, so that one operation multiplies all of them."""

    ids: list[int]  # positions in the message
    terms: list[jax.Array]  # float32[leaves, m, n]: the leaves, and their residuals; the sum of these terms is sent
    q: jax.Array  # float32[leaves, rank, n], from the previous step


def allreduce(stages: hierarchy.Stages, message: Message, how: Sum) -> Message:
    """Returns the divided sum of the leaves over all stages, outermost first, with the new residuals and factors."""
    codec, net = cast(LowRank, stages[0].codec), stages[0].net
    inner = math.prod(stage.net.size for stage in stages[1:])
    terms = [[x.astype(jnp.float32) for x in message.leaves]]
    if message.residuals is not None:
        terms.append(message.residuals)
    if inner > 1:
        whole = message.replace(leaves=[sum(each) for each in zip(*terms)])
        terms = [hierarchy.sum_inside(stages, whole, how.own)]
    stacks = _stacks(codec, message, terms)
    uncompressed = sum(x.size * x.dtype.itemsize for x in message.leaves)
    saving = uncompressed / sum(codec.wire_bytes(x.shape, x.dtype) for x in message.leaves)
    with scopes.scope(scopes.ExchangeScope("psum", codec, saving)):
        starts = [codec.begin(stack.q) for stack in stacks]
        products: list[Any] = [sum(codec.left(x, q) for x in stack.terms) for stack, q in zip(stacks, starts)]
        bases = [codec.orthonormal(p) for p in _psum(net, products)]
        mine: list[Any] = [sum(codec.right(basis, x) for x in stack.terms) for basis, stack in zip(bases, stacks)]
        found = [q / how.divisor for q in _psum(net, mine)]
    leaves: list[Any] = [None] * len(message.leaves)
    lost, factors = list(leaves), list(leaves)
    for stack, basis, own_q, q in zip(stacks, bases, mine, found):
        total, gone = codec.multiply(basis, q), (sum(stack.terms) - codec.multiply(basis, own_q)) / inner
        q = jnp.where(jnp.isfinite(q).all((1, 2), keepdims=True), q, stack.q)
        for k, i in enumerate(stack.ids):
            x = message.leaves[i]
            sums = total[k].reshape(x.shape)
            leaves[i], factors[i] = sums.astype(x.dtype), q[k]
            if message.residuals is not None:
                lost[i] = jnp.where(jnp.isfinite(sums), gone[k].reshape(x.shape), message.residuals[i])
    residuals = None if message.residuals is None else lost
    return Message(message.ids, leaves, residuals=residuals, factors=message.factors and factors)


def _stacks(codec: LowRank, message: Message, terms: list[list[Any]]) -> list[_Stack]:
    """Returns stacks of leaves with the same shape. Each large leaf has its own stack, because stacking copies."""
    alike: dict[Any, list[int]] = {}
    for i, x in enumerate(message.leaves):
        alike.setdefault((codec.matrix(x.shape), i if x.size > _LARGE else None), []).append(i)
    stacks: list[_Stack] = []
    for (shape, _), ids in alike.items():
        # Terms are multiplied one by one and their products are added. The sum of the terms would be one more array.
        stacked = [jnp.stack([term[i].reshape(shape) for i in ids]) for term in terms]
        if message.factors is None:
            q = jnp.zeros((len(ids), *codec.factor_shape(shape)), jnp.float32)
        else:
            q = jnp.stack([message.factors[i] for i in ids])
        stacks.append(_Stack(ids, stacked, q))
    return stacks


def _psum(net: Transport, arrays: list[Any]) -> list[jax.Array]:
    """Returns the sums of the arrays over ranks, from one collective."""
    flat, unravel = ravel_pytree(_compat.match_varying(*arrays))
    return unravel(net.plain_psum(flat))
