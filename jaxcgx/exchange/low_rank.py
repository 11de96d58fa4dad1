"""Sums of low rank (codecs/powersgd.py): the ranks send sums of factors, one sum of P and one of Q for a whole message.

Each rank multiplies its own numbers with the factors, and every rank computes the same result from the two sums. A rank
loses what the basis, which all ranks share, leaves of its own numbers. That is orthogonal to what was sent of them, so
residuals stay bounded; summed over the ranks they are what the sum misses. (What other ranks sent has no part in it. In
the published algorithm a residual is the rank's numbers minus the mean; differences between ranks then pile up in the
residuals and cancel in their sum.)

In a hierarchy the inner ranks first sum whole leaves with their own codecs. Each then has everything that the node
lost, and keeps a share.
"""

import math
from typing import Any, NamedTuple

import jax.numpy as jnp

from jaxcgx import _compat
from jaxcgx.codecs.powersgd import begin, left, matrix, multiply, orthonormal, right
from jaxcgx.exchange import hierarchy, scopes
from jaxcgx.exchange.message import Message, Sum
from jaxcgx.transports.base import Transport

_LARGE = 2**20  # elements


class _Stack(NamedTuple):
    """Leaves that are matrices of one shape. They are multiplied together and compile as one."""

    ids: list[int]  # positions in the message
    terms: list[Any]  # float32[leaves, m, n], whose sum is to be sent: the leaves, and their residuals
    q: Any  # float32[leaves, rank, n], of the step before


def allreduce(stages: hierarchy.Stages, message: Message, how: Sum) -> Message:
    """The leaves' sum over all stages, outermost first, divided, with the new residuals and factors."""
    net, codec, inner = stages[0].net, stages[0].codec, math.prod(stage.net.size for stage in stages[1:])
    terms = [[x.astype(jnp.float32) for x in message.leaves]]
    if message.residuals is not None:
        terms.append(message.residuals)
    if inner > 1:
        whole = message.replace(leaves=[sum(each) for each in zip(*terms)])
        terms = [hierarchy.sum_inside(stages, whole, how.own)]
    stacks = _stacks(codec, message, terms)
    uncompressed = sum(x.size * x.dtype.itemsize for x in message.leaves)
    saving = uncompressed / sum(codec.wire_bytes(x.shape, x.dtype) for x in message.leaves)
    with scopes.scope(scopes.Exchange("psum", codec, saving)):
        starts = [begin(stack.q) for stack in stacks]
        products = [sum(left(x, q) for x in stack.terms) for stack, q in zip(stacks, starts)]
        bases = [orthonormal(p) for p in _psum(net, products)]
        mine = [sum(right(basis, x) for x in stack.terms) for basis, stack in zip(bases, stacks)]
        found = [q / how.divisor for q in _psum(net, mine)]
    leaves, lost, factors = ([None] * len(message.leaves) for _ in range(3))
    for stack, basis, own_q, q in zip(stacks, bases, mine, found):
        total, gone = multiply(basis, q), (sum(stack.terms) - multiply(basis, own_q)) / inner
        q = jnp.where(jnp.isfinite(q).all((1, 2), keepdims=True), q, stack.q)
        for k, i in enumerate(stack.ids):
            x = message.leaves[i]
            sums, factors[i] = total[k].reshape(x.shape), q[k]
            leaves[i] = sums.astype(x.dtype)
            if message.residuals is not None:
                lost[i] = jnp.where(jnp.isfinite(sums), gone[k].reshape(x.shape), message.residuals[i])
    return Message(
        message.ids,
        leaves,
        residuals=None if message.residuals is None else lost,
        factors=None if message.factors is None else factors,
    )


def _stacks(codec: Any, message: Message, terms: list) -> list[_Stack]:
    """The leaves by shape. Large ones are alone: stacking would copy them."""
    alike: dict = {}
    for i, x in enumerate(message.leaves):
        alike.setdefault((matrix(x.shape), i if x.size > _LARGE else None), []).append(i)
    stacks = []
    for (shape, _), ids in alike.items():
        # The sum of the products is formed, not the products of the sum, which would be one more array.
        stacked = [jnp.stack([term[i].reshape(shape) for i in ids]) for term in terms]
        if message.factors is None:
            q = jnp.zeros((len(ids), *codec.factor_shape(shape)), jnp.float32)
        else:
            q = jnp.stack([message.factors[i] for i in ids])
        stacks.append(_Stack(ids, stacked, q))
    return stacks


def _psum(net: Transport, arrays: list) -> list:
    """The sums of the arrays, by one collective."""
    flat = net.plain_psum(jnp.concatenate([x.reshape(-1) for x in _compat.match_varying(*arrays)]))
    ends = [sum(x.size for x in arrays[: k + 1]) for k in range(len(arrays))]
    return [flat[end - x.size : end].reshape(x.shape) for end, x in zip(ends, arrays)]
